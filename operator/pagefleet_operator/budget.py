"""How the LLMDeployments of one namespace share its budget of devices. Pure.

First everyone's minimum, then what is wanted, by priority. Among equals what load needs comes before what only stands
ready for a jump of it, and what runs stays where it is. A replica that is taken from another deployment is counted
until its pod is gone, so the budget holds at every moment.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pagefleet_operator.names import ObjectKey


@dataclass(frozen=True, slots=True)
class Claim:
    """What one LLMDeployment holds and wants."""

    key: ObjectKey
    priority: int
    """The larger is the more important, as in a PriorityClass."""
    devices_per_replica: int
    """>= 1; a deployment without devices makes no claim."""
    replicas: int
    """spec.replicas: what it was granted last."""
    devices_held: int
    """Of all its pods that exist: surge, pending and terminating ones, too."""
    wanted: int
    """Replicas that it would have without a budget."""
    minimum: int
    """autoscaling.minReplicas; without autoscaling spec.replicas."""
    needed: int
    """Of what is wanted, what load needs; the rest stands ready for a jump. At most `wanted`."""


def allowances(claims: Sequence[Claim], devices: int) -> Mapping[ObjectKey, int]:
    """Replicas that each may have now; together with what other pods still hold never more than `devices`.

    A deployment may keep devices that it holds while no more important one wants them, and no equal one needs them for
    load while here they only stand ready.
    """
    entitled = _entitlements(claims, devices)
    taken = {claim.key: max(claim.devices_held, claim.replicas * claim.devices_per_replica) for claim in claims}
    total = sum(taken.values())
    allowed: dict[ObjectKey, int] = {}
    for claim in sorted(claims, key=_rank):
        # Surge and leaving pods of its own hold devices beyond its replicas.
        beyond = max(0, claim.devices_held - claim.replicas * claim.devices_per_replica)
        free = devices - beyond - (total - taken[claim.key])
        fitting = max(0, free) // claim.devices_per_replica
        # What was granted before needs no free device: it is counted in what it holds.
        allowed[claim.key] = min(entitled[claim.key], max(fitting, claim.replicas))
        now_taken = max(taken[claim.key], allowed[claim.key] * claim.devices_per_replica + beyond)
        total += now_taken - taken[claim.key]
        taken[claim.key] = now_taken
    return allowed


def _rank(claim: Claim) -> tuple[int, str, str]:
    return (-claim.priority, claim.key.namespace, claim.key.name)


def _entitlements(claims: Sequence[Claim], devices: int) -> dict[ObjectKey, int]:
    """Replicas of each when nothing had to be waited for."""
    left = devices
    granted = {claim.key: 0 for claim in claims}

    def grant(claim: Claim, upto: int) -> None:
        nonlocal left
        more = max(0, min(upto - granted[claim.key], left // claim.devices_per_replica))
        granted[claim.key] += more
        left -= more * claim.devices_per_replica

    ordered = sorted(claims, key=_rank)
    for claim in ordered:
        grant(claim, min(claim.minimum, max(claim.wanted, claim.replicas)))
    for priority in sorted({claim.priority for claim in claims}, reverse=True):
        equals = [claim for claim in ordered if claim.priority == priority]
        for claim in equals:
            grant(claim, min(claim.needed, claim.replicas))
        for claim in equals:
            grant(claim, claim.needed)
        for claim in equals:
            grant(claim, min(claim.wanted, claim.replicas))
        for claim in equals:
            grant(claim, claim.wanted)
    for claim in ordered:  # what nobody wants stays with who has it: shrinking has its own rules
        grant(claim, claim.replicas)
    return granted
