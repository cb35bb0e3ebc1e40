"""Startup, liveness and readiness probes over http, tcp and exec."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import aiohttp

from pagefleet_localcluster.objects import Object

MAX_BODY_BYTES = 10 << 10
"""What is read of an http answer; the rest is dropped with the connection."""

Exec = Callable[[list[str], float], Awaitable[tuple[int, str]]]
"""Runs a command beside the container: (argv, timeout in seconds) -> (exit code, output). Raises TimeoutError."""


@dataclass(frozen=True)
class ProbeTarget:
    """Where a container's probes go."""

    address: str
    """The pod's address."""
    container: Object
    http: aiohttp.ClientSession
    run: Exec


@dataclass(frozen=True)
class ProbeOutcome:
    """One attempt."""

    ok: bool
    message: str = ""
    """Kubernetes' words for the failure."""


async def attempt(probe: Object, target: ProbeTarget) -> ProbeOutcome:
    """One attempt within `timeoutSeconds`. What cannot be attempted has failed."""
    try:
        return await _attempt(probe, target)
    except ValueError as error:
        return ProbeOutcome(False, str(error))


async def _attempt(probe: Object, target: ProbeTarget) -> ProbeOutcome:
    timeout = float(probe.get("timeoutSeconds") or 1)
    if (http := probe.get("httpGet")) is not None:
        return await _http(http, target, timeout)
    if (tcp := probe.get("tcpSocket")) is not None:
        return await _tcp(tcp.get("host") or target.address, port_number(tcp["port"], target.container), timeout)
    if (command := probe.get("exec")) is not None:
        try:
            code, output = await target.run(list(command["command"]), timeout)
        except TimeoutError:
            return ProbeOutcome(False, f"command timed out: {command['command']!r} timed out after {timeout:g}s")
        return ProbeOutcome(code == 0, output[-MAX_BODY_BYTES:])
    return ProbeOutcome(False, f"a process node has no {', '.join(sorted(set(probe) & {'grpc'})) or 'such'} probe")


async def watch_probe(
    probe: Object, target: ProbeTarget, *, on_success: Callable[[], bool], on_failure: Callable[[str, bool], bool]
) -> None:
    """Attempt a probe every `periodSeconds` after `initialDelaySeconds`.

    `on_success()` is called once `successThreshold` attempts in a row have succeeded, `on_failure(message, reached)`
    after every failed one, `reached` when they are `failureThreshold` in a row. Either ends the watch by True."""
    period = float(probe.get("periodSeconds") or 10)
    needed = {True: int(probe.get("successThreshold") or 1), False: int(probe.get("failureThreshold") or 3)}
    last, run = True, 0
    await asyncio.sleep(float(probe.get("initialDelaySeconds") or 0))
    loop = asyncio.get_running_loop()
    while True:
        started = loop.time()
        outcome = await attempt(probe, target)
        run = run + 1 if outcome.ok == last else 1
        last = outcome.ok
        reached = run >= needed[last]
        if last and reached and on_success():
            return
        if not last and on_failure(outcome.message, reached):
            return
        await asyncio.sleep(max(0.0, started + period - loop.time()))


def port_number(port: int | str, container: Object) -> int:
    """A probe's port: a number, or the name of one of the container's ports. Raises ValueError."""
    if isinstance(port, int):
        return port
    for candidate in container.get("ports") or ():
        if candidate.get("name") == port:
            return int(candidate["containerPort"])
    if not port.isdigit():
        raise ValueError(f"couldn't find port: {port!r} in the ports of container {container['name']!r}")
    return int(port)


async def _tcp(host: str, port: int, timeout: float) -> ProbeOutcome:
    try:
        async with asyncio.timeout(timeout):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return ProbeOutcome(False, f"dial tcp {host}:{port}: i/o timeout")
    except OSError:
        return ProbeOutcome(False, f"dial tcp {host}:{port}: connect: connection refused")
    writer.transport.abort()
    return ProbeOutcome(True)


async def _http(http: Object, target: ProbeTarget, timeout: float) -> ProbeOutcome:
    scheme = str(http.get("scheme") or "HTTP").lower()
    host, port = http.get("host") or target.address, port_number(http["port"], target.container)
    path = "/" + str(http.get("path") or "/").lstrip("/")
    url = f"{scheme}://{host}:{port}{path}"
    headers = {"User-Agent": "kube-probe/1.36", "Accept": "*/*", "Connection": "close"}
    headers |= {header["name"]: header["value"] for header in http.get("httpHeaders") or ()}
    trust: ssl.SSLContext | bool = scheme != "https"
    try:
        async with target.http.get(
            url, headers=headers, ssl=trust, allow_redirects=False, timeout=aiohttp.ClientTimeout(total=timeout)
        ) as response:
            await response.content.read(MAX_BODY_BYTES)
            if 200 <= response.status < 400:
                return ProbeOutcome(True)
            return ProbeOutcome(False, f"HTTP probe failed with statuscode: {response.status}")
    except TimeoutError:
        why = "context deadline exceeded (Client.Timeout exceeded while awaiting headers)"
    except aiohttp.ClientConnectorError:
        why = f"dial tcp {host}:{port}: connect: connection refused"
    except (aiohttp.ClientError, ConnectionError) as error:
        why = str(error) or type(error).__name__
    return ProbeOutcome(False, f'Get "{url}": {why}')
