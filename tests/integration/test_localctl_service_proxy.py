"""Connections through a Service's address: whole, half-closed, refused, and never more than a bounded buffer."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from pagefleet_localcluster.client import PODS, SERVICES, Client
from pagefleet_localcluster.controllers.service_proxy import ServiceProxy
from pagefleet_localcluster.kubeconfig import Kubeconfig
from pagefleet_localcluster.objects import Object, key_of
from pagefleet_localcluster.reflector import Reflector
from support.localcluster_builders import pod, service

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
RNG = random.Random()


@asynccontextmanager
async def proxied(handler: Handler) -> AsyncIterator[tuple[ServiceProxy, Reflector, str, int]]:
    """A proxy with one Service and one ready pod, whose server is `handler`: (proxy, pods, address, port)."""
    third, fourth, port = RNG.randrange(256), RNG.randrange(1, 255), RNG.randrange(20000, 60000)
    client = Client(Kubeconfig("http://127.0.0.1:9"))
    services, pods = Reflector(client, SERVICES), Reflector(client, PODS)
    served = service(port=port, target=port, clusterIP=f"127.96.{third}.{fourth}")
    backend = pod("a", address=f"127.95.{third}.{fourth}")
    services.objects[key_of(served)], pods.objects[key_of(backend)] = served, backend
    proxy = ServiceProxy(client, services, pods, rng=random.Random(0))
    server = await asyncio.start_server(handler, backend["status"]["podIP"], port)
    try:
        async with server:
            await proxy.reconcile(key_of(served))
            yield proxy, pods, served["spec"]["clusterIP"], port
    finally:
        await proxy.close()


async def echo_after_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers only when the request has ended: proves that a half-close is passed on and leaves the other half open."""
    writer.write(await reader.read())
    writer.close()


async def test_half_close_is_passed_on() -> None:
    async with proxied(echo_after_end) as (_, _, address, port):
        reader, writer = await asyncio.open_connection(address, port)
        sent = random.Random(1).randbytes(3 << 20)
        writer.write(sent)
        writer.write_eof()
        assert await reader.read() == sent
        writer.close()


async def test_a_reader_that_stops_holds_the_sender_back() -> None:
    """Only socket buffers fill: the pod's writer waits until the client reads again."""
    total, written = 64 << 20, 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        chunk = bytes(1 << 20)
        while written < total:
            writer.write(chunk)
            await writer.drain()
            written += len(chunk)
        writer.close()

    async with proxied(flood) as (_, _, address, port):
        reader, writer = await asyncio.open_connection(address, port, limit=1 << 16)
        before = -1
        while before != written:
            before = written
            await asyncio.sleep(0.1)
        assert written < total // 2
        received = 0
        while data := await reader.read(1 << 20):
            received += len(data)
        assert received == total
        writer.close()


async def test_a_client_that_goes_away_ends_the_pods_connection() -> None:
    ended = asyncio.Event()

    async def wait_for_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        ended.set()
        writer.close()

    async with proxied(wait_for_end) as (_, _, address, port):
        _, writer = await asyncio.open_connection(address, port)
        writer.transport.abort()
        async with asyncio.timeout(60):
            await ended.wait()


async def test_refused_without_a_ready_pod_and_open_again_with_one() -> None:
    async with proxied(echo_after_end) as (proxy, pods, address, port):
        ready = pods.objects["default/a"]
        pods.objects["default/a"] = pod("a", address=ready["status"]["podIP"], ready=False)
        await proxy.reconcile("default/web")
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(address, port)
        pods.objects["default/a"] = ready
        await proxy.reconcile("default/web")
        reader, writer = await asyncio.open_connection(address, port)
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()


async def test_a_pod_that_does_not_answer_is_passed_over() -> None:
    """Of two ready pods one refuses: every connection still reaches the other."""
    async with proxied(echo_after_end) as (proxy, pods, address, port):
        pods.objects["default/b"] = pod("b", address="127.95.255.254")
        await proxy.reconcile("default/web")
        for _ in range(20):
            reader, writer = await asyncio.open_connection(address, port)
            writer.write(b"x")
            writer.write_eof()
            assert await reader.read() == b"x"
            writer.close()


async def test_a_port_that_needs_privileges_is_served_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a user who may not bind port 80: the Service answers on port + 10000 and an event says so."""
    start_server = asyncio.start_server

    async def unprivileged(accept: Handler, host: str, port: int, **options: int) -> asyncio.Server:
        if port < 1024:
            raise PermissionError(13, "Permission denied")
        return await start_server(accept, host, port, **options)

    async with proxied(echo_after_end) as (proxy, _, address, port):
        monkeypatch.setattr(asyncio, "start_server", unprivileged)
        served = service(port=80, target=port, clusterIP=address)
        proxy.services.objects["default/web"] = served
        await proxy.reconcile("default/web")
        reader, writer = await asyncio.open_connection(address, 10080)
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()


async def test_a_deleted_service_stops_listening() -> None:
    async with proxied(echo_after_end) as (proxy, _, address, port):
        gone: dict[str, Object] = {}
        proxy.services.objects = gone
        await proxy.reconcile("default/web")
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(address, port)
