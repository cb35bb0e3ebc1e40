"""Turns: work that comes at once is spread over turns of the event loop, in order, and nobody is forgotten."""

import asyncio
from contextlib import aclosing
from types import SimpleNamespace
from typing import cast

from pagefleet_server.api.generation import Choice, Generation
from pagefleet_server.api.turns import Turns
from pagefleet_server.client.request_stream import RequestStream


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


async def test_clients_that_go_together_are_let_go_a_few_per_turn_but_forgotten_at_once() -> None:
    """A gateway that dies takes all its clients along: the engine drops them now, all the rest is spread."""
    aborted: list[str] = []
    streams = [RequestStream(str(number), aborted.append) for number in range(20)]
    generation = cast("Generation", SimpleNamespace(_service=SimpleNamespace(turns=Turns(3))))

    async def follow(stream: RequestStream) -> None:
        choice = cast("Choice", SimpleNamespace(stream=stream))
        async with aclosing(Generation._follow(generation, choice)) as deltas:
            async for _ in deltas:
                raise AssertionError("nothing was put in")

    tasks = [asyncio.create_task(follow(stream)) for stream in streams]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.sleep(0)
    assert aborted == [stream.request_id for stream in streams]
    sizes = []
    for _ in range(20):
        before = sum(task.done() for task in tasks)
        await asyncio.sleep(0)
        sizes.append(sum(task.done() for task in tasks) - before)
    assert sum(task.done() for task in tasks) == 20 and max(sizes) <= 3
    assert all(task.cancelled() for task in tasks)
