"""The block pool against a plain model of it, under any sequence of calls."""

import random

import hypothesis
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from pagefleet_server.core.block_pool import BlockPool
from pagefleet_server.core.prefix_hash import BlockHash
from support.evidence import write_evidence

NUM_BLOCKS = 7


class PoolMachine(RuleBasedStateMachine):
    """Holders take, share, name and release; the model says what must be left."""

    num_calls = 0
    """Of all machines so far."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.held: list[list[int]] = []
        self.names: dict[int, BlockHash] = {}  # block -> content, as long as it must be findable
        self.evictable: list[int] = []  # cached blocks nobody holds, first to go first
        self.num_named = 0

    def holders(self, block: int) -> int:
        return sum(block in table for table in self.held)

    def idle_without_content(self) -> int:
        return sum(self.holders(block) == 0 and block not in self.names for block in range(1, NUM_BLOCKS + 1))

    @rule(count=st.integers(0, NUM_BLOCKS))
    def allocate(self, count: int) -> None:
        available = self.idle_without_content() + len(self.evictable)
        assert self.pool.num_available == available
        count = min(count, available)
        num_evicted = max(0, count - self.idle_without_content())
        want_evicted, self.evictable = self.evictable[:num_evicted], self.evictable[num_evicted:]
        for block in want_evicted:
            del self.names[block]
        got = self.pool.allocate(count)
        assert set(want_evicted) <= set(got)
        assert all(self.holders(block) == 0 for block in got)
        self.held.append(got)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def name_a_block(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([b for table in self.held for b in table] or [0]))
        if block == 0 or block in self.names:
            return
        if data.draw(st.booleans()) and self.names:
            assert not self.pool.register(block, data.draw(st.sampled_from(list(self.names.values()))))
            return
        self.num_named += 1
        self.names[block] = BlockHash(str(self.num_named).encode())
        assert self.pool.register(block, self.names[block])

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(list(self.names)), unique=True, min_size=1))
        for block in blocks:
            assert self.pool.find(self.names[block]) == block
        self.pool.share(blocks)
        self.evictable = [block for block in self.evictable if block not in blocks]
        self.held.append(blocks)

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(list(self.names)))
        self.pool.forget(BlockHash(b"never heard of"))
        self.pool.forget(self.names[block])
        assert self.pool.find(self.names.pop(block)) is None
        if block in self.evictable:
            self.evictable.remove(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release(table)
        self.evictable += [b for b in reversed(table) if self.holders(b) == 0 and b in self.names]

    @rule()
    def forget_everything_cached(self) -> None:
        self.pool.forget_cached()
        self.names.clear()
        self.evictable.clear()

    @invariant()
    def books_balance(self) -> None:
        PoolMachine.num_calls += 1
        self.pool.check_integrity()
        assert self.pool.num_cached == len(self.evictable)
        assert self.pool.num_free == self.idle_without_content()
        for block, block_hash in self.names.items():
            assert self.pool.find(block_hash) == block


def test_pool_holds_under_any_sequence_of_calls() -> None:
    run_state_machine_as_test(PoolMachine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None))


@pytest.mark.long
def test_pool_holds_over_a_hundred_thousand_calls() -> None:
    seed, before = random.randrange(2**32), PoolMachine.num_calls
    run_state_machine_as_test(
        hypothesis.seed(seed)(PoolMachine),
        settings=settings(max_examples=900, stateful_step_count=200, deadline=None, database=None),
    )
    calls = PoolMachine.num_calls - before
    assert calls >= 100_000
    write_evidence("block_pool_machine", {"seed": seed, "calls": calls, "failures": 0})
