"""Turns: work that comes at once is spread over turns of the event loop, in order, and nobody is forgotten."""

import asyncio

from pagefleet_server.api.turns import Turns


async def enter(turns: Turns, name: int, entered: list[int]) -> None:
    await turns.wait()
    entered.append(name)


async def test_each_turn_lets_a_few_go_on_in_the_order_they_came() -> None:
    turns, entered = Turns(3), list[int]()
    tasks = [asyncio.create_task(enter(turns, name, entered)) for name in range(20)]
    sizes = []
    while len(entered) < 20:
        before = len(entered)
        await asyncio.sleep(0)
        sizes.append(len(entered) - before)
    assert entered == list(range(20))
    assert max(sizes) <= 3 and sum(sizes) == 20
    await asyncio.gather(*tasks)


async def test_a_single_caller_is_not_held_up() -> None:
    turns = Turns(1)
    for _ in range(3):
        waiting = turns.wait().send  # runs until it would wait
        try:
            waiting(None)
        except StopIteration:
            pass
        else:
            raise AssertionError("it waited although there was room")
        for _ in range(2):
            await asyncio.sleep(0)


async def test_one_that_leaves_while_it_waits_takes_nobodys_place() -> None:
    turns, entered = Turns(1), list[int]()
    tasks = [asyncio.create_task(enter(turns, name, entered)) for name in range(6)]
    await asyncio.sleep(0)
    for name in (1, 2, 4):
        tasks[name].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert entered == [0, 3, 5]
    await asyncio.wait_for(turns.wait(), 60)
