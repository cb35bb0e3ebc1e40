"""Driving a runner by hand: sequences in chosen chunks, mixed in one step, on scattered blocks."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from pagefleet_kernels import ops
from pagefleet_server.core.sampling_params import SamplingParams
from pagefleet_server.core.step import ScheduledRequest, SchedulerOutput
from pagefleet_server.runner.flat_batch import flatten
from pagefleet_server.runner.paged_context import PagedContext
from pagefleet_server.runner.runner import Runner

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


def quiet(phase: str, message: str, /, *, done_bytes: int = 0, total_bytes: int = 0) -> None:
    """Progress that nobody reads."""


@dataclass(slots=True)
class KnownSequence:
    """A sequence whose tokens are known, part of it computed."""

    name: str
    token_ids: list[int]
    block_ids: list[int]
    computed: int = 0
    sampling: SamplingParams = GREEDY


@dataclass(slots=True)
class Blocks:
    """Free blocks in random order."""

    runner: Runner
    rng: random.Random
    free: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free = list(range(1, self.runner.num_blocks + 1))
        self.rng.shuffle(self.free)

    def sequence(
        self, name: str, token_ids: list[int], *, room: int = 0, sampling: SamplingParams = GREEDY
    ) -> KnownSequence:
        """Blocks for the tokens and `room` more."""
        count = -(-(len(token_ids) + room) // self.runner.block_size)
        return KnownSequence(name, list(token_ids), [self.free.pop() for _ in range(count)], sampling=sampling)


def step_of(chunks: Sequence[tuple[KnownSequence, int]]) -> SchedulerOutput:
    """Advance each sequence by so many known tokens; single-token chunks go first, as decodes."""
    ordered = sorted(chunks, key=lambda chunk: chunk[1] != 1)
    scheduled = tuple(
        ScheduledRequest(
            request_id=sequence.name,
            token_ids=tuple(sequence.token_ids[sequence.computed : sequence.computed + count]),
            start=sequence.computed,
            block_ids=tuple(sequence.block_ids),
            sample=True,
            sampling=sequence.sampling,
        )
        for sequence, count in ordered
    )
    for sequence, count in ordered:
        sequence.computed += count
    return SchedulerOutput(
        scheduled=scheduled,
        num_decodes=sum(1 for _, count in ordered if count == 1),
        num_tokens=sum(count for _, count in ordered),
    )


@torch.inference_mode()
def step_logits(runner: Runner, step: SchedulerOutput) -> dict[str, torch.Tensor]:
    """Logits [rows, V] of every input row, by request."""
    batch = flatten(step, block_size=runner.block_size, device=runner.model.device)
    ops.check_batch(batch.attention, num_blocks=runner.num_blocks + 1, block_size=runner.block_size)
    context = PagedContext(runner.backend, runner.caches, batch.attention)
    logits = runner.model.forward(batch.token_ids, batch.positions, context, torch.arange(step.num_tokens))
    parts = torch.split(logits, [len(request.token_ids) for request in step.scheduled])
    return {request.request_id: part for request, part in zip(step.scheduled, parts, strict=True)}


def chunked_logits(runner: Runner, sequences: Sequence[KnownSequence], rng: random.Random) -> dict[str, torch.Tensor]:
    """All rows of all sequences, computed in steps that mix random chunks of random sequences."""
    rows: dict[str, list[torch.Tensor]] = {sequence.name: [] for sequence in sequences}
    while waiting := [s for s in sequences if s.computed < len(s.token_ids)]:
        chosen = rng.sample(waiting, rng.randint(1, len(waiting)))
        chunks = [(s, min(rng.choice((1, 1, 2, 5, 16, 33)), len(s.token_ids) - s.computed)) for s in chosen]
        for name, part in step_logits(runner, step_of(chunks)).items():
            rows[name].append(part)
    return {name: torch.cat(parts) for name, parts in rows.items()}
