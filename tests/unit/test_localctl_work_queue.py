"""Keys are reconciled once for many wishes, later when asked, and ever more slowly while they fail."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from pagefleet_localcluster.client import ApiError
from pagefleet_localcluster.controllers.work_queue import WorkQueue
from support.local_cluster import eventually


@asynccontextmanager
async def running(reconcile: Callable[[str], Awaitable[float | None]]) -> AsyncIterator[WorkQueue]:
    queue = WorkQueue("test", reconcile)
    task = asyncio.create_task(queue.run())
    try:
        yield queue
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_many_wishes_are_one_reconciliation() -> None:
    seen: list[str] = []

    async def reconcile(key: str) -> None:
        seen.append(key)

    async with running(reconcile) as queue:
        for _ in range(5):
            queue.add("a")
        queue.add("b")

        async def done() -> bool:
            return len(seen) >= 2

        await eventually(done)
    assert seen == ["a", "b"]


async def test_a_key_comes_back_after_the_time_that_it_asked_for() -> None:
    times: list[float] = []

    async def reconcile(key: str) -> float | None:
        times.append(asyncio.get_running_loop().time())
        return 0.05 if len(times) < 3 else None

    async with running(reconcile) as queue:
        queue.add("a")

        async def done() -> bool:
            return len(times) == 3

        await eventually(done)
    assert all(0.05 <= after - before < 0.5 for before, after in itertools.pairwise(times))


async def test_an_object_that_breaks_its_controller_does_not_stop_the_others() -> None:
    """A Node without a spec ended every controller."""
    seen: list[str] = []

    async def reconcile(key: str) -> None:
        seen.append(key)
        if key == "bad":
            raise KeyError("spec")

    async with running(reconcile) as queue:
        queue.add("bad")
        queue.add("good")

        async def again() -> bool:
            return seen.count("bad") >= 2 and "good" in seen

        await eventually(again)


async def test_wishes_do_not_shorten_the_back_off_of_a_failing_key() -> None:
    """A refused creation whose own status write woke its key again was tried hundreds of times a second."""
    tries: list[float] = []

    async def reconcile(key: str) -> float | None:
        if key == "ok":
            return None
        tries.append(asyncio.get_running_loop().time())
        raise ApiError(403, "Forbidden", "exceeded quota")

    async with running(reconcile) as queue:
        loop = asyncio.get_running_loop()
        until = loop.time() + 0.5
        while loop.time() < until:
            queue.add("bad")
            queue.add("ok")
            await asyncio.sleep(0)
    waits = [after - before for before, after in itertools.pairwise(tries)]
    assert 3 <= len(tries) <= 6
    assert waits == sorted(waits)
