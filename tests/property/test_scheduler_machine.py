"""The scheduler under any arrival, abort and overlap: books balance after every step and every token is right."""

import random
from dataclasses import dataclass, replace

import hypothesis
import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pagefleet_server.core.prompt_lookup import SpeculationLimits
from pagefleet_server.core.request import FinishReason
from pagefleet_server.core.scheduler import Scheduler
from pagefleet_server.core.step import ScheduledRequest, SchedulerOutput, StepResult, TokenLogprobs
from support.evidence import write_evidence
from support.kv_memory_runner import KvMemoryRunner, expected_scores, expected_tokens
from support.scheduling import make_limits, make_sampling

BLOCK_SIZE = 4


@dataclass
class Expected:
    prompt: list[int]
    max_tokens: int
    stop: tuple[int, ...]
    seed: int
    is_scored: bool
    got: list[int]
    scores: list[TokenLogprobs]
    group: list[str]

    loops: bool

    def want(self) -> list[int]:
        tokens = expected_tokens(self.prompt, self.max_tokens, self.seed, loops=self.loops)
        ends = [index + 1 for index, token in enumerate(tokens) if token in self.stop]
        return tokens[: ends[0]] if ends else tokens


class Watched(Scheduler):
    """Nobody loses its blocks to a more important request in vain."""

    def _yield_to_priority(self, now: float) -> None:
        before, first = self._roster.num_preemptions, self._waiting.first()
        super()._yield_to_priority(now)
        if self._roster.num_preemptions > before:
            assert first is not None and first is self._waiting.first()
            assert self._has_seats_for(first)
            assert self._tables.missing(first, headroom=self._headroom(first)) <= self._tables.num_fenced


class SchedulerMachine(RuleBasedStateMachine):
    """Up to two steps are outstanding, each executed as late as possible, so a block reused too early shows."""

    num_calls = 0
    """Of all machines so far."""
    num_accepted = 0
    num_rejected = 0
    """Guesses, of all machines so far."""

    @invariant()
    def count(self) -> None:
        SchedulerMachine.num_calls += 1

    @invariant()
    def what_waits_is_told_as_it_is(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        counts, waiting = self.scheduler.counts(), list(self.scheduler._waiting)
        assert counts.num_waiting == sum(request.num_seats for request in waiting)
        assert counts.num_running + counts.num_waiting == len(self.live)
        assert counts.oldest_waiting_since == min((request.waiting_since for request in waiting), default=None)

    @initialize(
        num_blocks=st.integers(4, 14),
        max_num_seqs=st.integers(1, 5),
        extra_tokens=st.integers(0, 20),
        prefix_caching=st.booleans(),
        max_step_seconds=st.sampled_from([None, 0.008]),
        speculation=st.none()
        | st.builds(
            SpeculationLimits,
            num_tokens=st.integers(1, 9),
            min_ngram=st.integers(1, 2),
            max_ngram=st.integers(2, 3),
            max_num_seqs=st.integers(1, 5),
        ),
    )
    def start(
        self,
        num_blocks: int,
        max_num_seqs: int,
        extra_tokens: int,
        prefix_caching: bool,
        max_step_seconds: float | None,
        speculation: SpeculationLimits | None,
    ) -> None:
        limits = make_limits(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=num_blocks * BLOCK_SIZE,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_tokens,
            max_step_seconds=max_step_seconds,
            speculation=speculation,
        )
        self.limits = limits
        self.scheduler = Watched(limits, prefix_caching=prefix_caching)
        self.loops = speculation is not None
        self.runner = KvMemoryRunner(num_blocks=num_blocks, block_size=BLOCK_SIZE, loops=self.loops)
        self.live: dict[str, Expected] = {}
        self.in_flight: list[SchedulerOutput] = []
        self.num_added = 0
        self.now = 0.0

    @rule(
        family=st.integers(0, 2),
        length=st.integers(1, 30),
        tail=st.lists(st.integers(0, 49), max_size=3),
        max_tokens=st.integers(1, 12),
        stop=st.sets(st.integers(0, 49), max_size=6),
        num_forks=st.sampled_from([1, 1, 1, 2, 3]),
        tenant=st.sampled_from(["", "t1", "t2"]),
        cache_salt=st.sampled_from(["", "", "salt"]),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        is_scored=st.sampled_from([False, False, True]),
    )
    def add(
        self,
        family: int,
        length: int,
        tail: list[int],
        max_tokens: int,
        stop: set[int],
        num_forks: int,
        tenant: str,
        cache_salt: str,
        priority: int,
        is_scored: bool,
    ) -> None:
        """Prompts of one family begin alike, so the prefix cache has something to do."""
        num_forks = min(num_forks, self.limits.max_num_seqs)
        prompt = [(family * 17 + index * index) % 50 for index in range(length)] + tail
        room = self.limits.max_model_len - max_tokens
        prompt = prompt[: max(1, room)]
        ids = [f"r{self.num_added + index}" for index in range(num_forks)]
        samplings = [make_sampling(max_tokens, stop=tuple(stop), seed=seed) for seed in range(num_forks)]
        if is_scored:
            samplings[0] = msgspec.structs.replace(samplings[0], prompt_logprobs=0)
        self.num_added += num_forks
        self.scheduler.add_group(
            ids,
            prompt,
            samplings,
            arrival_time=self.now,
            tenant=tenant,
            cache_salt=cache_salt,
            priority=priority,
        )
        for seed, request_id in enumerate(ids):
            scored = is_scored and seed == 0
            self.live[request_id] = Expected(prompt, max_tokens, tuple(stop), seed, scored, [], [], ids, self.loops)
        self.scheduler.check_integrity()

    @rule(
        running=st.lists(
            st.tuples(st.integers(0, 1), st.integers(1, 20), st.sampled_from([0, 1])), min_size=2, max_size=5
        ),
        steps=st.integers(1, 4),
        family=st.integers(0, 2),
        length=st.integers(1, 30),
        num_forks=st.integers(1, 4),
    )
    def find_less_important_ones_running(
        self, running: list[tuple[int, int, int]], steps: int, family: int, length: int, num_forks: int
    ) -> None:
        """Whoever comes may take their place, if that is of use."""
        for its_family, its_length, priority in running:
            self.add_simply(its_family, its_length, num_forks=1, priority=priority)
        self.run_synchronously(steps)
        self.add_simply(family, length, num_forks=num_forks, priority=0)
        self.run_synchronously(2)

    def add_simply(self, family: int, length: int, *, num_forks: int, priority: int) -> None:
        self.add(
            family=family,
            length=length,
            tail=[],
            max_tokens=6,
            stop=set(),
            num_forks=num_forks,
            tenant="",
            cache_salt="",
            priority=priority,
            is_scored=False,
        )

    @rule()
    def reset_prefix_cache(self) -> None:
        self.scheduler.reset_prefix_cache()
        self.scheduler.check_integrity()
        assert self.scheduler.counts().blocks_cached == 0

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.live)))
        del self.live[request_id]
        assert self.scheduler.abort(request_id)
        self.scheduler.check_integrity()

    @precondition(lambda self: len(self.in_flight) < 2)
    @rule()
    def schedule(self) -> None:
        self.now += 1.0
        output = self.scheduler.schedule(self.now)
        self.scheduler.check_integrity()
        if output is None:
            assert self.in_flight or not self.live
            return
        assert output.num_tokens == sum(len(row.token_ids) for row in output.scheduled)
        assert output.num_tokens <= self.limits.max_num_batched_tokens
        assert len(output.scheduled) <= self.limits.max_num_seqs
        if any(row.num_drafts for row in output.scheduled):
            assert self.limits.speculation is not None
            assert len(output.scheduled) <= self.limits.speculation.max_num_seqs
            assert max(row.num_drafts for row in output.scheduled) <= self.limits.speculation.num_tokens
            assert all(row.sample and not row.forks for row in output.scheduled), "guesses beside a prompt"
        for index, row in enumerate(output.scheduled):
            is_decode = len(row.token_ids) == 1 and row.sample
            assert is_decode == (index < output.num_decodes)
        for other in self.in_flight:
            clashes = begun(output) & written(other)
            assert not clashes, f"blocks {clashes} are written by a step in flight"
        self.in_flight.append(output)

    @precondition(lambda self: self.in_flight)
    @rule()
    def complete(self) -> None:
        self.take(self.in_flight[0], self.runner.execute(self.in_flight.pop(0)))

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def complete_with_a_failure(self, data: st.DataObject) -> None:
        """The model fails on one request of the step, which ends with those that waited for its prompt; the others
        get what they must."""
        output = self.in_flight[0]
        result = self.runner.execute(output)
        victim = data.draw(st.sampled_from(sorted({*result.sampled, *result.prompt_logprobs, ""})))
        del self.in_flight[0]  # not before the draw, which may end the example
        lived = victim in self.live
        # One that was aborted goes on for those that wait for its prompt, and fails with them.
        group = {name for name, expected in self.live.items() if victim in expected.group}
        result = replace(result, failed={victim: "not a number"})
        failed = self.take(output, result)
        assert victim not in self.live
        assert failed <= group
        assert (victim in failed) == lived

    def take(self, output: SchedulerOutput, result: StepResult) -> set[str]:
        """Check what comes of a step; gives the requests that failed."""
        seconds, failed = 0.001 * output.num_tokens, set()
        for new in self.scheduler.update(output, result, step_seconds=seconds):
            if new.error is not None:
                assert new.finish_reason is FinishReason.ERROR and not new.token_ids and not new.prompt_logprobs
                failed.add(new.request_id)
                del self.live[new.request_id]
                continue
            expected = self.live[new.request_id]
            assert not (expected.got and new.prompt_logprobs), "scores after the first token"
            expected.got += new.token_ids
            expected.scores += new.prompt_logprobs or []
            if new.finish_reason is not None:
                assert expected.got == expected.want()
                assert expected.scores == (expected_scores(expected.prompt) if expected.is_scored else [])
                del self.live[new.request_id]
        self.scheduler.check_integrity()
        return failed

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort_what_a_step_in_flight_computes(self, data: st.DataObject) -> None:
        """Its blocks may not be begun by the next step, which is planned before that one is done."""
        while self.in_flight:
            self.complete()
        self.schedule()
        for _ in range(2):
            names = {row.request_id for output in self.in_flight for row in output.scheduled} & {*self.live}
            if names:
                request_id = data.draw(st.sampled_from(sorted(names)))
                del self.live[request_id]
                assert self.scheduler.abort(request_id)
                self.scheduler.check_integrity()
            if len(self.in_flight) == 2:
                self.complete()
            self.schedule()

    @rule(steps=st.integers(1, 8))
    def run_overlapped(self, steps: int) -> None:
        """One step is always in flight while the next is planned."""
        for _ in range(steps):
            if len(self.in_flight) == 2:
                self.complete()
            self.schedule()

    @rule(steps=st.integers(1, 8))
    def run_synchronously(self, steps: int) -> None:
        for _ in range(steps):
            while self.in_flight:
                self.complete()
            self.schedule()
        while self.in_flight:
            self.complete()

    @precondition(lambda self: self.limits.speculation is not None and not self.live and not self.in_flight)
    @rule(
        start=st.integers(0, 40),
        length=st.integers(1, 8),
        max_tokens=st.lists(st.integers(6, 30), min_size=1, max_size=3),
        stop=st.sets(st.integers(0, 49), max_size=2),
    )
    def run_few_that_go_round_in_circles(self, start: int, length: int, max_tokens: list[int], stop: set[int]) -> None:
        """Guesses want calm: nobody waits, few run, and what is said was said before."""
        for index, count in enumerate(max_tokens):
            prompt = expected_tokens([start + index], length, loops=True)
            room = max(1, self.limits.max_model_len - len(prompt))
            request_id = f"r{self.num_added}"
            self.num_added += 1
            sampling = make_sampling(min(count, room), stop=tuple(stop), seed=index)
            self.scheduler.add(request_id, prompt, sampling, arrival_time=self.now)
            self.live[request_id] = Expected(
                prompt, sampling.max_tokens, tuple(stop), index, False, [], [], [request_id], self.loops
            )
        self.run_synchronously(12)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        # Each step moves the most important request, so this is far more than enough.
        bound = 20 + sum(2 * len(e.prompt) + 2 * e.max_tokens for e in self.live.values()) * 2
        for _ in range(bound):
            if not self.live and not self.in_flight:
                break
            self.run_synchronously(1)
        assert not self.live
        counts = self.scheduler.counts()
        num_accepted = sum(counts.num_accepted_by_place)
        assert num_accepted <= counts.num_draft_tokens
        assert counts.num_drafts == 0 or self.loops
        SchedulerMachine.num_accepted += num_accepted
        SchedulerMachine.num_rejected += counts.num_draft_tokens - num_accepted
        assert (counts.blocks_used, counts.blocks_waiting, counts.num_running, counts.num_waiting) == (0, 0, 0, 0)
        assert counts.num_added == self.num_added


def written(output: SchedulerOutput) -> set[int]:
    """Blocks that a step writes into."""
    return {block for row in output.scheduled for block in row_blocks(row)} | {block for _, block in output.copies}


def begun(output: SchedulerOutput) -> set[int]:
    """Blocks that a step takes into use: copied into, or written from their first slot on. (A request that goes on
    in a block which its leader wrote is right: the device runs the steps in order.)"""
    first_slots = {
        row.block_ids[position // BLOCK_SIZE]
        for row in output.scheduled
        for position in range(row.start, row.start + len(row.token_ids))
        if position % BLOCK_SIZE == 0
    }
    return first_slots | {block for _, block in output.copies}


def row_blocks(row: ScheduledRequest) -> tuple[int, ...]:
    return row.block_ids[row.start // BLOCK_SIZE : (row.start + len(row.token_ids) - 1) // BLOCK_SIZE + 1]


def test_scheduler_holds_under_any_sequence_of_calls() -> None:
    run_state_machine_as_test(
        SchedulerMachine, settings=settings(max_examples=80, stateful_step_count=40, deadline=None)
    )


def guesses() -> dict[str, int]:
    """What became of them in all machines so far."""
    return {"accepted_guesses": SchedulerMachine.num_accepted, "wrong_guesses": SchedulerMachine.num_rejected}


@pytest.mark.long
def test_scheduler_holds_over_a_hundred_thousand_calls() -> None:
    seed, before = random.randrange(2**32), SchedulerMachine.num_calls
    run_state_machine_as_test(
        hypothesis.seed(seed)(SchedulerMachine),
        settings=settings(max_examples=1400, stateful_step_count=100, deadline=None, database=None),
    )
    calls = SchedulerMachine.num_calls - before
    assert calls >= 100_000
    assert min(guesses().values()) > 100
    write_evidence("scheduler_machine", {"seed": seed, "calls": calls, "failures": 0} | guesses())
