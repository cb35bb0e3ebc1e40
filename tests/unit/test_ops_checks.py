import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pagefleet_kernels import ops
from pagefleet_kernels.batch import AttentionBatch, KVShape
from pagefleet_kernels.dispatch import MODULES, select_backend
from pagefleet_kernels.errors import BackendUnavailable, KernelArgumentError
from pagefleet_kernels.reference import ReferenceBackend
from pagefleet_kernels.reference.cache import ReferenceCache

CPU = torch.device("cpu")
BACKEND = ReferenceBackend()
SHAPE = KVShape(num_kv_heads=2, head_dim=8, v_head_dim=4)


def cache_of(num_blocks: int = 6) -> ReferenceCache:
    return BACKEND.allocate(SHAPE, num_blocks=num_blocks, block_size=8, dtype=torch.float32, device=CPU)


def batch_of(**changes: Any) -> AttentionBatch:
    """A decode at position 9, a chunk of 3 rows ending at 3."""
    batch = AttentionBatch(
        query_starts=torch.tensor([0, 1, 4], dtype=torch.int32),
        seq_lens=torch.tensor([10, 3], dtype=torch.int32),
        block_tables=torch.tensor([[1, 2], [3, 99]], dtype=torch.int32),
        slot_mapping=torch.tensor([17, 24, 25, 26], dtype=torch.int64),
        num_decodes=1,
        max_query_len=3,
        max_seq_len=10,
    )
    return dataclasses.replace(batch, **changes)


def attend(batch: AttentionBatch, query: torch.Tensor | None = None, **changes: Any) -> torch.Tensor:
    options = {"scale": 1.0, **changes}
    return ops.paged_attention(BACKEND, torch.zeros(4, 4, 8) if query is None else query, cache_of(), batch, **options)


def i32(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def allocate(**changes: Any) -> object:
    options = {"num_blocks": 4, "block_size": 16, "dtype": torch.float32, "device": CPU, **changes}
    return ops.allocate(BACKEND, options.pop("shape", SHAPE), **options)


def test_right_arguments_pass() -> None:
    assert attend(batch_of()).shape == (4, 4, 4)


def program(max_rows: Any) -> object:
    return ops.new_program(BACKEND, dtype=torch.float32, device=CPU, max_rows=max_rows)


BAD_CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "query without heads": (lambda: attend(batch_of(), torch.zeros(4, 8)), r"query is of shape \(4, 8\)"),
    "query that is none": (lambda: attend(batch_of(), [[0.0]]), "query is a list"),  # type: ignore[arg-type]
    "query that is sparse": (lambda: attend(batch_of(), torch.zeros(4, 4, 8).to_sparse()), "query is of layout"),
    "query that shows the negative": (
        lambda: attend(batch_of(), torch._neg_view(torch.zeros(4, 4, 8))),
        "query is a view that negates",
    ),
    "query of another width": (lambda: attend(batch_of(), torch.zeros(4, 4, 16)), "query is of shape"),
    "query of another dtype": (lambda: attend(batch_of(), torch.zeros(4, 4, 8).bfloat16()), "query is of dtype"),
    "query on another device": (lambda: attend(batch_of(), torch.zeros(4, 4, 8, device="meta")), "on device meta"),
    "query strided inside a row": (
        lambda: attend(batch_of(), torch.zeros(4, 4, 16)[..., ::2]),
        "contiguous in its last dimension",
    ),
    "heads that do not divide": (lambda: attend(batch_of(), torch.zeros(4, 3, 8)), "3 heads; .* multiple of .* 2"),
    "no heads": (lambda: attend(batch_of(), torch.zeros(4, 0, 8)), "0 heads"),
    "rows beyond the batch": (lambda: attend(batch_of(), torch.zeros(5, 4, 8)), "batch.slot_mapping is of shape"),
    "scale of zero": (lambda: attend(batch_of(), scale=0.0), "scale is 0.0"),
    "scale of NaN": (lambda: attend(batch_of(), scale=float("nan")), "scale is nan"),
    "scale that is none": (lambda: attend(batch_of(), scale="1"), "scale is a str"),
    "scale of True": (lambda: attend(batch_of(), scale=True), "scale is a bool"),
    "scale beyond float32": (lambda: attend(batch_of(), scale=1e300), r"scale is 1e\+300; .* finite in float32"),
    "scale that float32 takes for 0": (lambda: attend(batch_of(), scale=1e-300), "scale is 1e-300"),
    "softcap beyond float32": (lambda: attend(batch_of(), softcap=1e300), r"softcap is 1e\+300.* or None"),
    "window of zero": (lambda: attend(batch_of(), sliding_window=0), "sliding_window is 0"),
    "negative softcap": (lambda: attend(batch_of(), softcap=-1.0), "softcap is -1.0"),
    "sinks of another count": (lambda: attend(batch_of(), sinks=torch.zeros(3)), "sinks is of shape"),
    "sinks that are none": (lambda: attend(batch_of(), sinks=[0.0] * 4), r"sinks is a list; .* \[Hq\]"),
    "integer sinks": (lambda: attend(batch_of(), sinks=i32(0, 0, 0, 0)), "sinks is dtype"),
    "lengths that are none": (lambda: attend(batch_of(seq_lens=[10, 3])), "batch.seq_lens is a list"),
    "decodes that are no number": (lambda: attend(batch_of(num_decodes=None)), "batch.num_decodes is None"),
    "half a decode": (lambda: attend(batch_of(num_decodes=0.5)), "batch.num_decodes is 0.5"),
    "half a token at most": (lambda: attend(batch_of(max_seq_len=10.5)), "batch.max_seq_len is 10.5"),
    "rows that are no number": (lambda: attend(batch_of(max_query_len=float("nan"))), "batch.max_query_len is nan"),
    "a maximum beyond int32": (lambda: attend(batch_of(max_seq_len=2**40)), "batch.max_seq_len is 1099511627776"),
    "int64 lengths": (lambda: attend(batch_of(seq_lens=torch.tensor([10, 3]))), "batch.seq_lens is of dtype"),
    "offsets of another count": (lambda: attend(batch_of(query_starts=i32(0, 4))), "batch.query_starts is of shape"),
    "tables without width": (lambda: attend(batch_of(block_tables=i32(1, 2))), r"\[S, max_blocks\]"),
    "offsets that decrease": (lambda: attend(batch_of(query_starts=i32(0, 5, 4))), "non-decreasing"),
    "offsets that miss rows": (lambda: attend(batch_of(query_starts=i32(0, 1, 3))), "from 0 to 3"),
    "decodes of several rows": (lambda: attend(batch_of(num_decodes=2)), "batch.num_decodes is 2"),
    "more decodes than sequences": (lambda: attend(batch_of(num_decodes=3)), r"in \[0, 2\]"),
    "length below its rows": (lambda: attend(batch_of(seq_lens=i32(10, 2))), r"batch.seq_lens\[1\] is 2"),
    "negative length": (lambda: attend(batch_of(seq_lens=i32(-1, 3))), r"batch.seq_lens\[0\] is -1"),
    "length beyond its table": (lambda: attend(batch_of(seq_lens=i32(17, 3), max_seq_len=17)), "what block_tables"),
    "maximum too small": (lambda: attend(batch_of(max_seq_len=9)), "batch.max_seq_len is 9"),
    "maximal rows too small": (lambda: attend(batch_of(max_query_len=2)), "batch.max_query_len is 2"),
    "block id out of range": (lambda: attend(batch_of(block_tables=i32([1, 6], [3, 0]))), r"tables\[0, 1\] is 6"),
    "null block in a table": (lambda: attend(batch_of(block_tables=i32([1, 0], [3, 0]))), r"tables\[0, 1\] is 0"),
    "negative block id": (lambda: attend(batch_of(block_tables=i32([1, -4], [3, 0]))), r"tables\[0, 1\] is -4"),
    "slot past the end": (
        lambda: ops.write_kv(BACKEND, cache_of(), torch.zeros(1, 2, 8), torch.zeros(1, 2, 4), torch.tensor([48])),
        "slot_mapping is 48",
    ),
    "slot of the null block": (
        lambda: ops.write_kv(BACKEND, cache_of(), torch.zeros(1, 2, 8), torch.zeros(1, 2, 4), torch.tensor([7])),
        "null block",
    ),
    "slot below -1": (
        lambda: ops.write_kv(BACKEND, cache_of(), torch.zeros(1, 2, 8), torch.zeros(1, 2, 4), torch.tensor([-2])),
        "slot_mapping is -2",
    ),
    "value of K's width": (
        lambda: ops.write_kv(BACKEND, cache_of(), torch.zeros(1, 2, 8), torch.zeros(1, 2, 8), torch.tensor([9])),
        "value is of shape",
    ),
    "key without rows": (
        lambda: ops.write_kv(BACKEND, cache_of(), torch.tensor(1.0), torch.zeros(1, 2, 4), torch.tensor([9])),
        "key is of shape",
    ),
    "copy from beyond": (lambda: ops.copy_blocks(BACKEND, cache_of(), [(6, 1)]), r"pairs\[0\] source is 6"),
    "copy onto the null block": (lambda: ops.copy_blocks(BACKEND, cache_of(), [(1, 0)]), "destination is 0"),
    "copy twice to one": (lambda: ops.copy_blocks(BACKEND, cache_of(), [(1, 2), (3, 2)]), "written once"),
    "copy onto a source": (lambda: ops.copy_blocks(BACKEND, cache_of(), [(1, 2), (2, 3)]), "no source"),
    "a pair of three": (lambda: ops.copy_blocks(BACKEND, cache_of(), [(1, 2, 3)]), r"pairs\[0\] is \(1, 2, 3\)"),  # type: ignore[list-item]
    "blocks without pairs": (lambda: ops.copy_blocks(BACKEND, cache_of(), [1, 2]), r"pairs\[0\] is 1"),  # type: ignore[list-item]
    "cache that is none": (
        lambda: ops.copy_blocks(BACKEND, None, [(1, 2)]),  # type: ignore[arg-type]
        "cache is a NoneType; it must be one that the backend allocated",
    ),
    "half a block": (lambda: allocate(num_blocks=2.5), "num_blocks is 2.5"),
    "blocks beyond int32": (lambda: allocate(num_blocks=2**40), "num_blocks is 1099511627776"),
    "block size in words": (lambda: allocate(block_size="16"), "block_size is 16; it must be a whole number"),
    "device by name": (lambda: allocate(device="cpu"), "device is 'cpu'"),
    "half a head": (lambda: allocate(shape=KVShape(1.5, 8, 8)), "num_kv_heads is 1.5"),  # type: ignore[arg-type]
    "head beyond all bounds": (lambda: allocate(shape=KVShape(1, 8, 2**20)), "v_head_dim is 1048576"),
    "block size of 12": (
        lambda: ops.allocate(BACKEND, SHAPE, num_blocks=2, block_size=12, dtype=torch.float32, device=CPU),
        "block_size is 12",
    ),
    "only the null block": (
        lambda: ops.allocate(BACKEND, SHAPE, num_blocks=1, block_size=16, dtype=torch.float32, device=CPU),
        "num_blocks is 1",
    ),
    "integer cache": (
        lambda: ops.bytes_per_block(BACKEND, SHAPE, block_size=16, dtype=torch.int8),
        "dtype is torch.int8",
    ),
    "head without width": (
        lambda: ops.bytes_per_block(BACKEND, KVShape(1, 0, 4), block_size=16, dtype=torch.float32),
        "head_dim is 0",
    ),
    "linear of one dimension": (lambda: ops.pack_linear(BACKEND, torch.zeros(3), None), "weight is of shape"),
    "linear of nothing": (lambda: ops.pack_linear(BACKEND, None, None), "weight is a NoneType"),  # type: ignore[arg-type]
    "linear of whole numbers": (lambda: ops.pack_linear(BACKEND, i32([1, 2]), None), "weight is of dtype"),
    "linear that is sparse": (
        lambda: ops.pack_linear(BACKEND, torch.zeros(3, 2).to_sparse(), None),
        "weight is of layout torch.sparse_coo",
    ),
    "linear with a foreign bias": (lambda: ops.pack_linear(BACKEND, torch.zeros(3, 2), torch.zeros(2)), "bias is of"),
    "linear with a narrow result": (
        lambda: ops.pack_linear(BACKEND, torch.zeros(3, 2), None, out_dtype=torch.float16),
        "out_dtype is torch.float16",
    ),
    "program of no rows": (lambda: program(0), r"max_rows is 0; it must be in \[1,"),
    "program of half a row": (lambda: program(2.5), "max_rows is 2.5"),
    "program of what it may be": (lambda: program(None), "max_rows is None"),
    "unknown backend": (lambda: select_backend(CPU, "magic"), "preference is 'magic'"),
}


@pytest.mark.parametrize("name", sorted(BAD_CALLS))
def test_bad_argument_is_refused_with_name_value_and_bound(name: str) -> None:
    call, want = BAD_CALLS[name]
    with pytest.raises(KernelArgumentError, match=want):
        call()


def test_cache_of_another_backend_is_refused() -> None:
    class Foreign:
        shape, num_blocks, block_size, num_bytes = SHAPE, 6, 8, 0
        dtype, device = torch.float32, CPU

    with pytest.raises(KernelArgumentError, match="a Foreign"):
        ops.paged_attention(BACKEND, torch.zeros(4, 4, 8), Foreign(), batch_of(), scale=1.0)


def test_backend_without_packed_linears_offers_none() -> None:
    assert ops.pack_linear(BACKEND, torch.zeros(3, 2), None) is None


def test_unavailable_backend_says_why_and_auto_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagefleet_kernels.dispatch.MODULES", {**MODULES, "cpu": "pagefleet_kernels.not_there"})
    with pytest.raises(BackendUnavailable, match="cpu: not part of this install"):
        select_backend(CPU, "cpu")
    assert select_backend(CPU).name == "reference"
