"""`pagefleet-sim`: replay a load against a simulated fleet, or compare all policies."""

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pagefleet_simulator import table
from pagefleet_simulator.catalog import CATALOG, checked
from pagefleet_simulator.compare import LOADS, Cell, Trial, compare, to_json
from pagefleet_simulator.plot import SUFFIXES, PlotError, draw
from pagefleet_simulator.policies.policy import Policy
from pagefleet_simulator.profile import ProfileError, load_profile, shipped_profiles
from pagefleet_simulator.results import Result, summarise
from pagefleet_simulator.routing import ROUTINGS
from pagefleet_simulator.scenario import Faults, Objective, Scenario
from pagefleet_simulator.simulation import simulate
from pagefleet_simulator.specs import parse_load, parse_settings
from pagefleet_simulator.workload import MAX_SECONDS, Workload

Progress = Callable[[float], None]

BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 2 what was asked for cannot be simulated, 130 interrupted."""
    options = _parser().parse_args(arguments)
    try:
        if options.command == "profiles":
            for name in shipped_profiles():
                print(f"{name}: {load_profile(name).source}")
            return 0
        return _compare(options) if options.command == "compare" else _run(options)
    except (ValueError, ProfileError, PlotError, OSError) as error:
        print(f"pagefleet-sim: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("pagefleet-sim: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pagefleet-sim", description=__doc__)
    parser.add_argument("--version", action="version", version=version("pagefleet"))
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("profiles", help="list the shipped profiles and their sources")

    run = commands.add_parser("run", help="one load, one or more policies")
    run.add_argument(
        "--load", default="azure", help="azure[:FILE], burstgpt:FILE, mooncake:FILE or GENERATOR:key=value,…"
    )
    run.add_argument(
        "--seconds", type=float, default=3600.0, help="length of generated load, and cut of a trace (3600)"
    )
    run.add_argument("--from", dest="start", type=float, default=0.0, help="second of the trace to begin with (0)")
    run.add_argument("--rate", type=float, default=1.0, help="replay so many times as fast (1)")
    run.add_argument("--profile", default="h100-qwen3-32b", help=f"one of {', '.join(shipped_profiles())}, or a file")
    run.add_argument(
        "--policy",
        action="append",
        metavar="NAME[:key=value,…]",
        help=f"of {', '.join(CATALOG)}; repeatable (pagefleet)",
    )
    run.add_argument("--start-seconds", type=float, default=110.0, help="start-up time of a replica (110)")
    run.add_argument("--min", dest="min_replicas", type=int, default=1)
    run.add_argument("--max", dest="max_replicas", type=int, default=16)
    run.add_argument("--initial", dest="initial_replicas", type=int, default=1, help="ready when the load begins (1)")
    run.add_argument("--devices", type=int, help="accelerators of the cluster; without: enough")
    run.add_argument("--routing", choices=ROUTINGS, default="connection")
    run.add_argument("--crash-every", type=float, metavar="SECONDS", help="mean life of a replica; without: for ever")
    run.add_argument(
        "--silent", type=float, default=0.0, metavar="PART", help="part of the scrapes without an answer, 0..1"
    )
    run.add_argument("--ttft", type=float, default=3.0, help="objective: seconds to the first token (3)")
    run.add_argument("--tpot", type=float, default=0.1, help="objective: mean seconds between tokens (0.1)")
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--plot", type=Path, help="write FILE.png and FILE.svg")
    run.add_argument("--json", type=Path, help="write the numbers")

    whole = commands.add_parser("compare", help="all policies, tuned, on all traces: the published table")
    whole.add_argument("--scale", type=float, default=1.0, help="shorten all traces, for a quick look (1)")
    whole.add_argument("--policies", default=",".join(CATALOG), help="only these")
    whole.add_argument("--loads", default=",".join(LOADS))
    whole.add_argument("--start-seconds", default="30,110,240")
    whole.add_argument("--routings", default="connection")
    whole.add_argument("--seed", type=int, default=0)
    whole.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    whole.add_argument(
        "--grid", type=Path, metavar="JSON", help="take grid points from an earlier --json of the same seed and scale"
    )
    whole.add_argument("--keep", type=Path, metavar="JSON", help="take what is not run again from an earlier --json")
    whole.add_argument("--json", type=Path, help="write everything")
    whole.add_argument("--markdown", type=Path, help="write the tables")
    whole.add_argument("--commit", default="", help="noted in the files")
    return parser


def _check_paths(**paths: Path | None) -> None:
    """Before minutes of work are lost. Raises ValueError."""
    for flag, path in paths.items():
        if path is None:
            continue
        if not path.name or path.is_dir():
            raise ValueError(f"--{flag} {path}: it must be a file")
        if not path.absolute().parent.is_dir():
            raise ValueError(f"--{flag} {path}: there is no folder {path.absolute().parent}; make it first")


def _run(options: argparse.Namespace) -> int:
    plot: Path | None = options.plot
    if plot is not None and plot.suffix in SUFFIXES:
        plot = plot.with_suffix("")
    _check_paths(plot=plot, json=options.json)
    if not (0 <= options.start < math.inf and 0 < options.seconds <= MAX_SECONDS):
        raise ValueError(f"--from {options.start:g} --seconds {options.seconds:g}: at least 0, and above 0 to a year")
    profile = load_profile(options.profile)
    load = parse_load(options.load, seconds=options.seconds, seed=options.seed)
    load = (
        load.slice(options.start, options.start + options.seconds).at_rate(options.rate).within(profile.max_model_len)
    )
    if not load.arrivals:
        raise ValueError(f"no request of {load.name} is left; lower --from, or raise --seconds or the rate")
    scenario = Scenario(
        profile,
        start_seconds=options.start_seconds,
        min_replicas=options.min_replicas,
        max_replicas=options.max_replicas,
        initial_replicas=options.initial_replicas,
        devices=options.devices,
        routing=options.routing,
        objective=Objective(options.ttft, options.tpot),
        faults=Faults(options.crash_every, options.silent),
        seed=options.seed,
    )
    contestants = _contestants(options.policy or ["pagefleet"], scenario, load)
    rows, numbers = [], {}
    for contestant in contestants:
        with progress_bar(contestant.label) as on_progress:
            outcome = simulate(load, contestant.scenario, contestant.policy, on_progress=on_progress)
        result = summarise(contestant.scenario, outcome)
        rows.append(table.row(contestant.label, result))
        numbers[contestant.label] = asdict(result)
        if plot is not None:
            target = plot if len(contestants) == 1 else plot.with_name(f"{plot.name}-{contestant.file_name}")
            title = f"{contestant.label} on {load.name}, start-up {scenario.start_seconds:g} s"
            for path in draw(load, outcome, title, target):
                print(f"wrote {path}", file=sys.stderr)
    print(f"{len(load.arrivals)} requests within {load.seconds:.0f} s, {profile.name}, seed {options.seed}\n")
    print(table.markdown(rows))
    if options.json is not None:
        options.json.write_text(_dump({"seed": options.seed, "load": load.name, "results": numbers}))
    return 0


@dataclass(frozen=True, slots=True)
class _Contestant:
    policy: Policy
    scenario: Scenario
    label: str
    """Its name; with its settings where others have the same."""
    file_name: str


def _contestants(texts: Sequence[str], scenario: Scenario, load: Workload) -> list[_Contestant]:
    """All of them, before the first runs. Raises ValueError."""
    if len(set(texts)) < len(texts):
        raise ValueError(f"--policy {max(texts, key=texts.count)} is given twice")
    made = [_make_policy(text, scenario, load) for text in texts]
    names, kinds = [policy.name for policy, _ in made], [text.partition(":")[0] for text in texts]
    return [
        _Contestant(
            policy,
            its_scenario,
            policy.name if names.count(policy.name) == 1 else text,
            kind if kinds.count(kind) == 1 else f"{kind}-{position}",
        )
        for position, (text, kind, (policy, its_scenario)) in enumerate(zip(texts, kinds, made, strict=True), start=1)
    ]


def _make_policy(text: str, scenario: Scenario, load: Workload) -> tuple[Policy, Scenario]:
    name, _, rest = text.partition(":")
    _check_names("policy", [name], CATALOG)
    if CATALOG[name].is_taught:
        raise ValueError(f"policy {name} begins with what it learnt from another load: only `compare` has one")
    settings = dict(checked(name, parse_settings(rest)))
    if name == "static":
        settings.setdefault("replicas", scenario.initial_replicas)
        scenario = replace(scenario, initial_replicas=settings["replicas"])
    try:
        return CATALOG[name].make(scenario, load, settings), scenario
    except TypeError as error:
        raise ValueError(f"policy {name}: {error}") from error


def _check_names(what: str, names: Sequence[str], known: Iterable[str]) -> None:
    """Raises ValueError."""
    for name in names:
        if name not in known:
            raise ValueError(f"{what} {name!r} is none of {', '.join(known)}")
        if names.count(name) > 1:
            raise ValueError(f"{what} {name!r} is given twice")


def _compare(options: argparse.Namespace) -> int:
    _check_paths(json=options.json, markdown=options.markdown)
    policies, load_names, routings = (text.split(",") for text in (options.policies, options.loads, options.routings))
    _check_names("policy", policies, CATALOG)
    _check_names("load", load_names, LOADS)
    _check_names("routing", routings, ROUTINGS)
    start_seconds = [float(text) for text in options.start_seconds.split(",")]
    if not all(0 < seconds < math.inf for seconds in start_seconds):
        raise ValueError(f"--start-seconds {options.start_seconds}: all must be above 0 and finite")
    if not 0 < options.scale <= 1:
        raise ValueError(f"--scale {options.scale:g}: it must be above 0, at most 1")
    known = [] if options.grid is None else _read(options.grid)[0]
    old_trials, old_cells = ([], []) if options.keep is None else _read(options.keep)
    with progress_bar("comparison") as on_progress:
        trials, cells = compare(
            load_names=load_names,
            start_seconds=start_seconds,
            policies=policies,
            routings=routings,
            scale=options.scale,
            seed=options.seed,
            workers=options.workers,
            known=known,
            on_progress=lambda done, total: on_progress(done / total),
        )
    if options.keep is not None:
        trials = [trial for trial in old_trials if trial.policy not in policies] + trials
        cells = [cell for cell in old_cells if cell.policy not in policies] + cells
        cells.sort(
            key=lambda cell: (
                cell.routing,
                options.loads.find(cell.load),
                cell.start_seconds,
                list(CATALOG).index(cell.policy),
            )
        )
    note = {"seed": options.seed, "commit": options.commit, "scale": options.scale}
    if options.json is not None:
        options.json.write_text(_dump({**note, **to_json(trials, cells)}))
    text = table.comparison(cells)
    if options.markdown is not None:
        written = f"{text}\n\n## Grids\n\nThe chosen point is bold.\n\n{table.grid_report(trials)}"
        options.markdown.write_text(put_tables(options.markdown, written))
    print(text)
    return 0


def put_tables(page: Path, tables: str) -> str:
    """The page with what stands between its marks replaced; the tables alone when there is no page with marks."""
    before, begin, rest = (page.read_text() if page.is_file() else "").partition(BEGIN)
    _, end, after = rest.partition(END)
    return f"{before}{begin}\n\n{tables}\n\n{end}{after}" if begin and end else tables + "\n"


def _read(path: Path) -> tuple[list[Trial], list[Cell]]:
    """Raises ValueError, OSError."""
    try:
        return from_json(json.loads(path.read_text()))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is no --json of `pagefleet-sim compare`: {error!r}") from error


def from_json(document: dict[str, Any]) -> tuple[list[Trial], list[Cell]]:
    """What to_json() gave."""
    names = {field.name for field in fields(Result)}

    def result(item: dict[str, Any]) -> Result:
        values: dict[str, Any] = {
            name: math.inf if value is None else value for name, value in item["result"].items() if name in names
        }
        return Result(**values)

    trials = [Trial(item["load"], item["policy"], item["settings"], result(item)) for item in document["trials"]]
    cells = [
        Cell(item["load"], item["start_seconds"], item["policy"], item["settings"], result(item), item["routing"])
        for item in document["cells"]
    ]
    return trials, cells


def _dump(document: dict[str, Any]) -> str:
    """JSON has no infinity: null stands for it."""

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: finite(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [finite(item) for item in value]
        if isinstance(value, float):
            return None if math.isinf(value) else round(value, 4)
        return value

    return json.dumps(finite(document), indent=1) + "\n"


@contextmanager
def progress_bar(name: str) -> Iterator[Progress]:
    """A bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from tqdm import tqdm

    with tqdm(total=100, desc=name, unit="%", leave=False) as bar:

        def on_progress(part: float) -> None:
            bar.update(max(0, int(100 * part) - bar.n))

        yield on_progress
