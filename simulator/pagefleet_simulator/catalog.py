"""Every policy by name: how it is made from settings, and the grid it is tuned over."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from pagefleet_operator.model import AutoscalingSpec, Slo
from pagefleet_simulator.policies.apa import Apa, ApaSettings
from pagefleet_simulator.policies.hpa import Hpa, HpaSettings
from pagefleet_simulator.policies.kpa import Kpa, KpaSettings
from pagefleet_simulator.policies.ours import PageFleet
from pagefleet_simulator.policies.policy import Policy
from pagefleet_simulator.policies.simple import KubeAi, KubeAiSettings, Static
from pagefleet_simulator.policies.wva import WvaPercent, WvaSettings, WvaTokens
from pagefleet_simulator.scenario import Scenario
from pagefleet_simulator.workload import Workload

Settings = Mapping[str, Any]
MEMORY = "memory"
"""The setting that holds what PageFleet learnt before."""
Maker = Callable[[Scenario, Workload, Settings], Policy]


@dataclass(frozen=True, slots=True)
class Entry:
    """One policy."""

    make: Maker
    grid: Mapping[str, Sequence[Any]]
    """Values of each setting; every combination is tried."""
    is_taught: bool = False
    """It is not tuned but lives through the slice that others are tuned on; `memory` is what that left."""

    def combinations(self) -> list[Settings]:
        """All of the grid; the settings by default when there is none."""
        return [dict(zip(self.grid, values, strict=True)) for values in product(*self.grid.values())]


TARGETS = {"kv_block_occupancy_percent": (1, 100), "queued_requests_per_replica": (1, 1000)}
"""Settings of PageFleet and their bounds, as in the CRD."""
FROM_ZERO = ("down_window_seconds", "down_cooldown_seconds", "scale_down_delay_seconds", "spare_kv", "spare_queue")
"""Settings that may be 0; all others must be above it."""


def checked(name: str, settings: Settings) -> Settings:
    """The settings if policy `name` can be made from them. Raises ValueError."""
    for key, value in settings.items():
        if key == MEMORY and CATALOG[name].is_taught:
            continue
        if name.startswith("pagefleet"):
            if key not in TARGETS:
                raise ValueError(f"policy {name} has no setting {key!r}; it has {', '.join(TARGETS)}")
            low, high = TARGETS[key]
            if not (isinstance(value, int) and low <= value <= high):
                raise ValueError(f"policy {name}: {key} is {value}; it must be a whole number, {low} to {high}")
        elif name == "static" and not isinstance(value, int):
            raise ValueError(f"policy static: {key} is {value}; it must be a whole number")
        elif value is None and (name, key) != ("apa", "requests"):
            raise ValueError(f"policy {name}: {key} cannot be none")
        elif value is not None and not (0 < value < math.inf or (value == 0 and key in FROM_ZERO)):
            raise ValueError(f"policy {name}: {key} is {value}; it must be above 0 and finite")
    return settings


def _ours(scenario: Scenario, workload: Workload, settings: Settings) -> PageFleet:
    objective = scenario.objective
    spec = AutoscalingSpec(
        min_replicas=scenario.min_replicas,
        max_replicas=scenario.max_replicas,
        slo=Slo(
            time_to_first_token_ms=max(1, round(1000 * objective.time_to_first_token_seconds)),
            inter_token_latency_ms=max(1, round(1000 * objective.time_per_token_seconds)),
        ),
        **{name: value for name, value in settings.items() if name != MEMORY},
    )
    return PageFleet(spec, period_seconds=scenario.scrape_seconds, memory=settings.get(MEMORY))


def _wva_tokens(scenario: Scenario, workload: Workload, settings: Settings) -> Policy:
    tokens = sum(arrival.prompt_tokens for arrival in workload.arrivals) / max(1, len(workload.arrivals))
    return WvaTokens(WvaSettings(**settings), mean_prompt_blocks=tokens / scenario.profile.block_size)


REQUESTS = (5.0, 7.0, 9.0)
"""Requests of one replica that the concurrency policies aim at: around what the profile runs at its objective."""

CATALOG: Mapping[str, Entry] = {
    "pagefleet": Entry(_ours, {}),
    "pagefleet-learnt": Entry(_ours, {}, is_taught=True),
    "pagefleet-tuned": Entry(_ours, {"kv_block_occupancy_percent": (40, 60, 80, 100)}),
    "hpa": Entry(
        lambda _, __, settings: Hpa(HpaSettings(**settings)),
        {"occupancy_percent": (50.0, 65.0, 80.0), "waiting": (1.0, 5.0)},
    ),
    "kpa": Entry(
        lambda _, __, settings: Kpa(KpaSettings(**settings)),
        {"target_concurrency": REQUESTS, "scale_down_delay_seconds": (0.0, 300.0)},
    ),
    "apa": Entry(
        lambda _, __, settings: Apa(ApaSettings(**settings)),
        {"occupancy_percent": (50.0, 65.0, 80.0), "requests": (None, 8.0)},
    ),
    "wva1": Entry(
        lambda _, __, settings: WvaPercent(WvaSettings(**settings)),
        {"kv_threshold": (0.6, 0.8), "down_window_seconds": (0.0, 300.0)},
    ),
    "wva2": Entry(
        _wva_tokens,
        {"kv_threshold": (0.6, 0.8), "scale_up_utilisation": (0.7, 0.85), "down_window_seconds": (300.0,)},
    ),
    "kubeai": Entry(
        lambda _, __, settings: KubeAi(KubeAiSettings(**settings)),
        {"target_requests": REQUESTS, "window_seconds": (60.0, 600.0)},
    ),
    "static": Entry(lambda _, __, settings: Static(**settings), {"replicas": (1, 2, 3, 4, 5, 6, 7)}),
}
