"""Which pods go when a fleet shrinks, said through pod-deletion-cost before the ReplicaSet chooses. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pagefleet_operator.fleet import PodState, Sample
from pagefleet_operator.pods import Pod

VICTIM_COST = -1000
"""pod-deletion-cost of a chosen victim; every other pod has none, which counts as 0."""


@dataclass(frozen=True, slots=True)
class Shrink:
    """Costs to write before the Deployment may shrink."""

    victims: tuple[str, ...] = ()
    """Names of the pods that shall go."""
    costs: Mapping[str, int | None] = field(default_factory=dict)
    """Pod -> cost to write; None takes it away."""


def choose(pods: Sequence[Pod], samples: Mapping[str, Sample], *, wanted: int) -> Shrink:
    """Victims so that `wanted` pods remain, and the costs that say so. `samples` are by pod name.

    Pods that do not serve go first, then those already marked (so that a choice stands), then the ones with the
    fewest running requests, then the fewest cached blocks, then the youngest.
    """
    living = [pod for pod in pods if not pod.terminating and not pod.finished]
    surplus = max(0, len(living) - wanted)
    by_age = sorted(living, key=lambda pod: (pod.created, pod.name), reverse=True)
    ordered = sorted(by_age, key=lambda pod: _worth(pod, samples.get(pod.name)))
    victims = {pod.name for pod in ordered[:surplus]}
    costs: dict[str, int | None] = {}
    for pod in living:
        if pod.name in victims and pod.deletion_cost != VICTIM_COST:
            costs[pod.name] = VICTIM_COST
        elif pod.name not in victims and pod.deletion_cost == VICTIM_COST:
            costs[pod.name] = None
    return Shrink(tuple(sorted(victims)), costs)


def _worth(pod: Pod, sample: Sample | None) -> tuple[int, ...]:
    """Lowest goes first."""
    if pod.state in (PodState.UNSCHEDULABLE, PodState.CRASHED):
        return (0,)
    if pod.state is PodState.STARTING:
        return (1,)
    marked = 0 if pod.deletion_cost is not None and pod.deletion_cost < 0 else 1
    if sample is None:
        return (2, marked, 0, 0)
    return (2, marked, sample.running + sample.waiting, sample.blocks_cached)
