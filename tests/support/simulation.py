"""Builders for simulator tests: a small, fast replica and short loads."""

from typing import Any

from pagefleet_operator.fleet import Fleet, FleetPod, PodState, Sample
from pagefleet_simulator.profile import Profile
from pagefleet_simulator.scenario import Scenario
from pagefleet_simulator.workload import Arrival, Workload


def small_profile(**fields: Any) -> Profile:
    values: dict[str, Any] = {
        "name": "small",
        "source": "made up for tests",
        "num_blocks": 64,
        "block_size": 16,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 128,
        "max_step_seconds": None,
        "max_queue": 64,
        "devices": 1,
        "step_seconds": 0.02,
        "prompt_token_seconds": 0.001,
        "prompt_pair_seconds": 1e-7,
        "decode_token_seconds": 0.001,
        "decode_pair_seconds": 1e-6,
    }
    return Profile(**{**values, **fields})


def small_scenario(**fields: Any) -> Scenario:
    values: dict[str, Any] = {"profile": small_profile(), "start_seconds": 20.0, "max_replicas": 8}
    return Scenario(**{**values, **fields})


def evenly(count: int, gap: float, *, prompt: int = 100, output: int = 40) -> Workload:
    """`count` equal requests, one every `gap` seconds."""
    return Workload("even", tuple(Arrival(index * gap, prompt, output) for index in range(count)), count * gap)


def ready_fleet(replicas: int, *samples: Sample | None, starting: int = 0, crashed: int = 0) -> Fleet:
    """Ready pods with these samples (None: silent), and others."""
    pods = [
        FleetPod(f"p{index}", PodState.READY if item else PodState.UNREACHABLE, item)
        for index, item in enumerate(samples)
    ]
    pods += [FleetPod(f"s{index}", PodState.STARTING) for index in range(starting)]
    pods += [FleetPod(f"c{index}", PodState.CRASHED) for index in range(crashed)]
    return Fleet(replicas, tuple(pods))
