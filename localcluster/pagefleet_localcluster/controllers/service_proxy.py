"""Answers on every Service's own loopback address: each connection goes to a random ready pod."""

import asyncio
import contextlib
import ipaddress
import logging
import random
from dataclasses import dataclass, field

from pagefleet_localcluster.client import Client
from pagefleet_localcluster.controllers.backends import backends_of
from pagefleet_localcluster.event_recorder import EventRecorder
from pagefleet_localcluster.objects import Object, is_deleted, key_of
from pagefleet_localcluster.reflector import Reflector

logger = logging.getLogger(__name__)

SERVICE_RANGE = ipaddress.ip_network("127.96.0.0/16")
"""The addresses that Services of a local cluster get."""

CHUNK_BYTES = 64 << 10
CONNECT_TIMEOUT_SECONDS = 3.0
MAX_CONNECT_TRIES = 3
UNPRIVILEGED_OFFSET = 10000
"""Where the operating system refuses a port below 1024, the Service is served on this much more."""


@dataclass
class _Listener:
    """One Service port. It accepts only while there is a ready pod, so that clients see a refused connection."""

    address: tuple[str, int]
    targets: list[tuple[str, int]] = field(default_factory=list)
    server: asyncio.Server | None = None


class ServiceProxy:
    """Keeps one listener for each TCP port of each Service with an address in SERVICE_RANGE."""

    def __init__(self, client: Client, services: Reflector, pods: Reflector, *, rng: random.Random) -> None:
        self.services = services
        self._pods = pods
        self._rng = rng
        self._listeners: dict[tuple[str, str], _Listener] = {}
        self._connections: set[asyncio.Task[None]] = set()
        self.events = EventRecorder(client, "service-proxy")

    async def reconcile(self, key: str) -> float | None:
        """Bring the listeners of the Service `key` in line with it and its ready pods."""
        service = self.services.objects.get(key)
        wanted = _addresses(service) if service is not None and not is_deleted(service) else {}
        backends = backends_of(service, self._pods.objects.values()) if service is not None else []
        for owner, port_name in list(self._listeners):
            if owner == key and wanted.get(port_name) != self._listeners[owner, port_name].address:
                self._close(self._listeners.pop((owner, port_name)))
        again = None
        for port_name, address in wanted.items():
            listener = self._listeners.setdefault((key, port_name), _Listener(address))
            listener.targets = [
                (backend.pod["status"]["podIP"], number)
                for backend in backends
                for name, number, _ in backend.ports
                if backend.ready and name == port_name
            ]
            if listener.targets and listener.server is None:
                if not await self._open(listener, service or {}):
                    again = 5.0
            elif not listener.targets:
                self._close(listener)
        return again

    async def close(self) -> None:
        """Stop listening and end every connection."""
        for listener in self._listeners.values():
            self._close(listener)
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _open(self, listener: _Listener, service: Object) -> bool:
        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.get_running_loop().create_task(self._serve(listener, reader, writer))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

        host, port = listener.address
        try:
            listener.server = await asyncio.start_server(accept, host, port, limit=CHUNK_BYTES, backlog=1024)
        except PermissionError:
            other = port + UNPRIVILEGED_OFFSET
            message = f"port {port} needs privileges on this machine: listening on {host}:{other} instead"
            self._say(service, "PrivilegedPort", message)
            listener.server = await asyncio.start_server(accept, host, other, limit=CHUNK_BYTES, backlog=1024)
        except OSError as error:
            self._say(service, "FailedToListen", f"cannot listen on {host}:{port}: {error.strerror}")
            return False
        return True

    def _say(self, service: Object, reason: str, message: str) -> None:
        logger.warning("service %s: %s", key_of(service), message)
        self.events.record(service, "v1", "Service", type="Warning", reason=reason, message=message)

    @staticmethod
    def _close(listener: _Listener) -> None:
        if listener.server is not None:
            listener.server.close()
            listener.server = None

    async def _serve(self, listener: _Listener, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            upstream = await self._connect(listener)
            if upstream is None:
                writer.transport.abort()
                return
            up_reader, up_writer = upstream
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(_pump(reader, up_writer))
                    group.create_task(_pump(up_reader, writer))
            except* OSError:  # either side was reset: reset the other
                up_writer.transport.abort()
                writer.transport.abort()
            finally:
                up_writer.close()
        finally:
            writer.close()

    async def _connect(self, listener: _Listener) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """A connection to a random ready pod; another one when the first refuses."""
        for host, port in self._rng.sample(listener.targets, min(MAX_CONNECT_TRIES, len(listener.targets))):
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(CONNECT_TIMEOUT_SECONDS):
                    return await asyncio.open_connection(host, port, limit=CHUNK_BYTES)
        return None


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy one direction until its end, then close only that direction. `drain` bounds what is held."""
    while data := await reader.read(CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


def _addresses(service: Object) -> dict[str, tuple[str, int]]:
    """Port name -> (cluster IP, port) of the TCP ports that the proxy serves."""
    address = service["spec"].get("clusterIP") or "None"
    if address == "None" or ipaddress.ip_address(address) not in SERVICE_RANGE:
        return {}
    return {
        port.get("name", ""): (address, int(port["port"]))
        for port in service["spec"].get("ports") or ()
        if port.get("protocol", "TCP") == "TCP"
    }
