"""The way from here to a deployment's Service: a given URL, an address that this machine reaches, or a port-forward."""

import asyncio
import ipaddress
import re
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from pagefleet_plugin.errors import PluginError
from pagefleet_plugin.kubectl import Kubectl

READY_SECONDS = 15.0
FORWARDING = re.compile(r"Forwarding from 127\.0\.0\.1:(\d+) ")
STOP_SECONDS = 5.0


@asynccontextmanager
async def open_endpoint(kubectl: Kubectl, name: str, *, url: str | None) -> AsyncIterator[str]:
    """Base URL of the Service `name`, valid inside the context. Raises PluginError when there is none."""
    if url is not None:
        yield url.rstrip("/")
        return
    service = await kubectl.get_json("service", name)
    spec = service.get("spec") or {}
    ports = spec.get("ports") or []
    if not ports:
        raise PluginError(f"service {name} has no port")
    port = int(ports[0]["port"])
    if _is_loopback(str(spec.get("clusterIP", ""))):
        # A cluster on this machine alone: its Services listen on loopback addresses.
        yield f"http://{spec['clusterIP']}:{port}"
        return
    async with _port_forward(kubectl, name, port) as local:
        yield f"http://127.0.0.1:{local}"


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


@asynccontextmanager
async def _port_forward(kubectl: Kubectl, name: str, port: int) -> AsyncIterator[int]:
    process = await asyncio.create_subprocess_exec(
        *kubectl.command("port-forward", f"service/{name}", f":{port}", "--address", "127.0.0.1"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    drain: asyncio.Task[None] | None = None
    try:
        local = await asyncio.wait_for(_forwarded_port(process, name), READY_SECONDS)
        drain = asyncio.create_task(_discard(process))
        yield local
    except TimeoutError:
        raise PluginError(f"kubectl port-forward service/{name} was not ready within {READY_SECONDS:.0f} s") from None
    finally:
        if drain is not None:
            drain.cancel()
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), STOP_SECONDS)
            except TimeoutError:
                process.kill()
                await process.wait()


async def _forwarded_port(process: asyncio.subprocess.Process, name: str) -> int:
    assert process.stdout is not None  # asked for above
    said: deque[str] = deque(maxlen=5)
    while line := (await process.stdout.readline()).decode(errors="replace"):
        if found := FORWARDING.match(line):
            return int(found.group(1))
        said.append(line.strip())
    raise PluginError(f"kubectl port-forward service/{name} ended: {' '.join(said)[:500]}")


async def _discard(process: asyncio.subprocess.Process) -> None:
    """Keep the pipe empty: kubectl prints a line per connection."""
    assert process.stdout is not None
    while await process.stdout.readline():
        pass
