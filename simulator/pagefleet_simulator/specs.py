"""Loads and settings as they are written on the command line."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pagefleet_simulator.generators import Rate, diurnal, generate, on_off, ramp, spike, steady, step
from pagefleet_simulator.traces import READERS, read_shipped
from pagefleet_simulator.workload import Workload

GENERATORS: Mapping[str, Callable[..., Rate]] = {
    "steady": steady,
    "ramp": ramp,
    "step": step,
    "spike": spike,
    "diurnal": diurnal,
    "on-off": on_off,
}


class SpecError(ValueError):
    """A load or setting that cannot be understood; the message says what is possible."""


def parse_load(text: str, *, seconds: float, seed: int) -> Workload:
    """`azure` (shipped) | `azure:FILE` | `burstgpt:FILE` | `mooncake:FILE` | `GENERATOR:key=value,…`.

    Generators make `seconds` of load. Raises SpecError, TraceError or OSError.
    """
    kind, _, rest = text.partition(":")
    if kind == "azure" and not rest:
        return read_shipped("azure_llm_2023_conv")
    if kind in READERS:
        if not rest:
            raise SpecError(f"{kind} needs a file: {kind}:FILE")
        return READERS[kind](Path(rest))
    if kind not in GENERATORS:
        raise SpecError(f"load {kind!r} is none of {', '.join([*READERS, *GENERATORS])}")
    values = parse_settings(rest)
    try:
        rate = GENERATORS[kind](**values)
    except TypeError as error:
        names = ", ".join(name for name in GENERATORS[kind].__annotations__ if name != "return")
        raise SpecError(f"{kind} takes {names}: {error}") from error
    nothing = [name for name, value in values.items() if value is None or not math.isfinite(value)]
    if nothing:
        raise SpecError(f"load {text!r}: {nothing[0]} is no finite number")
    try:
        return generate(kind, rate, seconds, seed=seed)
    except ZeroDivisionError as error:
        raise SpecError(f"load {text!r}: a phase of 0 s has no rate") from error
    except ValueError as error:
        raise SpecError(f"load {text!r}: {error}") from error


def parse_settings(text: str) -> dict[str, Any]:
    """`a=1,b=2.5,c=none` -> numbers; whole ones as int."""
    values: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        name, equals, value = item.partition("=")
        try:
            if not equals:
                raise ValueError
            key, number = name.strip().replace("-", "_"), None if value == "none" else _number(value)
        except ValueError as error:
            raise SpecError(f"{item!r} is not name=number") from error
        if key in values:
            raise SpecError(f"{key} is given twice")
        values[key] = number
    return values


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)
