"""Whatever the strategy and the order in which pods become ready or break, a rollout stays in bounds and ends."""

import copy
import random

from hypothesis import given
from hypothesis import strategies as st

from pagefleet_localcluster.controllers.deployment_plan import plan_deployment
from pagefleet_localcluster.controllers.replica_arithmetic import available_of, fence_posts, size_of
from pagefleet_localcluster.objects import Object, name_of
from support.localcluster_builders import deployment, template

MAX_ROUNDS = 400


class Fleet:
    """ReplicaSets whose pods become ready one at a time, in random order."""

    def __init__(self, d: Object, seed: int) -> None:
        self.deployment = d
        self.sets: dict[str, Object] = {}
        self._random = random.Random(seed)
        self._created = 0

    def step(self, now: float) -> bool:
        """One plan and one pod's progress; False when neither changed anything."""
        plan = plan_deployment(self.deployment, list(self.sets.values()), 0, now)
        changed = bool(plan.create or plan.resize or plan.delete) or plan.status != self.deployment["status"]
        self.deployment["status"] = plan.status
        if plan.create is not None:
            body = copy.deepcopy(plan.create)
            self._created += 1
            body["metadata"] |= {"uid": name_of(body), "creationTimestamp": f"2026-01-01T00:00:{self._created:02}Z"}
            body["status"] = {"replicas": body["spec"]["replicas"], "availableReplicas": 0}
            self.sets[name_of(body)] = body
        for resize in plan.resize:
            rs = self.sets[resize.name]
            rs["spec"]["replicas"] = resize.after
            rs["metadata"].setdefault("annotations", {}).update(resize.annotations)
            rs["status"]["replicas"] = resize.after
            rs["status"]["availableReplicas"] = min(available_of(rs), resize.after)
        for name in plan.delete:
            del self.sets[name]
        return self._become_ready() or changed

    def _become_ready(self) -> bool:
        waiting = [rs for rs in self.sets.values() if available_of(rs) < size_of(rs)]
        if waiting:
            rs = self._random.choice(waiting)
            rs["status"]["availableReplicas"] = rs["status"]["readyReplicas"] = available_of(rs) + 1
        return bool(waiting)

    @property
    def total(self) -> int:
        return sum(map(size_of, self.sets.values()))

    @property
    def available(self) -> int:
        return sum(map(available_of, self.sets.values()))


@given(
    replicas=st.integers(0, 12),
    scaled=st.integers(0, 12),
    surge=st.sampled_from([0, 1, 3, "25%", "100%"]),
    unavailable=st.sampled_from([0, 1, 2, "25%", "100%"]),
    rolling=st.booleans(),
    interrupted=st.integers(0, 12),
    seed=st.integers(0, 2**16),
)
def test_every_rollout_ends_within_its_bounds(
    replicas: int,
    scaled: int,
    surge: int | str,
    unavailable: int | str,
    rolling: bool,
    interrupted: int,
    seed: int,
) -> None:
    """A rollout, interrupted by a second one and a change of the count, ends with the last template only."""
    d = deployment(
        replicas=replicas,
        max_surge=surge,
        max_unavailable=unavailable,
        strategy="RollingUpdate" if rolling else "Recreate",
    )
    fleet = Fleet(d, seed)
    for image, rounds in (("img:1", MAX_ROUNDS), ("img:2", interrupted), ("img:3", MAX_ROUNDS)):
        d["spec"]["template"] = template(image)
        d["metadata"]["generation"] += 1
        settled = fleet.available
        for number in range(rounds):
            if not fleet.step(float(number)):
                break
            if rolling:
                highest, lowest = fence_posts(d)[0] + replicas, replicas - fence_posts(d)[1]
                assert fleet.total <= highest
                assert fleet.available >= min(settled, lowest)
        else:
            assert rounds < MAX_ROUNDS, "the rollout never came to rest"
    assert fleet.total == fleet.available == replicas
    d["spec"]["replicas"] = scaled
    d["metadata"]["generation"] += 1
    for number in range(MAX_ROUNDS):
        if not fleet.step(float(number)):
            break
    assert fleet.total == fleet.available == scaled
    newest = [rs for rs in fleet.sets.values() if size_of(rs)]
    assert [rs["spec"]["template"]["spec"]["containers"][0]["image"] for rs in newest] in ([], ["img:3"])
    assert d["status"]["observedGeneration"] == d["metadata"]["generation"]
    progressing = next(c for c in d["status"]["conditions"] if c["type"] == "Progressing")
    assert progressing["reason"] == "NewReplicaSetAvailable"
