"""One row, one arithmetic: a query row comes out bit for bit the same however it was batched, chunked or threaded."""

import itertools
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagefleet_kernels.batch import AttentionBatch, KVShape
from pagefleet_kernels.cpu.backend import CpuBackend
from pagefleet_kernels.cpu.cache import CpuCache
from support.cpu_kernels import CPU, LEVELS, NAN_WORDS, backend

DTYPES = [torch.float32, torch.bfloat16]


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer and two sequences of `length` tokens in it."""

    shape: KVShape
    group: int
    block_size: int
    dtype: torch.dtype
    length: int
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


class Sequences:
    """Two sequences with all their queries; rows of the first can be asked for in any grouping."""

    def __init__(self, layer: Layer, owner: CpuBackend, seed: int) -> None:
        self.layer, self.owner = layer, owner
        generator = torch.Generator().manual_seed(seed)
        shape, length = layer.shape, layer.length
        self.blocks = -(-length // layer.block_size)
        self.tables = (1 + torch.randperm(2 * self.blocks, generator=generator)).reshape(2, -1).to(torch.int32)
        self.cache = owner.allocate(
            shape, num_blocks=1 + 2 * self.blocks, block_size=layer.block_size, dtype=layer.dtype, device=CPU
        )
        self.cache.words.fill_(NAN_WORDS[layer.dtype])

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator).to(layer.dtype)

        self.queries = normal(2, length, shape.num_kv_heads * layer.group, shape.head_dim)
        self.keys = normal(2, length, shape.num_kv_heads, shape.head_dim)
        self.values = normal(2, length, shape.num_kv_heads, shape.v_head_dim)
        self.sinks = normal(shape.num_kv_heads * layer.group) if layer.sinks else None
        for seq in range(2):
            self._write(self.cache, seq, self.tables[seq])

    def _write(self, cache: CpuCache, seq: int, table: torch.Tensor) -> None:
        position = torch.arange(self.layer.length)
        size = self.layer.block_size
        self.owner.write_kv(
            cache, self.keys[seq], self.values[seq], table.long()[position // size] * size + position % size
        )

    def moved(self) -> "Sequences":
        """The same data in other blocks."""
        twin = object.__new__(Sequences)
        twin.__dict__.update(self.__dict__)
        twin.tables = self.tables.flip(0, 1).contiguous()
        twin.cache = self.owner.allocate(
            self.layer.shape,
            num_blocks=self.cache.num_blocks,
            block_size=self.layer.block_size,
            dtype=self.layer.dtype,
            device=CPU,
        )
        twin.cache.words.fill_(NAN_WORDS[self.layer.dtype])
        for seq in range(2):
            twin._write(twin.cache, seq, twin.tables[seq])
        return twin

    def attend(self, pieces: list[tuple[int, int, int]], num_threads: int = 1) -> list[torch.Tensor]:
        """Pieces (sequence, first row, end row) in one call -> each one's rows."""
        starts, rows = [0], []
        for seq, first, end in pieces:
            rows.append(self.queries[seq, first:end])
            starts.append(starts[-1] + end - first)
        batch = AttentionBatch(
            query_starts=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor([end for _, _, end in pieces], dtype=torch.int32),
            block_tables=self.tables[[seq for seq, _, _ in pieces]],
            slot_mapping=torch.full((starts[-1],), -1),
            num_decodes=0,
            max_query_len=max(end - first for _, first, end in pieces),
            max_seq_len=max(end for _, _, end in pieces),
        )
        out = CpuBackend(self.owner.library, num_threads=num_threads).paged_attention(
            torch.cat(rows),
            self.cache,
            batch,
            scale=self.layer.shape.head_dim**-0.5,
            sliding_window=self.layer.window,
            softcap=self.layer.softcap,
            sinks=self.sinks,
        )
        return [out[first:end] for first, end in itertools.pairwise(starts)]


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    return Layer(
        shape=KVShape(
            draw(st.integers(1, 3)), 2 * draw(st.sampled_from([1, 8, 20, 32, 64])), draw(st.sampled_from([5, 16, 80]))
        ),
        group=draw(st.sampled_from([1, 2, 3, 7])),
        block_size=draw(st.sampled_from([16, 32, 64, 256])),
        dtype=draw(st.sampled_from(DTYPES)),
        length=draw(st.one_of(st.integers(1, 150), st.integers(500, 650))),
        window=draw(st.one_of(st.none(), st.integers(1, 600))),
        softcap=draw(st.sampled_from([None, 4.0])),
        sinks=draw(st.booleans()),
    )


def cuts_of(draw: st.DrawFn, length: int) -> list[int]:
    inner = draw(st.lists(st.integers(1, max(1, length - 1)), max_size=4, unique=True))
    return [0, *sorted(cut for cut in inner if cut < length), length]


@st.composite
def scenes(draw: st.DrawFn) -> tuple[Layer, list[int], list[int], int, str]:
    layer = draw(layers())
    decodes = draw(st.lists(st.integers(0, layer.length - 1), min_size=1, max_size=6, unique=True))
    return layer, cuts_of(draw, layer.length), decodes, draw(st.integers(0, 2**31)), draw(st.sampled_from(LEVELS))


Scene = tuple[Layer, list[int], list[int], int, str]


def check(scene: Scene) -> None:
    layer, cuts, decodes, seed, level = scene
    sequences = Sequences(layer, backend(level), seed)
    whole = sequences.attend([(0, 0, layer.length)])[0]
    assert torch.isfinite(whole.float()).all()
    chunks = [sequences.attend([(0, first, end)])[0] for first, end in itertools.pairwise(cuts)]
    assert torch.equal(torch.cat(chunks), whole)
    neighbours = [(1, row, row + 1) for row in decodes]
    batched = sequences.attend([*((0, row, row + 1) for row in decodes), (0, cuts[-2], cuts[-1]), *neighbours])
    for row, got in zip(decodes, batched, strict=False):
        assert torch.equal(got[0], whole[row])
        assert torch.equal(sequences.attend([(0, row, row + 1)])[0][0], whole[row])
    assert torch.equal(batched[len(decodes)], whole[cuts[-2] :])
    moved = sequences.moved().attend([(0, 0, layer.length)])[0]
    assert torch.equal(moved, whole)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(scenes())
def test_a_row_is_the_same_alone_in_chunks_and_among_others(scene: Scene) -> None:
    check(scene)


@pytest.mark.long
@pytest.mark.timeout(3600)  # a minute or two; on a machine that much else runs on, a quarter of an hour
@settings(max_examples=5000, deadline=None)
@given(scenes())
def test_a_row_is_the_same_in_thousands_of_scenes(scene: Scene) -> None:
    check(scene)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("window", [None, 700])
def test_threads_and_shared_splits_never_show_in_the_bits(window: int | None, dtype: torch.dtype, level: str) -> None:
    """Enough work that the library uses its threads: a lone decode row then has its splits shared out among them."""
    layer = Layer(KVShape(3, 64, 64), 3, 16, dtype, length=2300, window=window)
    sequences = Sequences(layer, backend(level), seed=7)
    rows = [2299, 2048, 1536, 1535]
    alone = [sequences.attend([(0, row, row + 1)])[0][0] for row in rows]
    for threads in (2, 3, 8):
        for row, want in zip(rows, alone, strict=True):
            assert torch.equal(sequences.attend([(0, row, row + 1)], threads)[0][0], want)
        chunk = sequences.attend([(0, 2200, 2300), (1, 1, 2)], threads)[0]
        assert torch.equal(chunk[99], alone[0])
        assert torch.equal(chunk, sequences.attend([(0, 2200, 2300)])[0])
    chunk = sequences.attend([(0, 1500, 1560)])[0]
    assert torch.equal(chunk[35], alone[3])
    assert torch.equal(chunk[36], alone[2])
