"""How a namespace's devices are shared."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from pagefleet_operator.budget import Claim, allowances
from pagefleet_operator.names import ObjectKey


def claim(
    name: str,
    *,
    replicas: int,
    wanted: int,
    priority: int = 0,
    held: int | None = None,
    per: int = 1,
    minimum: int = 1,
    needed: int | None = None,
) -> Claim:
    return Claim(
        ObjectKey("default", name),
        priority=priority,
        devices_per_replica=per,
        replicas=replicas,
        devices_held=replicas * per if held is None else held,
        wanted=wanted,
        minimum=minimum,
        needed=wanted if needed is None else needed,
    )


def shared(devices: int, *claims: Claim) -> dict[str, int]:
    return {key.name: replicas for key, replicas in allowances(claims, devices).items()}


def test_with_room_everyone_gets_what_it_wants() -> None:
    assert shared(8, claim("a", replicas=1, wanted=3), claim("b", replicas=2, wanted=4)) == {"a": 3, "b": 4}


def test_the_last_device_goes_to_the_more_important() -> None:
    low, high = claim("a", replicas=1, wanted=2), claim("b", replicas=1, wanted=2, priority=5)
    assert shared(3, low, high) == {"a": 1, "b": 2}


def test_among_equals_what_runs_stays() -> None:
    assert shared(4, claim("a", replicas=1, wanted=3), claim("b", replicas=3, wanted=3)) == {"a": 1, "b": 3}


def test_the_more_important_takes_back_but_waits_until_the_pod_is_gone() -> None:
    low, high = claim("a", replicas=3, wanted=3), claim("b", replicas=1, wanted=3, priority=1)
    assert shared(4, low, high) == {"a": 1, "b": 1}
    leaving = claim("a", replicas=1, wanted=3, held=3)
    assert shared(4, leaving, high) == {"a": 1, "b": 1}
    gone = claim("a", replicas=1, wanted=3)
    assert shared(4, gone, high) == {"a": 1, "b": 3}


def test_surge_of_its_own_counts_against_its_growth() -> None:
    assert shared(4, claim("a", replicas=2, wanted=4, held=3)) == {"a": 3}


def test_minimums_come_before_the_wishes_of_the_more_important() -> None:
    low, high = claim("a", replicas=2, wanted=2, minimum=2), claim("b", replicas=1, wanted=9, priority=9)
    assert shared(5, low, high) == {"a": 2, "b": 3}


def test_devices_per_replica_are_honoured() -> None:
    assert shared(7, claim("a", replicas=1, wanted=5, per=4), claim("b", replicas=1, wanted=1, per=2)) == {
        "a": 1,
        "b": 1,
    }


def test_what_only_stands_ready_yields_to_the_load_of_an_equal() -> None:
    """Of four replicas one has load; the other three wait for a jump while the neighbour's load has nowhere to go."""
    ready, busy = claim("a", replicas=4, wanted=4, needed=1), claim("b", replicas=1, wanted=3)
    assert shared(5, ready, busy) == {"a": 2, "b": 1}, "no more than is asked for"
    leaving = claim("a", replicas=2, wanted=4, needed=1, held=4)
    assert shared(5, leaving, busy) == {"a": 2, "b": 1}, "not before the pods are gone"
    gone = claim("a", replicas=2, wanted=4, needed=1)
    assert shared(5, gone, busy) == {"a": 2, "b": 3}


def test_among_equals_that_only_stand_ready_what_runs_stays() -> None:
    assert shared(4, claim("a", replicas=1, wanted=3, needed=1), claim("b", replicas=3, wanted=3, needed=1)) == {
        "a": 1,
        "b": 3,
    }


def test_what_stands_ready_for_the_more_important_comes_before_load() -> None:
    high, low = claim("a", replicas=1, wanted=3, needed=1, priority=1), claim("b", replicas=3, wanted=3)
    assert shared(4, high, low) == {"a": 1, "b": 1}


CLAIMS = st.lists(
    st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(-2, 2), st.integers(0, 3), st.integers(1, 4)),
    max_size=5,
)


@settings(deadline=None)
@given(CLAIMS, st.integers(0, 40))
def test_nothing_grows_beyond_the_budget(rows: list[tuple[int, int, int, int, int]], devices: int) -> None:
    claims = [
        claim(str(index), replicas=replicas, wanted=wanted, priority=priority, held=replicas * per + extra, per=per)
        for index, (replicas, wanted, priority, extra, per) in enumerate(rows)
    ]
    allowed = allowances(claims, devices)
    for item in claims:
        assert allowed[item.key] >= 0
    grown = sum(max(0, allowed[item.key] - item.replicas) * item.devices_per_replica for item in claims)
    assert grown == 0 or grown + sum(item.devices_held for item in claims) <= devices
    # Once everything that left is gone, what is allowed fits.
    assert sum(allowed[item.key] * item.devices_per_replica for item in claims) <= devices


WISHES = st.lists(
    st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 6), st.integers(-1, 1), st.integers(1, 3)),
    min_size=1,
    max_size=5,
)


@settings(deadline=None)
@given(WISHES, st.integers(0, 40))
def test_nothing_stands_ready_at_the_cost_of_load(rows: list[tuple[int, int, int, int, int]], devices: int) -> None:
    """Once all pods are where they belong: what stands ready here leaves as much for the load of those that are no
    less important as if nothing stood ready."""

    def settled(stands: bool) -> dict[str, int]:
        claims = [
            claim(
                str(index),
                replicas=replicas,
                wanted=max(needed, wanted) if stands else needed,
                needed=needed,
                minimum=0,  # a minimum comes before everyone's load, whoever stands ready
                priority=priority,
                per=per,
            )
            for index, (replicas, needed, wanted, priority, per) in enumerate(rows)
        ]
        for _ in range(len(rows) + 2):  # each round the pods that were taken leave, and what is free is given
            allowed = allowances(claims, devices)
            claims = [
                replace(item, replicas=allowed[item.key], devices_held=allowed[item.key] * item.devices_per_replica)
                for item in claims
            ]
        return {item.key.name: item.replicas for item in claims}

    highest = max(row[3] for row in rows)
    without, ready = settled(stands=False), settled(stands=True)
    for index, (_, needed, _, priority, _) in enumerate(rows):
        if priority == highest:
            assert min(ready[str(index)], needed) >= min(without[str(index)], needed)
