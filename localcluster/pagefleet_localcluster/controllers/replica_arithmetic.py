"""How many replicas each ReplicaSet of a Deployment should have: rolling updates and proportional scaling.

Pure. The rules are those of Kubernetes' deployment controller (rolling.go, sync.go, deployment_util.go)."""

from collections.abc import Sequence

from pagefleet_localcluster.objects import Object, annotations_of, name_of, resolve_percent

DESIRED_ANNOTATION = "deployment.kubernetes.io/desired-replicas"
MAX_ANNOTATION = "deployment.kubernetes.io/max-replicas"


def size_of(replica_set: Object) -> int:
    """`spec.replicas`."""
    return int(replica_set["spec"].get("replicas", 1))


def available_of(replica_set: Object) -> int:
    """`status.availableReplicas`."""
    return int((replica_set.get("status") or {}).get("availableReplicas", 0))


def is_rolling(deployment: Object) -> bool:
    """Whether the strategy is RollingUpdate."""
    return bool((deployment["spec"].get("strategy") or {}).get("type", "RollingUpdate") == "RollingUpdate")


def fence_posts(deployment: Object) -> tuple[int, int]:
    """(maxSurge, maxUnavailable) as pods. Surge rounds up, unavailable down; both zero becomes (0, 1)."""
    if not is_rolling(deployment):
        return 0, 0
    rolling = (deployment["spec"].get("strategy") or {}).get("rollingUpdate") or {}
    wanted = size_of(deployment)
    surge = resolve_percent(rolling.get("maxSurge", "25%"), wanted, round_up=True)
    unavailable = resolve_percent(rolling.get("maxUnavailable", "25%"), wanted, round_up=False)
    if surge == 0 and unavailable == 0:
        unavailable = 1
    return surge, min(unavailable, wanted)


def new_size(deployment: Object, new: Object | None, every: Sequence[Object]) -> int:
    """What the new ReplicaSet should grow to now, within maxSurge (at once for Recreate)."""
    wanted = size_of(deployment)
    current = size_of(new) if new is not None else 0
    if not is_rolling(deployment) or current > wanted:
        return wanted
    room = wanted + fence_posts(deployment)[0] - sum(map(size_of, every))
    return current if room <= 0 else current + min(room, wanted - current)


def shrink_old(deployment: Object, new: Object, old: Sequence[Object]) -> dict[str, int]:
    """New sizes (by name) of old ReplicaSets that shrink now, within maxUnavailable: unhealthy replicas first."""
    if not sum(map(size_of, old)):
        return {}
    floor = size_of(deployment) - fence_posts(deployment)[1]
    new_unavailable = size_of(new) - available_of(new)
    may_go = sum(map(size_of, [new, *old])) - floor - new_unavailable
    if may_go <= 0:
        return {}
    sizes = {name_of(rs): size_of(rs) for rs in old}
    oldest_first = sorted(old, key=lambda rs: rs["metadata"].get("creationTimestamp") or "")
    for rs in oldest_first:
        unhealthy = min(may_go, max(0, size_of(rs) - available_of(rs)))
        sizes[name_of(rs)] -= unhealthy
        may_go -= unhealthy
    surplus = sum(map(available_of, [new, *old])) - floor
    for rs in oldest_first:
        gone = max(0, min(sizes[name_of(rs)], surplus))
        sizes[name_of(rs)] -= gone
        surplus -= gone
    return {name_of(rs): sizes[name_of(rs)] for rs in old if sizes[name_of(rs)] != size_of(rs)}


def scaled_sizes(deployment: Object, new: Object | None, old: Sequence[Object]) -> dict[str, int]:
    """New sizes (by name) after `spec.replicas` changed or while paused: proportional over active ReplicaSets."""
    wanted = size_of(deployment)
    active = [rs for rs in [*old, *([new] if new is not None else [])] if size_of(rs) > 0]
    if len(active) <= 1:
        newest_old = max(old, key=lambda rs: rs["metadata"].get("creationTimestamp") or "", default=None)
        target = active[0] if active else new if new is not None else newest_old
        return {name_of(target): wanted} if target is not None else {}
    if new is not None and size_of(new) == wanted == available_of(new):
        return {name_of(rs): 0 for rs in old if size_of(rs) > 0}
    if not is_rolling(deployment):
        return {}
    allowed = wanted + fence_posts(deployment)[0] if wanted else 0
    to_add = allowed - sum(map(size_of, active))
    # Larger first; among equals the newer first when growing, the older first when shrinking.
    ordered = sorted(active, key=lambda rs: rs["metadata"].get("creationTimestamp") or "", reverse=to_add > 0)
    ordered.sort(key=size_of, reverse=True)
    sizes: dict[str, int] = {}
    added = 0
    for rs in ordered:
        share = _share(deployment, rs)
        left = to_add - added
        share = 0 if left == 0 else min(share, left) if to_add > 0 else max(share, left)
        sizes[name_of(rs)] = size_of(rs) + share
        added += share
    first = name_of(ordered[0])
    sizes[first] = max(0, sizes[first] + to_add - added)
    return sizes


def _share(deployment: Object, replica_set: Object) -> int:
    wanted, size = size_of(deployment), size_of(replica_set)
    if wanted == 0:
        return -size
    before = int(
        annotations_of(replica_set).get(MAX_ANNOTATION) or (deployment.get("status") or {}).get("replicas", 0) or 0
    )
    if before == 0:
        return 0
    exact = size * (wanted + fence_posts(deployment)[0]) / before
    return int(exact + 0.5) - size
