"""Readers of published request traces. Each raises TraceError with file and line for what it cannot read."""

import csv
import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from pagefleet_simulator.workload import Arrival, Workload, ordered

MAX_REQUESTS = 2_000_000
MOONCAKE_PIECE_TOKENS = 512


class TraceError(ValueError):
    """A trace that cannot be read."""


def read_azure(path: Path) -> Workload:
    """Azure LLM inference traces: CSV with TIMESTAMP, ContextTokens, GeneratedTokens."""

    def arrival(row: dict[str, str]) -> Arrival:
        stamp = datetime.fromisoformat(row["TIMESTAMP"].strip()[:26])
        seconds = (stamp - datetime(2023, 1, 1, tzinfo=stamp.tzinfo)).total_seconds()
        return Arrival(seconds, max(1, int(row["ContextTokens"])), max(1, int(row["GeneratedTokens"])))

    return _from_zero(path, _rows(path, arrival))


def read_burstgpt(path: Path) -> Workload:
    """BurstGPT: CSV with Timestamp (seconds), Request tokens, Response tokens and more. Failed requests, which have
    no response tokens, are left out."""

    def arrival(row: dict[str, str]) -> Arrival | None:
        prompt, output = int(float(row["Request tokens"])), int(float(row["Response tokens"]))
        return Arrival(float(row["Timestamp"]), max(1, prompt), output) if output > 0 else None

    return _from_zero(path, _rows(path, arrival))


def read_mooncake(path: Path) -> Workload:
    """Mooncake: one JSON object a line with timestamp (ms), input_length, output_length and hash_ids, each of which
    names 512 tokens of the prompt."""

    def lines() -> Iterator[Arrival]:
        with path.open() as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    row: Any = json.loads(line)
                    yield Arrival(
                        time=float(row["timestamp"]) / 1000,
                        prompt_tokens=max(1, int(row["input_length"])),
                        output_tokens=max(1, int(row["output_length"])),
                        prefix=tuple(int(name) for name in row["hash_ids"]),
                        prefix_piece_tokens=MOONCAKE_PIECE_TOKENS,
                    )
                except (ValueError, KeyError, TypeError) as error:
                    raise TraceError(f"{path}, line {number}: {error!r}; expected Mooncake's columns") from error

    return _from_zero(path, lines())


READERS: dict[str, Callable[[Path], Workload]] = {
    "azure": read_azure,
    "burstgpt": read_burstgpt,
    "mooncake": read_mooncake,
}


def _rows(path: Path, convert: Callable[[dict[str, str]], Arrival | None]) -> Iterator[Arrival]:
    with path.open(newline="") as file:
        for number, row in enumerate(csv.DictReader(file), start=2):
            try:
                arrival = convert(row)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise TraceError(
                    f"{path}, line {number}: {error!r}; see docs/autoscaling.md for the columns"
                ) from error
            if arrival is not None:
                yield arrival


def _from_zero(path: Path, arrivals: Iterator[Arrival]) -> Workload:
    taken: list[Arrival] = []
    for arrival in arrivals:
        taken.append(arrival)
        if len(taken) > MAX_REQUESTS:
            raise TraceError(f"{path} has more than {MAX_REQUESTS} requests: cut it first")
    if not taken:
        raise TraceError(f"{path} has no requests")
    first = min(arrival.time for arrival in taken)
    return ordered(path.stem, (replace(arrival, time=arrival.time - first) for arrival in taken))


SHIPPED = files("pagefleet_simulator") / "data"


def read_shipped(name: str) -> Workload:
    """A trace that comes with the package; data/README.md names source and licence."""
    text = gzip.decompress((SHIPPED / f"{name}.csv.gz").read_bytes()).decode()
    rows = (line.split(",") for line in text.splitlines()[1:])
    return ordered(name, (Arrival(float(time), int(prompt), int(output)) for time, prompt, output in rows))
