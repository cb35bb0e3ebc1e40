"""Decode steps through graphs, on the CPU: a graph is a function that is called again on the same memory."""

import dataclasses
import logging
import random
from itertools import pairwise

import pytest
import torch

from pagefleet_kernels import ops
from pagefleet_kernels.backend import Backend
from pagefleet_kernels.dispatch import select_backend
from pagefleet_server.models.fused.decoder import FusedDecoder
from pagefleet_server.runner.decode_graphs import (
    DecodeGraphs,
    GraphedModel,
    capture_all,
    estimated_bytes,
    planned_bytes,
)
from pagefleet_server.runner.flat_batch import FlatBatch, flatten
from pagefleet_server.runner.graph_setup import GraphSetup, graph_setup, why_eager
from pagefleet_server.runner.graph_shapes import GraphShape, choose, row_counts, shapes_for
from pagefleet_server.runner.runner import Runner, build_runner
from pagefleet_server.runner.step_buffers import PADDING_SLOT, StepBuffers, moved
from pagefleet_server.settings import CacheSettings, EngineSettings, ModelSettings
from support.fake_graphs import FakeGraphMaker
from support.stepping import Blocks, KnownSequence, quiet, step_of
from support.tiny_models import write_tiny_llama

CPU = torch.device("cpu")
LENGTHS = (32, 128)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    path = write_tiny_llama(tmp_path_factory.mktemp("model"), max_positions=128)
    return build_runner(
        EngineSettings(
            model=ModelSettings(model=str(path), device="cpu", dtype="float32", threads=1),
            cache=CacheSettings(num_kv_blocks=64),
        ),
        quiet,
    )


def graphed(runner: Runner, *, max_rows: int = 6) -> GraphedModel:
    assert isinstance(runner.model, FusedDecoder)
    return GraphedModel(runner.model, runner.backend, runner.caches, runner.plan, max_rows, LENGTHS)


def with_graphs(runner: Runner, maker: FakeGraphMaker, *, max_rows: int = 6) -> Runner:
    graphs = capture_all(graphed(runner, max_rows=max_rows), maker)
    assert graphs is not None
    maker.replays.clear()
    return dataclasses.replace(runner, graphs=graphs)


def test_row_counts_rise_to_the_most_and_waste_at_most_a_third() -> None:
    for most in (1, 2, 3, 5, 64, 100, 256):
        counts = row_counts(most)
        assert counts[0] == 1
        assert counts[-1] == most
        assert list(counts) == sorted(set(counts))
        for rows in range(3, most + 1):
            assert (min(c for c in counts if c >= rows) - rows) / min(c for c in counts if c >= rows) <= 1 / 3
    assert row_counts(64) == (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def test_the_smallest_shape_that_fits_is_chosen() -> None:
    shapes = shapes_for(6, LENGTHS)
    assert shapes[0] == GraphShape(6, 128)
    assert choose(shapes, num_rows=3, longest=20) == GraphShape(4, 32)
    assert choose(shapes, num_rows=3, longest=33) == GraphShape(4, 128)
    assert choose(shapes, num_rows=6, longest=128) == GraphShape(6, 128)
    assert choose(shapes, num_rows=7, longest=20) is None
    assert choose(shapes, num_rows=1, longest=129) is None


def decodes(lengths: list[int], *, block_size: int = 16) -> FlatBatch:
    """One row each, its blocks in falling order."""
    rows = []
    for index, length in enumerate(lengths):
        table = [40 - 8 * index - block for block in range(-(-length // block_size))]
        rows.append(KnownSequence(str(index), list(range(5, 5 + length)), table, computed=length - 1))
    return flatten(step_of([(row, 1) for row in rows]), block_size=block_size, device=CPU)


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_a_step_lies_where_its_graph_reads_and_the_rest_is_padding(rows: int) -> None:
    """Whatever a larger step left behind."""
    buffers = StepBuffers(max_rows=6, max_seq_len=128, block_size=16, device=CPU)
    buffers.fill(GraphShape(6, 128), decodes([100, 90, 80, 70, 60][:5]))
    shape, batch = GraphShape(4, 64), decodes([33, 64, 1, 17][:rows])
    buffers.fill(shape, batch)
    got = buffers.inputs(shape)
    assert torch.equal(got.token_ids[:rows], batch.token_ids)
    assert torch.equal(got.positions[:rows], batch.positions)
    assert torch.equal(got.attention.slot_mapping[:rows], batch.attention.slot_mapping)
    assert torch.equal(got.attention.seq_lens[:rows], batch.attention.seq_lens)
    for row in range(rows):
        used = -(-int(batch.attention.seq_lens[row]) // 16)
        assert torch.equal(got.attention.block_tables[row, :used], batch.attention.block_tables[row, :used])
    assert got.attention.slot_mapping[rows:].tolist() == [PADDING_SLOT] * (4 - rows)
    assert got.attention.seq_lens[rows:].tolist() == [0] * (4 - rows)
    assert got.token_ids[rows:].tolist() == got.positions[rows:].tolist() == [0] * (4 - rows)
    assert got.attention.query_starts.tolist() == [0, 1, 2, 3, 4]
    assert got.logit_rows.tolist() == [0, 1, 2, 3]
    assert (got.attention.num_decodes, got.attention.max_query_len, got.attention.max_seq_len) == (4, 1, 64)
    ops.check_batch(got.attention, num_blocks=64, block_size=16)


def test_areas_are_aligned_for_wide_loads_and_do_not_overlap() -> None:
    buffers = StepBuffers(max_rows=6, max_seq_len=128, block_size=16, device=CPU)
    for shape in shapes_for(6, LENGTHS):
        got = buffers.inputs(shape)
        areas = [got.token_ids, got.positions, got.attention.slot_mapping, got.attention.seq_lens]
        areas.append(got.attention.block_tables)
        origin = got.token_ids.data_ptr()
        ends = [(area.data_ptr() - origin, area.data_ptr() - origin + area.nbytes) for area in areas]
        assert all(start % 16 == 0 for start, _ in ends)
        assert all(end <= start for (_, end), (start, _) in pairwise(ends))


def generated(runner: Runner, count: int, new_tokens: int) -> dict[str, list[int]]:
    """Greedy tokens of some prompts that run together; the longest leaves at each third of the way."""
    rng = random.Random(3)
    blocks = Blocks(runner, rng)
    sequences = [
        blocks.sequence(str(index), [rng.randrange(3, 300) for _ in range(5 + 9 * index)], room=new_tokens)
        for index in range(count)
    ]
    for step in range(new_tokens):
        left = sequences[: count - (3 * step) // new_tokens]
        drawn = runner.execute(step_of([(s, len(s.token_ids) - s.computed) for s in left])).sampled
        for sequence in left:
            sequence.token_ids.append(drawn[sequence.name])
    return {sequence.name: sequence.token_ids for sequence in sequences}


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_graphs_give_the_tokens_of_eager_steps(runner: Runner, backend: str) -> None:
    """Rows come and go, sequences cross the bound between two lengths; prompts stay eager."""
    if backend == "reference":
        other = select_backend(CPU, "reference")
        caches = [
            ops.allocate(other, cache.shape, num_blocks=65, block_size=16, dtype=cache.dtype, device=CPU)
            for cache in runner.caches
        ]
        runner = dataclasses.replace(runner, backend=other, caches=tuple(caches))
    maker = FakeGraphMaker()
    captured = with_graphs(runner, maker)
    assert generated(captured, 5, 12) == generated(runner, 5, 12)
    assert len(maker.replays) == 11
    assert len(set(maker.replays)) > 2


def test_what_a_graph_does_not_hold_stays_eager(runner: Runner) -> None:
    maker = FakeGraphMaker()
    graphs = with_graphs(runner, maker, max_rows=2).graphs
    assert graphs is not None
    assert graphs.run(decodes([20, 30, 40])) is None
    prompt = KnownSequence("p", list(range(5, 12)), [1])
    assert graphs.run(flatten(step_of([(prompt, 7)]), block_size=16, device=CPU)) is None
    assert maker.replays == []
    assert graphs.run(decodes([20, 30])) is not None


def test_a_graph_outlives_the_decoders_own_program(runner: Runner) -> None:
    """A larger step, and a check in fresh caches, make the decoder record again: captured addresses stay valid."""
    captured = with_graphs(runner, FakeGraphMaker())
    want = generated(captured, 3, 6)
    captured.check()
    long = Blocks(captured, random.Random(0)).sequence("long", list(range(3, 100)))
    captured.execute(step_of([(long, 97)]))
    assert generated(captured, 3, 6) == want


def test_a_failed_capture_turns_graphs_off_with_the_reason(runner: Runner, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert capture_all(graphed(runner), FakeGraphMaker(fails_at=3)) is None
    assert "CUDA graphs are off: they cannot be captured (RuntimeError: operation not permitted" in caplog.text


def test_a_graph_that_computes_something_else_is_never_used(runner: Runner, caplog: pytest.LogCaptureFixture) -> None:
    maker = FakeGraphMaker()
    made: list[DecodeGraphs] = []
    original = DecodeGraphs.capture

    def remember(self: DecodeGraphs, shape: GraphShape) -> None:
        made.append(self)
        original(self, shape)

    def spoil() -> None:
        assert made[0]._logits is not None
        made[0]._logits[0] *= 1.1

    maker.spoil = spoil
    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(DecodeGraphs, "capture", remember)
        assert capture_all(graphed(runner), maker) is None
    assert "CUDA graphs are off: the graph of 6 rows up to 128 tokens gives logits that differ" in caplog.text


def test_memory_is_estimated_from_two_graphs(runner: Runner) -> None:
    assert planned_bytes([], 5) == 0
    assert planned_bytes([100], 1) == 100
    assert planned_bytes([100, 7], 10) == 163
    maker = FakeGraphMaker(bytes_each=50)
    assert estimated_bytes(graphed(runner), maker) == 50 * len(graphed(runner).shapes)
    assert maker.captured == 2
    assert estimated_bytes(graphed(runner), FakeGraphMaker(fails_at=1)) == 0


class _Capturable:
    """The backend, as one that can be captured."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> object:
        return getattr(self._backend, name)

    def capture_lengths(self, longest: int) -> tuple[int, ...]:
        return (32, longest)


def test_setting_up(runner: Runner, caplog: pytest.LogCaptureFixture) -> None:
    """From the setting to graphs, with the estimate on a cache of its own."""

    def setup(mode: str, backend: object, maker: FakeGraphMaker | None) -> GraphSetup | None:
        new_maker = None if maker is None else lambda: maker
        options = {"max_rows": 3, "kv_dtype": torch.float32, "group": None, "new_maker": new_maker}
        return graph_setup(mode, runner.model, backend, **options)  # type: ignore[arg-type]

    capturable = _Capturable(runner.backend)
    assert setup("auto", capturable, None) is None  # a CPU
    with caplog.at_level(logging.INFO):
        assert setup("off", capturable, FakeGraphMaker()) is None
        assert setup("auto", runner.backend, FakeGraphMaker()) is None
    assert "CUDA graphs are off: --cuda-graphs off asks for it" in caplog.text
    assert "CUDA graphs are off: the cpu backend cannot be captured" in caplog.text
    assert "other ranks" in str(why_eager("auto", runner.model, capturable, num_ranks=2))  # type: ignore[arg-type]
    made = setup("auto", capturable, FakeGraphMaker(bytes_each=10))
    assert made is not None
    assert made.estimate(block_size=16, max_seq_len=128) == 10 * len(shapes_for(3, (32, 128)))
    graphs = made.capture(runner.caches, runner.plan, max_seq_len=100)
    assert graphs is not None
    assert set(graphs.shapes) == set(shapes_for(3, (32, 100)))


def test_moving_to_where_it_lies_is_nothing() -> None:
    batch = decodes([3])
    assert moved(batch, CPU) is batch
