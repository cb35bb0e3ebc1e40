"""Readers of published request traces, plain or gzipped. Each raises TraceError with file and line for what it cannot
read."""

import csv
import gzip
import io
import json
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from pagefleet_simulator.workload import MAX_REQUESTS, Arrival, Workload, ordered

MAX_LINE_CHARS = 1_000_000
"""Longest line that is read: the packed line of a hostile file could be gigabytes."""
MAX_TOKENS = 2**31
"""Most tokens of one request that a trace may tell; what a server would not take is cut later."""
MOONCAKE_PIECE_TOKENS = 512
GZIP_MAGIC = b"\x1f\x8b"


class TraceError(ValueError):
    """A trace that cannot be read."""


def read_azure(path: Path) -> Workload:
    """Azure LLM inference traces: CSV with TIMESTAMP, ContextTokens, GeneratedTokens."""

    def arrival(row: dict[str, str]) -> Arrival:
        stamp = datetime.fromisoformat(row["TIMESTAMP"].strip()[:26])
        seconds = (stamp - datetime(2023, 1, 1, tzinfo=stamp.tzinfo)).total_seconds()
        return Arrival(seconds, _tokens(row["ContextTokens"]), _tokens(row["GeneratedTokens"]))

    return _from_zero(path, _rows(path, ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), arrival))


def read_burstgpt(path: Path) -> Workload:
    """BurstGPT: CSV with Timestamp (seconds), Request tokens, Response tokens and more. Failed requests, which have
    no response tokens, are left out."""

    def arrival(row: dict[str, str]) -> Arrival | None:
        failed = float(row["Response tokens"]) == 0
        prompt, output = _tokens(row["Request tokens"]), _tokens(row["Response tokens"])
        return None if failed else Arrival(float(row["Timestamp"]), prompt, output)

    return _from_zero(path, _rows(path, ("Timestamp", "Request tokens", "Response tokens"), arrival))


def read_mooncake(path: Path) -> Workload:
    """Mooncake: one JSON object a line with timestamp (ms), input_length, output_length and hash_ids, each of which
    names 512 tokens of the prompt."""

    def arrivals() -> Iterator[Arrival]:
        for number, line in enumerate(_lines(path), start=1):
            if not line.strip():
                continue
            try:
                row: Any = json.loads(line)
                yield _possible(
                    Arrival(
                        time=float(row["timestamp"]) / 1000,
                        prompt_tokens=_tokens(row["input_length"]),
                        output_tokens=_tokens(row["output_length"]),
                        prefix=tuple(_name(item) for item in row["hash_ids"]),
                        prefix_piece_tokens=MOONCAKE_PIECE_TOKENS,
                    )
                )
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
                raise TraceError(f"{path}, line {number}: {error!r}; expected Mooncake's columns") from error

    return _from_zero(path, arrivals())


def _tokens(text: Any) -> int:
    """At least 1: traces tell of empty prompts and answers, too. Raises ValueError, TypeError."""
    number = float(text)
    if not 0 <= number <= MAX_TOKENS:
        raise ValueError(f"{text} tokens: it must be 0 to {MAX_TOKENS}")
    return max(1, int(number))


def _name(item: Any) -> int:
    name = int(item)
    if not -(2**63) <= name < 2**63:
        raise ValueError(f"the name {name} in hash_ids has more than 64 bits")
    return name


def _possible(arrival: Arrival) -> Arrival:
    if not math.isfinite(arrival.time):
        raise ValueError(f"the time {arrival.time} is not finite")
    return arrival


READERS: dict[str, Callable[[Path], Workload]] = {
    "azure": read_azure,
    "burstgpt": read_burstgpt,
    "mooncake": read_mooncake,
}


def _lines(path: Path) -> Iterator[str]:
    """Lines without their ends, whatever these are and whether or not a byte order mark stands before the first."""
    number = 1
    try:
        with path.open("rb") as raw:
            is_packed = raw.read(2) == GZIP_MAGIC
        with gzip.open(path) if is_packed else path.open("rb") as file, io.TextIOWrapper(file, "utf-8-sig") as text:
            while line := text.readline(MAX_LINE_CHARS + 1):
                if len(line) > MAX_LINE_CHARS:
                    raise TraceError(f"{path}, line {number}: it is longer than {MAX_LINE_CHARS} characters")
                yield line.rstrip("\n")
                number += 1
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(f"{path}, after line {number - 1}: {error}: neither text nor a whole gzip file") from error


def _rows(
    path: Path, columns: tuple[str, ...], convert: Callable[[dict[str, str]], Arrival | None]
) -> Iterator[Arrival]:
    number = 1
    try:
        rows = csv.DictReader(_lines(path))
        missing = [column for column in columns if column not in (rows.fieldnames or columns)]
        if missing:
            raise TraceError(f"{path} has no column {missing[0]!r}; see docs/autoscaling.md for the columns")
        for number, row in enumerate(rows, start=2):
            if any(row[column] is None for column in columns):
                raise TraceError(f"{path}, line {number}: it has fewer columns than the first line")
            arrival = convert(row)
            if arrival is not None:
                yield _possible(arrival)
    except TraceError:
        raise
    except (ValueError, OverflowError, csv.Error) as error:
        raise TraceError(f"{path}, near line {number}: {error}; see docs/autoscaling.md for the columns") from error


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
