"""How fast probes answer while the server is full and long prompts come in.

    python benchmarks/api_health.py [--streams 512] [--seconds 20] [--bytes 5000000]

The server's engine is the real process around a runner without a model (tests/support), so the API process is what is
measured. Streams keep `--streams` requests in flight; beside them, prompts of `--bytes` bytes are posted without end,
once as one text, which is tokenised, once as a list of more token ids than fit, and once as one that fits, whose client
leaves after a second. They come from a process of low priority:
elsewhere clients have machines of their own. Probes are asked by another process, one after the other. Goal: no answer
of /livez, /readyz, /startupz takes 50 ms.

What the machine did is told apart from what the server did, because cores are shared: for each probe, how long the
prober and the server's thread were ready to run and had no CPU (Linux's schedstat). `the server's own` is a probe's
time without these two, about what it takes with a core for each (time that both wait at once is taken off twice). Where
`without a CPU` is more than a few per cent, the whole times are the machine's. In front of the probes: the CPU time of
the longest turn of the event loop while the costliest bodies of 4 MiB are read.
"""

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
from pydantic import BaseModel

from pagefleet_server.api.errors import BadRequestError
from pagefleet_server.api.garbage import spare_the_loop
from pagefleet_server.api.large_body import parse_body
from pagefleet_server.api.protocol.chat import ChatBody
from pagefleet_server.api.protocol.completions import CompletionBody

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path.insert(0, str(TESTS))

from support.api_server import Talk, memory_server  # noqa: E402  # the folder is put on the path above

PROBES = ("/livez", "/readyz", "/startupz")
GOAL_MS = 50.0
PAUSE_SECONDS = 0.005


@dataclass(frozen=True)
class Load:
    """What goes on beside the probes."""

    name: str
    path: str
    body: bytes
    leaves: bool = False
    """The prompt fits; its client goes after a second and comes again. Else it is refused."""


@dataclass(frozen=True)
class Probe:
    """One answer; all in ms."""

    took: float
    prober_waited: float
    """Of it, so long this process was ready to run and had no CPU."""
    server_waited: float
    """The same of the server's main thread."""

    @property
    def own(self) -> float:
        """What is left for the server."""
        return max(0.0, self.took - self.prober_waited - self.server_waited)


def main() -> None:
    """Print one line for each load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--bytes", type=int, default=5_000_000)
    parser.add_argument("--probe", help=argparse.SUPPRESS)
    parser.add_argument("--pid", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--load", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load is not None:
        os.nice(10)
        asyncio.run(make_load(options.probe, make_loads(options.bytes)[options.load], options.streams))
    elif options.probe:
        print(json.dumps([asdict(probe) for probe in ask_probes(options.probe, options.pid, options.seconds)]))
    else:
        bodies = make_bodies()
        spare_the_loop()  # as the server does when it has loaded everything
        for name, raw, kind in bodies:
            print(f"longest turn {asyncio.run(longest_turn_ms(raw, kind)):5.1f} ms CPU: {name}", flush=True)
        asyncio.run(measure(options))


def ask_probes(base_url: str, server_pid: int, seconds: float) -> list[Probe]:
    """One after the other, in this process alone."""
    host, port = base_url.removeprefix("http://").split(":")
    probes: list[Probe] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for path in PROBES:
            prober, server = read_wait_ms(os.getpid()), read_wait_ms(server_pid)
            begun = time.perf_counter()
            with socket.create_connection((host, int(port))) as connection:  # as the kubelet: a new one each time
                connection.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
                answer = b"".join(iter(lambda: connection.recv(65536), b""))
            took = (time.perf_counter() - begun) * 1000
            assert answer.startswith(b"HTTP/1.1 200 "), answer
            probes.append(Probe(took, read_wait_ms(os.getpid()) - prober, read_wait_ms(server_pid) - server))
        time.sleep(PAUSE_SECONDS)
    return probes


def make_bodies() -> list[tuple[str, bytes, type[BaseModel]]]:
    """Just below 4 MiB, or just below a bound on values."""
    ids = [number % 50_000 for number in range(700_000)]
    parts = [{"type": "text", "text": "a"}] * 16_000
    bodies: list[tuple[str, object, type[BaseModel]]] = [
        ("one list of 700,000 token ids", {"prompt": ids}, CompletionBody),
        (
            "1,000 lists of 700 token ids",
            {"prompt": [ids[n * 700 : n * 700 + 700] for n in range(1000)]},
            CompletionBody,
        ),
        ("16,000 parts of one message", {"messages": [{"role": "user", "content": parts}]}, ChatBody),
        (
            "48,000 keys of an unknown field",
            {"prompt": "a", "foo": dict.fromkeys(map(str, range(48_000)))},
            CompletionBody,
        ),
        ("a text", {"prompt": "some words, " * 340_000}, CompletionBody),
        ("a program", {"prompt": 'if (a[i], b) { return "x\n"; }\n' * 110_000}, CompletionBody),
        ("2,000,000 numbers, refused", {"foo": [1] * 2_000_000}, CompletionBody),
    ]
    return [(name, json.dumps(body, separators=(",", ":")).encode(), kind) for name, body, kind in bodies]


async def longest_turn_ms(raw: bytes, kind: type[BaseModel]) -> float:
    """CPU time between two turns of a task that only yields."""
    longest = 0.0

    async def watch() -> None:
        nonlocal longest
        while True:
            begun = time.thread_time()
            await asyncio.sleep(0)
            longest = max(longest, (time.thread_time() - begun) * 1000)

    watcher = asyncio.create_task(watch())
    await asyncio.sleep(0)
    with contextlib.suppress(BadRequestError):
        await parse_body(raw, kind)
    await asyncio.sleep(0)
    watcher.cancel()
    return longest


def make_loads(num_bytes: int) -> list[Load]:
    """Nothing; a long text for the tokenizer; long lists of ids for the parser."""
    words = "the quick brown fox jumps over a lazy dog " * (num_bytes // 42)
    many = ",".join(str(number % 10) for number in range(num_bytes // 2))
    fitting = ", ".join(str(number % 50) for number in range(num_bytes // 4))
    return [
        Load("streams alone", "", b""),
        Load("and a long text", "/v1/completions", json.dumps({"prompt": words, "max_tokens": 1}).encode()),
        Load("and too many ids", "/v1/completions", f'{{"prompt": [{many}], "max_tokens": 1}}'.encode()),
        Load(
            "and ids that fit", "/v1/completions", f'{{"prompt": [{fitting}], "max_tokens": 1}}'.encode(), leaves=True
        ),
    ]


async def measure(options: argparse.Namespace) -> None:
    """One server for all loads."""
    flags = {
        "--max-num-seqs": options.streams,
        "--max-num-batched-tokens": max(512, options.streams),
        "--num-kv-blocks": max(64 * options.streams, options.bytes // 24),  # a text may be refused by its tokens only
        "--max-queue": 2 * options.streams,  # all streams end in one step and come again
        "--max-body": 2 * options.bytes,
    }
    words = [str(word) for flag in flags.items() for word in flag]
    with tempfile.TemporaryDirectory() as folder:
        async with memory_server(Path(folder), "slow-30", *words) as talk:
            for number, load in enumerate(make_loads(options.bytes)):
                begun, waited = time.monotonic(), read_wait_ms(talk.server.process.pid)
                probes = await run(talk, number, options)
                starved = (read_wait_ms(talk.server.process.pid) - waited) / 1000 / (time.monotonic() - begun)
                print(f"{describe(load.name, probes)}; without a CPU {starved:.0%}", flush=True)


async def run(talk: Talk, load_number: int, options: argparse.Namespace) -> list[Probe]:
    """Each probe under this load."""
    num_streams: int = options.streams
    about = ["--probe", talk.server.base_url, "--streams", str(options.streams), "--bytes", str(options.bytes)]
    load = await asyncio.create_subprocess_exec(sys.executable, __file__, *about, "--load", str(load_number))
    try:

        async def full() -> bool:
            return await talk.gauge("vllm:num_requests_running") >= num_streams * 0.9

        await talk.until(full, "all streams run")
        seconds, pid = str(options.seconds), str(talk.server.process.pid)
        command = [sys.executable, __file__, *about, "--pid", pid, "--seconds", seconds]
        ended = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
        assert load.returncode is None, "the load has ended by itself"
    finally:
        with contextlib.suppress(ProcessLookupError):
            load.kill()
        await load.wait()
    return [Probe(**probe) for probe in json.loads(ended.stdout)]


async def make_load(base_url: str, load: Load, num_streams: int) -> None:
    """Until it is killed."""
    async with aiohttp.ClientSession(base_url, connector=aiohttp.TCPConnector(limit=0)) as session:
        senders = [stream(session, seed) for seed in range(num_streams)]
        await asyncio.gather(*senders, *([post(session, load)] if load.path else []))


async def stream(session: aiohttp.ClientSession, seed: int) -> None:
    """One request after the other."""
    body: dict[str, Any] = {"prompt": "ab", "max_tokens": 300, "ignore_eos": True, "stream": True, "seed": seed}
    while True:
        async with session.post("/v1/completions", json=body) as response:
            async for _ in response.content:
                pass


async def post(session: aiohttp.ClientSession, load: Load) -> None:
    """A long prompt after the other."""
    headers = {"Content-Type": "application/json"}
    while True:
        try:
            async with asyncio.timeout(1 if load.leaves else None):
                async with session.post(load.path, data=load.body, headers=headers) as response:
                    assert response.status == 400 and not load.leaves, await response.text()
        except TimeoutError:
            continue


def read_wait_ms(pid: int) -> float:
    """How long the process's main thread has been ready to run without running (Linux)."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1]) / 1e6


def describe(name: str, probes: list[Probe]) -> str:
    """One line."""

    def figures(times: list[float]) -> str:
        cuts = statistics.quantiles(times, n=1000)
        slow = sum(value > GOAL_MS for value in times)
        return f"p50 {cuts[499]:.1f}, p99 {cuts[989]:.1f}, slowest {max(times):.1f} ms, {slow} over {GOAL_MS:g} ms"

    whole, own = figures([probe.took for probe in probes]), figures([probe.own for probe in probes])
    return f"{name:18s} {len(probes):5d} probes: {whole}; the server's own {own}"


if __name__ == "__main__":
    main()
