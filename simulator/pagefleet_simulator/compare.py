"""The comparison: every policy over several traces and start-up times, each baseline tuned on another slice first."""

import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from pagefleet_simulator.catalog import CATALOG, MEMORY, Settings
from pagefleet_simulator.generators import Rate, diurnal, generate, on_off, spike, then
from pagefleet_simulator.policies.ours import PageFleet
from pagefleet_simulator.policies.policy import Policy
from pagefleet_simulator.profile import load_profile
from pagefleet_simulator.results import Result, summarise
from pagefleet_simulator.scenario import Scenario
from pagefleet_simulator.simulation import simulate
from pagefleet_simulator.traces import read_shipped
from pagefleet_simulator.workload import Workload

Ran = TypeVar("Ran")

OURS = ("pagefleet", "pagefleet-learnt", "pagefleet-tuned")
"""With its defaults; with what it learnt from the slice that others are tuned on; and tuned as the others are."""
LOADS = ("azure", "diurnal", "bursts", "spike", "bursts-again", "spike-again")
FIXED = "static"
"""No autoscaler: it knows from its tuning slice what the peak will be."""
GOAL_PERCENT = 95.0
"""Attainment that tuning asks for."""
EQUAL_POINTS = 0.5
"""Attainments this close count as equal."""
TUNING_START_SECONDS = 110.0
"""The start-up time that baselines are tuned with."""


@dataclass(frozen=True, slots=True)
class Load:
    """A trace: the slice that policies are tuned on, and the one that is reported."""

    name: str
    what: str
    tuning: Workload
    test: Workload
    """The reported slice, after its warm-up."""
    warmup_seconds: float = 0.0
    """The beginning of `test`: every policy lives through it and may remember it, but nothing of it is reported."""
    is_first: bool = False
    """Whether it jumps as nothing did before."""
    tuned_as: str | None = None
    """The trace whose tuning holds here; None: its own."""
    initial_replicas: int = 1
    """Ready when either begins: about what its first minutes need."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One policy on one trace with one start-up time."""

    load: str
    start_seconds: float
    policy: str
    settings: Settings
    result: Result
    routing: str = "connection"


@dataclass(frozen=True, slots=True)
class Trial:
    """One point of a grid."""

    load: str
    policy: str
    settings: Settings
    result: Result


@dataclass(frozen=True, slots=True)
class _Job:
    load: str
    is_tuning: bool
    policy: str
    settings: Settings
    scenario: Scenario
    scale: float


def loads(scale: float = 1.0) -> dict[str, Load]:
    """The six traces. `scale` < 1 shortens all of them, for a quick look; lengths of phases shrink with them."""
    azure = read_shipped("azure_llm_2023_conv").within(8192)

    def made(name: str, rate: Rate, seconds: float, seed: int) -> Workload:
        return generate(name, rate, seconds * scale, seed=seed)

    pairs = on_off(0.3, 2.2, 600 * scale, 900 * scale)
    high = spike(0.6, 3.0, 900 * scale, 300 * scale)
    low = spike(0.6, 2.2, 300 * scale, 240 * scale)
    bursts = Load(
        "bursts",
        "15 minutes at 0.3 requests/s, 10 at 2.2, twice, and never before; tuned on one such pair, another seed",
        made("bursts", pairs, 1500, seed=12),
        made("bursts", pairs, 3000, seed=2),
        is_first=True,
    )
    once = Load(
        "spike",
        "0.6 requests/s, 3 for five minutes for the first time ever, 0.6 again; tuned on a spike of 2.6 for four "
        "minutes, another seed",
        made("spike", spike(0.6, 2.6, 400 * scale, 240 * scale), 1200, seed=13),
        made("spike", high, 2400, seed=3),
        is_first=True,
    )
    everything = [
        Load(
            "azure",
            "Azure LLM inference 2023, conversation: tuned on minutes 0 to 6, reported on minutes 15 to 30",
            azure.slice(0, 360 * scale),
            azure.slice(900, 900 + 900 * scale),
            initial_replicas=6,
        ),
        Load(
            "diurnal",
            "a day in an hour, 0.15 to 1.8 requests/s and back; tuned on half an hour, another seed",
            made("diurnal", diurnal(0.15, 1.8, 1800 * scale), 1800, seed=11),
            made("diurnal", diurnal(0.15, 1.8, 3600 * scale), 3600, seed=1),
        ),
        bursts,
        once,
        replace(
            bursts,
            name="bursts-again",
            is_first=False,
            tuned_as="bursts",
            what="15 minutes at 0.3 requests/s, 10 at 2.2, twice, after one such pair; tuned as bursts",
            test=made("bursts", pairs, 4500, seed=2),
            warmup_seconds=1500 * scale,
        ),
        replace(
            once,
            name="spike-again",
            is_first=False,
            tuned_as="spike",
            what="the spike of 3 requests/s for five minutes, half an hour after one of 2.2 for four; tuned as spike",
            test=made("spike", then(low, 1200 * scale, high), 3600, seed=3),
            warmup_seconds=1200 * scale,
        ),
    ]
    return {load.name: load for load in everything}


_LOADS: dict[float, dict[str, Load]] = {}


def _run(job: _Job) -> Result:
    return _lived(job)[0]


def _learn(job: _Job) -> Settings:
    """What living through it leaves behind."""
    policy = _lived(job)[1]
    return {MEMORY: policy.memory()} if isinstance(policy, PageFleet) else {}


def _lived(job: _Job) -> tuple[Result, Policy]:
    if job.scale not in _LOADS:
        _LOADS[job.scale] = loads(job.scale)
    load = _LOADS[job.scale][job.load]
    workload, warmup = (load.tuning, 0.0) if job.is_tuning else (load.test, load.warmup_seconds)
    scenario = replace(job.scenario, initial_replicas=load.initial_replicas, warmup_seconds=warmup)
    if job.policy == "static":
        scenario = replace(scenario, initial_replicas=job.settings["replicas"])
    policy = CATALOG[job.policy].make(scenario, workload, job.settings)
    return summarise(scenario, simulate(workload, scenario, policy)), policy


def tuned(trials: Sequence[Trial]) -> Trial:
    """The cheapest that reaches the goal; when none does, the one with the highest attainment."""
    good = [trial for trial in trials if trial.result.attainment_percent >= GOAL_PERCENT]
    if good:
        return min(good, key=lambda trial: (trial.result.device_hours, -trial.result.attainment_percent))
    return max(trials, key=lambda trial: (trial.result.attainment_percent, -trial.result.device_hours))


def compare(
    *,
    profile: str = "h100-qwen3-32b",
    load_names: Sequence[str] = LOADS,
    start_seconds: Sequence[float] = (30.0, 110.0, 240.0),
    policies: Sequence[str] = tuple(CATALOG),
    routings: Sequence[str] = ("connection",),
    scale: float = 1.0,
    seed: int = 0,
    workers: int = 1,
    known: Sequence[Trial] = (),
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[list[Trial], list[Cell]]:
    """(every grid point, every cell). What has a grid is tuned once a trace, what is taught lives through the same
    slice; points of the grid that are `known` are not run again: a run is a function of its seed."""
    base = Scenario(load_profile(profile), seed=seed)
    tuning = replace(base, start_seconds=TUNING_START_SECONDS)
    tuned_as = {load: described.tuned_as or load for load, described in loads(scale).items()}
    tuned_loads = dict.fromkeys(tuned_as[load] for load in load_names)
    grid = [
        _Job(load, True, policy, settings, tuning, scale)
        for load in tuned_loads
        for policy in policies
        if CATALOG[policy].grid
        for settings in CATALOG[policy].combinations()
        if not any((trial.load, trial.policy) == (load, policy) and trial.settings == settings for trial in known)
    ]
    kept = [trial for trial in known if trial.load in tuned_loads and trial.policy in policies]
    lessons = [
        _Job(load, True, policy, {}, tuning, scale)
        for load in tuned_loads
        for policy in policies
        if CATALOG[policy].is_taught
    ]
    total = len(grid) + len(lessons) + len(load_names) * len(start_seconds) * len(policies) * len(routings)
    done = 0

    def run_all(run: Callable[[_Job], Ran], jobs: Sequence[_Job]) -> list[Ran]:
        nonlocal done
        results: list[Ran] = []
        for result in pool.map(run, jobs) if pool else map(run, jobs):
            results.append(result)
            done += 1
            if on_progress is not None:
                on_progress(done, total)
        return results

    # Workers end at once with a ctrl-C, which all of a terminal's processes get: without their tracebacks.
    interruptible = (signal.SIGINT, signal.SIG_DFL)
    pool = ProcessPoolExecutor(workers, initializer=signal.signal, initargs=interruptible) if workers > 1 else None
    try:
        trials = kept + [
            Trial(job.load, job.policy, job.settings, result)
            for job, result in zip(grid, run_all(_run, grid), strict=True)
        ]
        learnt = run_all(_learn, lessons)
        best = {(job.load, job.policy): settings for job, settings in zip(lessons, learnt, strict=True)}
        for load in tuned_loads:
            for policy in policies:
                if CATALOG[policy].is_taught:
                    continue
                of_it = [trial for trial in trials if (trial.load, trial.policy) == (load, policy)]
                best[load, policy] = tuned(of_it).settings if of_it else {}
        jobs = [
            _Job(
                load,
                False,
                policy,
                best[tuned_as[load], policy],
                replace(base, start_seconds=start, routing=routing),
                scale,
            )
            for routing in routings
            for load in load_names
            for start in start_seconds
            for policy in policies
        ]
        cells = [
            Cell(job.load, job.scenario.start_seconds, job.policy, job.settings, result, job.scenario.routing)
            for job, result in zip(jobs, run_all(_run, jobs), strict=True)
        ]
    finally:
        if pool is not None:
            pool.shutdown(cancel_futures=True)
    return trials, cells


def best_of(cells: Sequence[Cell]) -> Cell | None:
    """The cheapest that reaches the goal, else the one with the highest attainment; None of none."""
    good = [cell for cell in cells if cell.result.attainment_percent >= GOAL_PERCENT]
    if good:
        return min(good, key=lambda cell: cell.result.device_hours)
    return max(cells, key=lambda cell: cell.result.attainment_percent, default=None)


def verdict(ours: Result, other: Result) -> str:
    """wins: better attainment at no higher cost, or lower cost at equal attainment. ties, loses: the other way round.
    trades: better in one, worse in the other."""
    gained = ours.attainment_percent - other.attainment_percent
    saved = other.device_hours - ours.device_hours
    if (gained > EQUAL_POINTS and saved >= 0) or (gained >= -EQUAL_POINTS and saved > 0.01 * other.device_hours):
        return "wins"
    if abs(gained) <= EQUAL_POINTS and abs(saved) <= 0.01 * other.device_hours:
        return "ties"
    return "trades" if (gained > EQUAL_POINTS) or (saved > 0.01 * other.device_hours) else "loses"


def to_json(trials: Sequence[Trial], cells: Sequence[Cell]) -> dict[str, Any]:
    """For the evidence file."""
    return {"trials": [asdict(trial) for trial in trials], "cells": [asdict(cell) for cell in cells]}


def by_case(cells: Sequence[Cell]) -> Mapping[tuple[str, str, float], list[Cell]]:
    """Cells by routing, trace and start-up time, in order."""
    cases: dict[tuple[str, str, float], list[Cell]] = {}
    for cell in cells:
        cases.setdefault((cell.routing, cell.load, cell.start_seconds), []).append(cell)
    return cases
