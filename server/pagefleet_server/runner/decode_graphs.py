"""Decode steps as captured graphs: recorded at the start for some shapes, checked there against the eager step, and
replayed for every step that fits.

What a graph is, is the maker's business: on a GPU a CUDA graph (cuda_graph.py), in tests a function called again.
"""

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from pagefleet_kernels.backend import Backend, KVCache
from pagefleet_server.core.sampling_params import SamplingParams
from pagefleet_server.core.step import ScheduledRequest, SchedulerOutput
from pagefleet_server.models.fused.decoder import FusedDecoder
from pagefleet_server.runner.flat_batch import FlatBatch, flatten
from pagefleet_server.runner.graph_shapes import GraphShape, choose, shapes_for
from pagefleet_server.runner.kv_memory import KVPlan
from pagefleet_server.runner.paged_context import PagedContext
from pagefleet_server.runner.step_buffers import StepBuffers, moved

_logger = logging.getLogger(__name__)

_HOST = torch.device("cpu")
_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""|replayed - eager| / |eager| of a step's logits, in the model's dtype. Products of another number of rows may be
summed in another order; what is wrong is wrong by more."""
DUMMY_LENGTH = 4096
"""Tokens of all sequences but one, at most, in a step that is captured or checked."""


class GraphMaker(Protocol):
    """How a device records work."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run `work`, which allocates nothing that outlives it and waits for nothing, and record it; the result does it
        again on the same memory. Raises when that cannot be recorded."""

    def free_bytes(self) -> int:
        """Of the device's memory, now."""


class GraphMismatchError(Exception):
    """A replayed step gave other logits than the eager one."""


@dataclass(frozen=True, slots=True)
class GraphedModel:
    """What the graphs are made of."""

    model: FusedDecoder
    backend: Backend
    caches: Sequence[KVCache]
    plan: KVPlan
    max_rows: int
    """Sequences of one step at most."""
    lengths: tuple[int, ...]
    """Bounds on a step's longest sequence, rising; see pagefleet_kernels.backend.Capturable."""

    @property
    def shapes(self) -> tuple[GraphShape, ...]:
        """The largest first; never more rows than blocks, for each needs one."""
        return shapes_for(min(self.max_rows, self.plan.num_blocks), self.lengths)


class DecodeGraphs:
    """Graphs of one model over one KV cache."""

    def __init__(self, graphed: GraphedModel, maker: GraphMaker) -> None:
        """Captures nothing yet."""
        self._graphed = graphed
        self._maker = maker
        shapes = graphed.shapes
        self._buffers = StepBuffers(
            max_rows=shapes[0].num_rows,
            max_seq_len=shapes[0].max_seq_len,
            block_size=graphed.plan.block_size,
            device=graphed.model.device,
        )
        self._logits: torch.Tensor | None = None
        self._replays: dict[GraphShape, Callable[[], None]] = {}
        self._held: list[object] = []
        """What the graphs write to, and nobody else holds for sure."""

    @property
    def shapes(self) -> tuple[GraphShape, ...]:
        """Those that are captured."""
        return tuple(self._replays)

    @torch.inference_mode()
    def capture(self, shape: GraphShape) -> None:
        """Record one shape. Raises what the maker raises."""
        inputs = self._buffers.inputs(shape)
        model, graphed = self._graphed.model, self._graphed
        context = PagedContext(graphed.backend, graphed.caches, inputs.attention)
        self._buffers.fill(shape, self._dummy(shape.num_rows, shape.max_seq_len, seed=1))
        if self._logits is None:
            # Outside of any graph's own memory; one piece for all shapes, the largest of which comes first.
            self._logits = model.forward(inputs.token_ids, inputs.positions, context, inputs.logit_rows).clone()
        logits = self._logits[: shape.num_rows]

        def work() -> None:
            logits.copy_(model.forward(inputs.token_ids, inputs.positions, context, inputs.logit_rows))

        self._replays[shape] = self._maker.capture(work)
        self._held.append(model.captured_state())

    @torch.inference_mode()
    def check(self, shape: GraphShape) -> None:
        """Replay a step that differs from the captured one, with a row of padding where there is room, and compute it
        eagerly too. Raises GraphMismatchError."""
        rows = max(1, shape.num_rows - 1)
        batch = self._dummy(rows, max(1, shape.max_seq_len - 1), seed=2)
        graphed = self._graphed
        there = moved(batch, graphed.model.device)
        context = PagedContext(graphed.backend, graphed.caches, there.attention)
        want = graphed.model.forward(there.token_ids, there.positions, context, there.logit_rows).float()
        got = self._replay(shape, batch).float()
        error = float((got - want).norm() / want.norm())
        if not error <= TOLERANCES.get(graphed.model.dtype, 1e-3):
            raise GraphMismatchError(
                f"the graph of {shape.num_rows} rows up to {shape.max_seq_len} tokens gives logits that differ from the"
                f" eager step's by {error:.3g} of their norm"
            )

    @torch.inference_mode()
    def run(self, batch: FlatBatch) -> torch.Tensor | None:
        """Logits [N, V] of a checked step on the host, valid until the next call; None when no graph serves it: it has
        prompts, wants other rows' logits, is too large or too long."""
        rows = batch.token_ids.shape[0]
        plain = batch.attention.num_decodes == batch.attention.seq_lens.shape[0] == batch.logit_rows.shape[0] == rows
        if not plain or batch.draws_from is not None or batch.scores:
            return None
        shape = choose(self.shapes, num_rows=rows, longest=batch.attention.max_seq_len)
        return None if shape is None else self._replay(shape, batch)

    def _replay(self, shape: GraphShape, batch: FlatBatch) -> torch.Tensor:
        assert self._logits is not None, "nothing is captured"
        self._buffers.fill(shape, batch)
        self._replays[shape]()
        return self._logits[: batch.token_ids.shape[0]]

    def _dummy(self, rows: int, longest: int, *, seed: int) -> FlatBatch:
        """A step of random tokens: the first row as long as can be, the others of any length up to DUMMY_LENGTH; each
        writes into a block of its own and reads whatever lies in the others."""
        graphed, rng = self._graphed, random.Random(seed)
        block_size, num_blocks = graphed.plan.block_size, graphed.plan.num_blocks
        requests = []
        for row in range(rows):
            length = longest if row == 0 else rng.randint(1, min(longest, DUMMY_LENGTH))
            first = rng.randrange(num_blocks)
            table = [1 + (first + 7 * column) % num_blocks for column in range(-(-length // block_size))]
            table[-1] = 1 + row
            token = rng.randrange(graphed.model.vocab_size)
            requests.append(ScheduledRequest(str(row), (token,), length - 1, tuple(table), True, _GREEDY))
        return flatten(SchedulerOutput(tuple(requests), rows, rows), block_size=block_size, device=_HOST)


def capture_all(graphed: GraphedModel, maker: GraphMaker) -> DecodeGraphs | None:
    """Graphs for every shape, each checked; None, with a warning that says why, when one cannot be captured or differs:
    then no step uses a graph."""
    graphs = DecodeGraphs(graphed, maker)
    before = maker.free_bytes()
    try:
        for shape in graphed.shapes:
            graphs.capture(shape)
            graphs.check(shape)
    except GraphMismatchError as error:
        _logger.warning("CUDA graphs are off: %s", error)
        return None
    except Exception as error:  # whatever a device or a compiler raises: serving goes on without
        _logger.warning("CUDA graphs are off: they cannot be captured (%s: %s)", type(error).__name__, error)
        _logger.info("the failed capture", exc_info=error)
        return None
    taken = max(0, before - maker.free_bytes())
    told = ", ".join(f"{rows}" for rows in sorted({shape.num_rows for shape in graphs.shapes}))
    _logger.info(
        "CUDA graphs: %d, for %s rows and lengths up to %s, %d bytes",
        len(graphs.shapes),
        told,
        ", ".join(map(str, graphed.lengths)),
        taken,
    )
    return graphs


def estimated_bytes(graphed: GraphedModel, maker: GraphMaker) -> int:
    """What all graphs will take: the first (whose memory the others share) and the second are captured and given back.
    0 when they cannot be captured: capture_all will say so."""
    graphs = DecodeGraphs(graphed, maker)
    taken: list[int] = []
    for shape in graphed.shapes[:2]:
        before = maker.free_bytes()
        try:
            graphs.capture(shape)
        except Exception as error:
            _logger.info("CUDA graphs cannot be captured on the trial cache", exc_info=error)
            return 0
        taken.append(max(0, before - maker.free_bytes()))
    return planned_bytes(taken, len(graphed.shapes))


def planned_bytes(taken: Sequence[int], num_graphs: int) -> int:
    """The first graph's bytes and, for each further one, the second's."""
    if not taken:
        return 0
    return taken[0] + (taken[1] * (num_graphs - 1) if len(taken) > 1 else 0)
