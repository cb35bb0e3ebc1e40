"""Rotation, head norms and KV write in one pass: as the same steps one by one in float64, and as separate calls."""

import pytest
import torch

from pagefleet_kernels.batch import AttentionBatch, KVShape
from pagefleet_kernels.cpu.backend import CpuBackend
from pagefleet_kernels.cpu.cache import CpuCache
from pagefleet_kernels.errors import KernelArgumentError
from support.cpu_kernels import CPU, LEVELS, NAN_WORDS, backend

DTYPES = [torch.float32, torch.bfloat16]
IDS = ["fp32", "bf16"]


def normal(*size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def table_of(num_positions: int, rotary_dim: int) -> torch.Tensor:
    angles = torch.arange(num_positions).unsqueeze(1) * 0.7 ** torch.arange(rotary_dim // 2).unsqueeze(0)
    return torch.cat([angles.cos(), angles.sin()], dim=1).float()


def turned_in_float64(
    x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, *, interleaved: bool, norm: torch.Tensor | None
) -> torch.Tensor:
    out = x.double()
    if norm is not None:
        out = out * torch.rsqrt(out.pow(2).mean(-1, keepdim=True) + 1e-6) * norm.double()
    half = table.shape[1] // 2
    cosines, sines = (part.double().unsqueeze(1) for part in table[positions].chunk(2, dim=1))
    firsts, seconds = slice(0, half), slice(half, 2 * half)
    if interleaved:
        firsts, seconds = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    a, b = out[..., firsts].clone(), out[..., seconds].clone()
    out[..., firsts] = a * cosines - b * sines
    out[..., seconds] = b * cosines + a * sines
    return out


def empty_cache(owner: CpuBackend, shape: KVShape, dtype: torch.dtype) -> CpuCache:
    cache = owner.allocate(shape, num_blocks=4, block_size=16, dtype=dtype, device=CPU)
    cache.words.fill_(NAN_WORDS[dtype])
    return cache


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 32), (2, 2), (20, 18)])
def test_the_fused_pass_matches_float64_and_separate_calls(
    head_dim: int, rotary_dim: int, with_norms: bool, interleaved: bool, dtype: torch.dtype, level: str
) -> None:
    owner, shape = backend(level), KVShape(2, head_dim, 12)
    fused = normal(7, 8 * head_dim + 30, dtype=dtype)
    query = fused[:, : 6 * head_dim].view(7, 6, head_dim)
    key = fused[:, 6 * head_dim : 8 * head_dim].view(7, 2, head_dim)
    value = fused[:, 8 * head_dim : 8 * head_dim + 24].view(7, 2, 12)
    positions, slots = torch.tensor([0, 3, 99, 3, 17, 5, 1]), torch.tensor([16, 17, -1, 40, 63, 31, 32])
    table = table_of(100, rotary_dim)
    query_norm, key_norm = (normal(head_dim, dtype=dtype, seed=seed) if with_norms else None for seed in (1, 2))
    cache = empty_cache(owner, shape, dtype)
    got = owner.rope_write_kv(
        query,
        key,
        value,
        cache,
        slot_mapping=slots,
        positions=positions,
        cos_sin=table,
        interleaved=interleaved,
        query_norm=query_norm,
        key_norm=key_norm,
    )
    want = turned_in_float64(query, table, positions, interleaved=interleaved, norm=query_norm)
    unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-20
    torch.testing.assert_close(got.double(), want, atol=4 * unit, rtol=unit)
    # What was stored for the keys is what a query with the same data and norm turns into.
    keys = owner.rope_write_kv(
        key,
        key,
        value,
        empty_cache(owner, shape, dtype),
        slot_mapping=torch.full((7,), -1),
        positions=positions,
        cos_sin=table,
        interleaved=interleaved,
        query_norm=key_norm,
    )
    separate = empty_cache(owner, shape, dtype)
    owner.write_kv(separate, keys, value, slots)
    assert torch.equal(cache.words, separate.words)


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_threads_and_neighbours_never_show(dtype: torch.dtype) -> None:
    shape = KVShape(3, 64, 64)
    query, key, value = (normal(300, heads, 64, dtype=dtype, seed=heads) for heads in (9, 3, 4))
    table, positions = table_of(400, 64), torch.arange(300)
    results = []
    for threads in (1, 2, 5):
        owner = backend(num_threads=threads)
        cache = owner.allocate(shape, num_blocks=20, block_size=16, dtype=dtype, device=CPU)
        turned = owner.rope_write_kv(
            query, key, value[:, :3], cache, slot_mapping=positions + 16, positions=positions, cos_sin=table
        )
        results.append((turned, cache.words))
    for other in results[1:]:
        assert torch.equal(other[0], results[0][0])
        assert torch.equal(other[1], results[0][1])
    owner = backend()
    cache = owner.allocate(shape, num_blocks=20, block_size=16, dtype=dtype, device=CPU)
    for row in range(300):
        one = slice(row, row + 1)
        turned = owner.rope_write_kv(
            query[one],
            key[one],
            value[one, :3],
            cache,
            slot_mapping=positions[one] + 16,
            positions=positions[one],
            cos_sin=table,
        )
        assert torch.equal(turned[0], results[0][0][row])
    assert torch.equal(cache.words, results[0][1])


def test_no_tokens_are_fine_and_what_was_written_can_be_attended() -> None:
    owner, shape = backend(), KVShape(1, 16, 16)
    cache = empty_cache(owner, shape, torch.float32)
    table = table_of(8, 16)
    nothing = torch.zeros(0, dtype=torch.int64)
    none = torch.zeros(0, 1, 16)
    assert owner.rope_write_kv(
        none, none, none, cache, slot_mapping=nothing, positions=nothing, cos_sin=table
    ).shape == (0, 1, 16)
    x, positions = normal(5, 1, 16), torch.arange(5)
    turned = owner.rope_write_kv(x, x, x, cache, slot_mapping=positions + 16, positions=positions, cos_sin=table)
    batch = AttentionBatch(
        query_starts=torch.tensor([0, 5], dtype=torch.int32),
        seq_lens=torch.tensor([5], dtype=torch.int32),
        block_tables=torch.tensor([[1]], dtype=torch.int32),
        slot_mapping=positions + 16,
        num_decodes=0,
        max_query_len=5,
        max_seq_len=5,
    )
    got = owner.paged_attention(turned, cache, batch, scale=0.25)
    rows = turned[:, 0].double()
    scores = (rows @ rows.T * 0.25).masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
    torch.testing.assert_close(got[:, 0].double(), scores.softmax(-1) @ x[:, 0].double(), atol=1e-5, rtol=1e-5)


def test_wrong_arguments_are_refused_by_name() -> None:
    owner, shape = backend(), KVShape(1, 16, 16)
    cache = empty_cache(owner, shape, torch.float32)
    x, positions, table = normal(3, 1, 16), torch.arange(3), table_of(8, 16)

    def call(
        query: torch.Tensor = x,
        slots: torch.Tensor = positions + 16,
        at: torch.Tensor = positions,
        cos_sin: torch.Tensor = table,
        query_norm: torch.Tensor | None = None,
    ) -> None:
        owner.rope_write_kv(
            query, x, x, cache, slot_mapping=slots, positions=at, cos_sin=cos_sin, query_norm=query_norm
        )

    with pytest.raises(KernelArgumentError, match=r"positions\[1\] is outside the rotary table"):
        call(at=torch.tensor([0, 8, 1]))
    with pytest.raises(KernelArgumentError, match=r"positions\[0\]"):
        call(at=torch.tensor([-1, 0, 1]))
    with pytest.raises(KernelArgumentError, match=r"slot_mapping\[2\]"):
        call(slots=torch.tensor([16, 17, 64]))
    with pytest.raises(KernelArgumentError, match=r"query is of dtype torch.bfloat16"):
        call(query=x.to(torch.bfloat16))
    with pytest.raises(KernelArgumentError, match=r"query is of shape \(3, 16\); it must be \[T, Hq, D\]"):
        call(query=x[:, 0])
    with pytest.raises(KernelArgumentError, match=r"cos_sin is of shape \(8, 18\)"):
        call(cos_sin=torch.zeros(8, 18))
    with pytest.raises(KernelArgumentError, match=r"query_norm is of shape \(3,\)"):
        call(query_norm=torch.zeros(3))
