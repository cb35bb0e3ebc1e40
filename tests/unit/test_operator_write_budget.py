"""How much is written: never more than the budget in any second, whoever writes; numbers take turns, evenly spaced; and
what people wait for goes first."""

import asyncio
import heapq
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from pagefleet_operator.names import ObjectKey
from pagefleet_operator.pacing import Pace
from pagefleet_operator.reconcile import ObjectLoop
from pagefleet_operator.settings import OperatorSettings, ReconcileSettings
from pagefleet_operator.store import LLMDEPLOYMENT, POD, REPLICA_SET, Store
from pagefleet_operator.write_budget import SECOND, Rank, WriteBudget
from support.operator_fakes import context_of
from support.operator_objects import llmd_body, pod_body, replica_set_body, sample

RATE = ReconcileSettings().status_writes_per_second
BUDGET = ReconcileSettings().writes_per_second


class KeepingApi:
    """Takes every write and merges statuses, as an API server does."""

    def __init__(self) -> None:
        self.version = 1000
        self.status: dict[str, dict[str, Any]] = {}
        self.written: Counter[str] = Counter()
        self.before_write: Callable[[], None] = lambda: None
        self.reads = 0

    async def get(self, *_: Any) -> None:
        self.reads += 1

    async def create(self, _resource: Any, _namespace: str, body: dict[str, Any]) -> dict[str, Any]:
        self.before_write()
        return body

    async def apply(self, _resource: Any, manifest: dict[str, Any]) -> dict[str, Any]:
        self.before_write()
        self.version += 1
        return {**manifest, "metadata": {**manifest["metadata"], "uid": "c", "resourceVersion": str(self.version)}}

    async def patch(self, _resource: Any, _namespace: str, name: str, body: dict[str, Any], **_: Any) -> dict[str, Any]:
        self.before_write()
        self.version += 1
        self.written[name] += 1
        merged = {**self.status.get(name, {}), **body["status"]}
        self.status[name] = {key: value for key, value in merged.items() if value is not None}
        made = llmd_body(name, uid=name, status=self.status[name])
        made["metadata"]["resourceVersion"] = str(self.version)
        return made


@pytest.mark.parametrize("count", [1, 40, 120])
async def test_all_objects_together_write_their_numbers_evenly_and_within_the_budget(count: int) -> None:
    now = 1_800_000_000.0
    api, store = KeepingApi(), Store()
    settings = ReconcileSettings(writes_per_second=10_000)
    context = context_of(api, store, lambda: now, OperatorSettings(namespaces=("default",), reconcile=settings))
    names = [f"m{number}" for number in range(count)]
    loops = {name: ObjectLoop(ObjectKey("default", name), context, asyncio.Semaphore(1)) for name in names}
    for name in names:
        store.put(LLMDEPLOYMENT, llmd_body(name, uid=name))
        store.put(REPLICA_SET, replica_set_body(name))
        store.put(POD, pod_body(f"{name}-pod", owner=name))

    async def step(used: int) -> int:
        """Every object is looked at under another load; how many were written."""
        before = api.written.total()
        context.scraper.rounds += 1
        context.scraper._samples = {f"uid-{name}-pod": sample(used=used, time=now) for name in names}
        for name, loop in loops.items():
            body = store.get(LLMDEPLOYMENT, ObjectKey("default", name))
            assert body is not None
            await loop.step(body)
        return api.written.total() - before

    async def seconds(number: int) -> list[int]:
        nonlocal now
        writes = []
        for tick in range(number):
            now += 1
            writes.append(await step(10 + 50 * (tick % 2) + tick % 7))
        return writes

    assert await step(1) == count, "the first status is written at once"
    now += 60
    assert await step(1) == 0, "nothing at rest"
    api.written.clear()
    writes = await seconds(20)
    assert max(writes) <= RATE + 1, "however many change at once"
    assert sum(writes) >= min(RATE, count / 3) * 18, "the budget is used"
    assert min(api.written[name] for name in names) >= min(20 / 3, 20 * RATE / count) - 1, "each in its turn"
    now += 1
    store.put(POD, pod_body("b", owner="m0", ready=False, waiting=("ImagePullBackOff", "no such image")))
    api.written.clear()
    await step(10)
    assert api.written["m0"] == 1, "a condition does not wait for its turn"


def test_turns_are_evenly_spaced_and_none_is_kept_for_later() -> None:
    pace = Pace(4)
    assert [pace.next_turn(10.0) for _ in range(3)] == [10.0, 10.25, 10.5]
    assert pace.next_turn(60.0) == 60.0, "a pause is no credit"
    assert pace.next_turn(60.0) == 60.25


def most_in_a_second(times: list[float]) -> int:
    """The most moments in any second that ends with one of them."""
    return max((index + 1 - bisect_right(times, end - SECOND) for index, end in enumerate(times)), default=0)


class Simulation:
    """Loops of many objects in virtual time: each step takes `step_seconds` and is followed by the next one due."""

    def __init__(self, count: int, *, step_seconds: float = 0.005) -> None:
        self.now = 1_800_000_000.0
        self.step_seconds = step_seconds
        self.api, self.store = KeepingApi(), Store()
        self.context = context_of(self.api, self.store, lambda: self.now, OperatorSettings(namespaces=("default",)))
        self.sent: list[float] = []
        self.first_words: dict[str, float] = {}
        self.api.before_write = self._send
        self.names = [f"m{number}" for number in range(count)]
        self.due = [(self.now, name) for name in self.names]
        for name in self.names:
            self.store.put(LLMDEPLOYMENT, llmd_body(name, uid=name))
        turns = asyncio.Semaphore(1)
        self.loops = {name: ObjectLoop(ObjectKey("default", name), self.context, turns) for name in self.names}

    def _send(self) -> None:
        self.sent.append(self.now)
        self.context.budget.sent(self.now)

    def mark(self, *names: str) -> None:
        """They need a look now."""
        self.due = [item for item in self.due if item[1] not in names] + [(self.now, name) for name in names]
        heapq.heapify(self.due)

    async def run(self, seconds: float) -> None:
        """Until nothing is due within so many seconds of now."""
        end = self.now + seconds
        while self.due and self.due[0][0] <= end:
            moment, name = heapq.heappop(self.due)
            self.now = max(self.now, moment) + self.step_seconds
            body = self.store.get(LLMDEPLOYMENT, ObjectKey("default", name))
            assert body is not None
            due = await self.loops[name].step(body)
            if name in self.api.status:
                self.first_words.setdefault(name, self.now)
            if due is not None:
                heapq.heappush(self.due, (self.now + due, name))
        self.now = max(self.now, end)


@pytest.mark.parametrize("count", [5, 300])
async def test_objects_made_at_once_are_written_within_the_budget_in_every_second(count: int) -> None:
    simulation = Simulation(count)
    begun = simulation.now
    await simulation.run(3 * count)
    writes = simulation.sent
    assert len(writes) >= 5 * count, "four children and a status each"
    assert most_in_a_second(writes) <= BUDGET
    assert simulation.context.budget.unbooked == 0
    assert simulation.context.budget.waiting == 0
    assert simulation.api.reads <= 4 * count, "who waits does not look for its children again and again"
    assert writes[-1] - begun < 1.5 + 1.25 * len(writes) / BUDGET, "the budget is used"
    last_word = max(simulation.first_words.values()) - begun
    assert last_word < 1.5 + 1.25 * count / BUDGET + simulation.step_seconds * count, "no object waits long for a word"


async def test_when_all_change_at_once_it_takes_turns_and_what_is_new_goes_first() -> None:
    """Every pod is gone in one moment, all children of all objects are edited, and somebody makes one more object."""
    simulation = Simulation(200)
    await simulation.run(600)
    for name in simulation.names[:-1]:
        for kind in ("Service", "Deployment"):
            key = ObjectKey("default", name)
            body = dict(simulation.store.get(kind, key) or {})
            metadata = {**body["metadata"], "labels": {}, "resourceVersion": str(90_000_000)}
            simulation.store.put(kind, {**body, "metadata": metadata})
    simulation.sent.clear()
    begun = simulation.now
    simulation.mark(*simulation.names[:-1])
    await simulation.run(0.5)
    fresh = llmd_body("m199", uid="another")
    fresh["metadata"]["resourceVersion"] = "80000000"
    simulation.store.put(LLMDEPLOYMENT, fresh)
    simulation.first_words.pop("m199")
    del simulation.api.status["m199"]
    asked = simulation.now
    simulation.mark("m199")
    await simulation.run(600)
    assert most_in_a_second(simulation.sent) <= BUDGET
    assert len(simulation.sent) >= 199 * 4, "each repaired, and said"
    assert simulation.sent[-1] - begun < 2 + 1.25 * len(simulation.sent) / BUDGET
    assert simulation.first_words["m199"] - asked < 1.5, "the first status of a new object"
    assert simulation.context.budget.unbooked == 0


def test_places_go_by_rank_then_by_who_asked_first_and_one_waits_for_many_at_the_head() -> None:
    budget = WriteBudget(10)
    assert budget.ask("a", Rank.DEED, 10, 0.0) == 0.0
    with budget.booked(10):
        for _ in range(10):
            budget.sent(0.0)
    waits = {
        who: budget.ask(who, rank, 4, 0.5) for who, rank in (("n", Rank.NUMBER), ("d", Rank.DEED), ("e", Rank.DEED))
    }
    assert waits == {"n": 0.5, "d": 0.5, "e": 0.5}
    assert budget.ask("n", Rank.NUMBER, 4, 1.0) > 0.0, "two others are ahead"
    assert budget.ask("e", Rank.DEED, 4, 1.0) == 0.0, "there is room for both"
    with budget.booked(4):
        assert budget.ask("f", Rank.FIRST_WORD, 3, 1.0) == 0.0
        with budget.booked(3):
            assert budget.ask("d", Rank.DEED, 4, 1.0) > 0.0
    assert budget.ask("d", Rank.DEED, 4, 1.0) == 0.0, "what was not sent is free again"
    assert budget.ask("n", Rank.NUMBER, 4, 1.0) == 0.0
    assert budget.waiting == 0


def test_who_leaves_holds_nobody_up_and_more_than_the_budget_can_be_asked_for() -> None:
    budget = WriteBudget(10)
    with budget.booked(8):
        assert budget.ask("many", Rank.DEED, 500, 0.0) > 0.0
        assert budget.ask("few", Rank.DEED, 1, 0.0) > 0.0
        budget.leave("many", but=[Rank.WORD])
        assert budget.ask("few", Rank.DEED, 1, 0.0) == 0.0
    assert budget.ask("many", Rank.DEED, 500, 0.0) == 0.0
    assert budget.waiting == 0


@pytest.mark.parametrize("seed", range(5))
def test_whoever_asks_for_whatever_no_second_holds_more_and_all_get_their_turn(seed: int) -> None:
    rng, budget, now, sent = random.Random(seed), WriteBudget(20), 0.0, list[float]()
    since: dict[tuple[int, Rank], float] = {}
    longest = 0.0
    for _ in range(20_000):
        now += rng.random() * 0.01
        who, rank, writes = rng.randrange(6), rng.choice(list(Rank)), rng.randint(1, 8)
        if budget.ask(who, rank, writes, now) > 0.0:
            since.setdefault((who, rank), now)
            assert budget.waiting <= 6 * len(Rank)
            continue
        longest = max(longest, now - since.pop((who, rank), now) if rank is Rank.FIRST_WORD else 0.0)
        with budget.booked(writes):
            for _ in range(rng.randint(0, writes)):
                now += rng.random() * 0.002
                budget.sent(now)
                sent.append(now)
    assert most_in_a_second(sent) == budget.busiest <= 20
    assert len(sent) / now > 10, "the budget is used"
    assert longest < 6.0, "six writers with eight writes each, at twenty a second"
