"""Servers side by side on workloads A to E, interleaved, with what else the machine did beside every figure.

    python -m benchmarks.serving                                  ours alone, A to D
    python -m benchmarks.serving --peers ours,vllm,llama-bf16 --rounds 3 --json out.json
    python -m benchmarks.serving --peers vllm,llama-bf16 --hold running.json      starts them and waits for Ctrl-C
    python -m benchmarks.serving --peers ours,vllm --running running.json -w A    starts ours anew, uses that vllm
    python -m benchmarks.serving --peers all --quick              one short round: does everything run?
    python -m benchmarks.serving --report out.json more.json [--write docs/performance.md]      tables of earlier runs

Peers: ours, vllm, llama-bf16, llama-q4, transformers, openvino-q4, installed by benchmarks/serving/setup.py; and any
`--variant NAME='FLAGS'`, which is our server with more flags. `--size 1b`: a Llama of 1.07 G random weights instead.
Only ratios of one run mean something on another machine.
"""

import argparse
import asyncio
import contextlib
import json
import signal
import tempfile
import time
from collections.abc import Coroutine
from dataclasses import asdict
from functools import partial
from pathlib import Path

from benchmarks.serving import cross_check, floors, machine, servers
from benchmarks.serving.outcome import Record, Run, Start
from benchmarks.serving.paths import Paths, default_paths, quantised_gguf
from benchmarks.serving.peers import Peer, known_peers, ours
from benchmarks.serving.report import IN_TOTAL, between_marks, markdown, rate
from benchmarks.serving.servers import Server
from benchmarks.serving.workloads import WHAT, Workload, build, one_token_words, shortened
from pagefleet_server.tokenizer import load_tokenizer

WARM_UP_SEED = -1
SIZES = {"135m": floors.SMOLLM2, "1b": floors.ONE_BILLION}


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="ours", help="names, with commas; 'all': every one installed, and variants")
    parser.add_argument(
        "-w", "--workloads", default="A,B,C,D", help="of " + "; ".join(f"{k} {v}" for k, v in WHAT.items())
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round of a quarter of each workload: does it run?")
    parser.add_argument(
        "--size", choices=SIZES, default="135m", help="the model; 1b: random weights, for ours and vllm only"
    )
    parser.add_argument("--variant", action="append", default=[], metavar="NAME=FLAGS", help="ours with more flags")
    parser.add_argument("--folder", type=Path, help="of the peers; default: PAGEFLEET_PEERS, or the user's cache")
    parser.add_argument("--seed", type=int, help="of the prompts; default: another one each time")
    parser.add_argument("--quiet-wait", type=float, default=60.0, help="seconds to wait for a quiet machine, each time")
    parser.add_argument("--json", type=Path, help="write, or add to, a file with all runs")
    parser.add_argument("--cross-check", action="store_true", help="A by `vllm bench serve` too, on every server")
    parser.add_argument("--hold", type=Path, metavar="FILE", help="start the peers, write FILE, wait for Ctrl-C")
    parser.add_argument(
        "--running",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="use the servers of a --hold; again and again",
    )
    parser.add_argument("--report", type=Path, nargs="+", metavar="FILE", help="print tables of earlier runs")
    parser.add_argument(
        "--write", type=Path, metavar="PAGE", help="with --report: the tables into that page, between marks"
    )
    parser.add_argument("--logs", type=Path, help="folder for the servers' logs; default: a temporary one")
    options = parser.parse_args()
    if options.quick:
        options.rounds = 1
    return options


def workload_of(options: argparse.Namespace, name: str, words: list[str], seed: int) -> Workload:
    """As asked for: whole or short."""
    workload = build(name, words, seed)
    return shortened(workload) if options.quick else workload


def make_peer(options: argparse.Namespace, paths: Paths, name: str) -> Peer:
    """By name: a known one or a variant of ours."""
    variants = dict(variant.split("=", 1) for variant in options.variant)
    if name in variants:
        model = paths.random_1b if options.size == "1b" else None
        return ours(f"ours-{name}", tuple(variants[name].split()), model)
    known = known_peers(paths, options.size)
    if name not in known:
        raise SystemExit(f"peer {name!r}: expected some of {', '.join([*known, *variants])}")
    return known[name]()


def names_of(options: argparse.Namespace, paths: Paths) -> list[str]:
    """The peers asked for; 'all': those installed, and the variants. A name that is not installed ends the run."""
    if options.peers == "all":
        known = known_peers(paths, options.size)
        variants = [variant.partition("=")[0] for variant in options.variant]
        return [name for name, make in known.items() if make().installed] + variants
    names: list[str] = options.peers.split(",")
    missing = [name for name in names if not make_peer(options, paths, name).installed]
    if missing:
        raise SystemExit(f"not installed in {paths.folder}: {', '.join(missing)}; see benchmarks/serving/setup.py")
    return names


async def main(options: argparse.Namespace) -> None:
    """Start, measure in rounds, print, stop."""
    paths = Paths(options.folder) if options.folder else default_paths()
    make = partial(make_peer, options, paths)
    there = {name: server for file in options.running for name, server in servers.running_servers(file, make).items()}
    names = names_of(options, paths)
    if options.size == "1b" and not (paths.random_1b / "model.safetensors").exists():
        raise SystemExit(f"python -m benchmarks.serving.export_model {paths.random_1b} --random-1b writes that model")
    logs = options.logs or Path(tempfile.mkdtemp(prefix="pagefleet-bench-"))
    logs.mkdir(parents=True, exist_ok=True)
    record = Record(machine.facts() | {"seed": options.seed if options.seed is not None else int(time.time())})
    if options.size != "135m":
        record.facts["model"] = options.size
    if options.quick:
        record.facts["quick"] = "a quarter of each workload"
    open_servers: dict[str, Server] = {}
    try:
        for name in names:
            server = there.get(name)
            if server is None:
                print(f"starting {name} (log in {logs})", flush=True)
                server = await Server.start(make(name), logs / f"{name}.log")
                print(f"{name} answers after {server.start_seconds:.1f} s", flush=True)
            open_servers[name] = server
            record.starts.append(Start(server.peer.name, server.start_seconds, server.peer.version))
        if options.hold:
            servers.write_running(options.hold, open_servers)
            print(f"{', '.join(open_servers)} answer; addresses in {options.hold}; Ctrl-C ends them", flush=True)
            await asyncio.Event().wait()
        await measure(options, record, list(open_servers.values()))
        if options.cross_check and cross_check.available(paths):
            for server in open_servers.values():
                if server.url and server.peer.takes_ignore_eos:
                    line = await asyncio.to_thread(cross_check.cross_check, paths, server.peer.name, server.url)
                    record.cross_checks.append(line)
    finally:
        for server in open_servers.values():
            record.peak_mib[server.peer.name] = server.peak_mib()
            server.stop()
        if options.hold:
            options.hold.unlink(missing_ok=True)
        if options.json and record.runs:
            add_to_file(options.json, record)
        if record.runs:
            print("\n" + markdown(record))


async def measure(options: argparse.Namespace, record: Record, peers: list[Server]) -> None:
    """All rounds. Each starts with another server, so that a slow drift of the machine favours nobody."""
    words = one_token_words(load_tokenizer(quantised_gguf()).tokenizer)
    seed = int(str(record.facts["seed"]))
    await machine.wait_quiet(options.quiet_wait)
    rates = await asyncio.to_thread(floors.machine_rates, 15)
    record.facts["reading memory"] = f"{rates.bytes_per_s / 1e9:.1f} GB/s"
    record.facts["bfloat16 product"] = f"{rates.flops_per_s / 1e9:.0f} GFLOP/s"
    for name in options.workloads.split(","):
        workload = workload_of(options, name, words, seed)
        if workload.requests[0].at is None:
            tokens = workload.num_output + (name == IN_TOTAL) * sum(request.num_prompt for request in workload.requests)
            record.floors[name] = tokens / floors.floor_seconds(workload, SIZES[options.size], rates)
    for server in peers:
        await server.measure(Workload("warm-up", build("A", words, WARM_UP_SEED).requests[:8], 8), 0)
    for index in range(options.rounds):
        turn = peers[index % len(peers) :] + peers[: index % len(peers)]
        for name in options.workloads.split(","):
            workload = workload_of(options, name, words, seed + index)
            for server in turn:
                if name not in server.peer.workloads:
                    continue
                await machine.wait_quiet(options.quiet_wait)
                run = await server.measure(workload, seed + index)
                record.runs.append(run)
                print(line_of(run), flush=True)


def line_of(run: Run) -> str:
    """One run, as it comes."""
    why = f"{run.num_failed} failed, {run.first_error}" if run.num_failed else "others took too much of the cores"
    note = "" if run.clean else f"  NOT CLEAN: {why}"
    return (
        f"{run.workload} {run.peer:14s} {rate(run):8.1f} tok/s  TTFT {run.ttft_ms[0]:.0f}/{run.ttft_ms[1]:.0f} ms  "
        f"ITL {run.itl_ms[0]:.1f}/{run.itl_ms[1]:.1f} ms  cores: server {run.server_cores:.2f} client "
        f"{run.client_cores:.2f} others {run.other_cores:.2f}{note}"
    )


async def until_terminated(work: Coroutine[None, None, None]) -> None:
    """Do the work; SIGTERM and SIGINT cut it short, and servers that it started end all the same."""
    task = asyncio.ensure_future(work)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task


def add_to_file(file: Path, record: Record) -> None:
    """One record a call; a list of records."""
    before = json.loads(file.read_text()) if file.exists() else []
    file.write_text(json.dumps([*before, asdict(record)], indent=1) + "\n")


def read_files(files: list[Path]) -> Record:
    """The records of all files as one: rounds keep apart by their seeds."""
    joined: Record | None = None
    for file in files:
        for found in json.loads(file.read_text()):
            joined = joined or Record(found["facts"])
            joined.runs += [
                Run(**{**run, "ttft_ms": tuple(run["ttft_ms"]), "itl_ms": tuple(run["itl_ms"])})
                for run in found["runs"]
            ]
            names = {start.peer for start in joined.starts}
            joined.starts += [Start(**start) for start in found["starts"] if start["peer"] not in names]
            joined.cross_checks += found.get("cross_checks", [])
            joined.floors = found.get("floors", {}) | joined.floors
            for peer, mib in found["peak_mib"].items():
                joined.peak_mib[peer] = max(mib, joined.peak_mib.get(peer, 0.0))
    if joined is None:
        raise SystemExit("--report: these files hold no run")
    return joined


if __name__ == "__main__":
    arguments = parse()
    if arguments.report:
        tables = markdown(read_files(arguments.report))
        print(tables)
        if arguments.write:
            arguments.write.write_text(between_marks(arguments.write.read_text(), "measured", tables))
    else:
        asyncio.run(until_terminated(main(arguments)))
