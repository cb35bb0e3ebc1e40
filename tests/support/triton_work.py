"""What tests send to the interpreting process: plain arguments in, tensors out."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from pagefleet_kernels import ops
from pagefleet_kernels.batch import KVShape
from pagefleet_kernels.reference import make_backend as make_reference
from pagefleet_kernels.sampling_batch import Penalties, SamplingBatch
from pagefleet_kernels.triton import make_backend
from pagefleet_kernels.triton.attention import Operands, plan_attention, plan_decode
from pagefleet_kernels.triton.backend import TritonBackend
from pagefleet_kernels.triton.cache import FP8, TritonCache
from pagefleet_kernels.triton.configs import decode_config
from pagefleet_kernels.triton.launch import INTERPRETER, run
from support.attention_oracle import CASES, Case, World, build

CPU = torch.device("cpu")


def case_of(name_or_case: str | Case) -> Case:
    return CASES[name_or_case] if isinstance(name_or_case, str) else name_or_case


def poisoned_cache(
    backend: TritonBackend, shape: KVShape, world_blocks: int, block_size: int, dtype: torch.dtype
) -> Any:
    """Memory whose every unwritten slot is NaN, the null block included."""
    cache = backend.allocate(shape, num_blocks=world_blocks, block_size=block_size, dtype=dtype, device=CPU)
    cache.memory.view(torch.uint8).fill_(0x7F if dtype == FP8 else 0xFF)
    return cache


def fill(cache: TritonCache, world: World) -> None:
    """The world's history in its slots, without the write kernel: interpreted, that costs milliseconds a token."""
    blocks, offsets = world.history_slots // cache.block_size, world.history_slots % cache.block_size
    for target, rows, scales in (
        (cache.keys, world.history_keys, cache.key_scales),
        (cache.values, world.history_values, cache.value_scales),
    ):
        if scales is None:
            target[blocks, offsets] = rows
        else:
            stored = (rows.float() / scales[:, None]).clamp(-448.0, 448.0).to(FP8)
            target.view(torch.uint8)[blocks, offsets] = stored.view(torch.uint8)


def attend(name_or_case: str | Case, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(what the backend says, what float64 says) of a case, through the public ops."""
    case = case_of(name_or_case)
    world = build(case, seed=seed, dtype=dtype)
    backend = make_backend()
    cache = poisoned_cache(backend, case.shape, world.num_blocks, case.block_size, dtype)
    fill(cache, world)
    out = ops.paged_attention(
        backend,
        world.query,
        cache,
        world.batch,
        scale=case.scale,
        sliding_window=case.sliding_window,
        softcap=case.softcap,
        sinks=world.sinks,
    )
    return out, world.want


def attend_fp8(
    name_or_case: str | Case,
    query_dtype: torch.dtype,
    key_scale: float,
    value_scale: float,
    seed: int = 0,
    query_factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same over fp8 storage: the oracle sees what fp8 can hold, head 0 with half the scale."""
    case = case_of(name_or_case)
    world = build(case, seed=seed, dtype=query_dtype)
    world = replace(world, query=world.query * query_factor)
    backend = make_backend()
    cache = poisoned_cache(backend, case.shape, world.num_blocks, case.block_size, FP8)
    heads = torch.ones(case.shape.num_kv_heads)
    heads[0] = 0.5
    cache.key_scales.copy_(heads * key_scale)
    cache.value_scales.copy_(heads * value_scale)
    ops.write_kv(backend, cache, world.history_keys[:1], world.history_values[:1], world.history_slots[:1])
    fill(cache, world)
    out = ops.paged_attention(
        backend,
        world.query,
        cache,
        world.batch,
        scale=case.scale,
        sliding_window=case.sliding_window,
        softcap=case.softcap,
        sinks=world.sinks,
    )
    return out, _fp8_oracle(world, heads * key_scale, heads * value_scale)


def attend_fp8_large_queries(case: Case, query_factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 queries far beyond what fp16 can hold."""
    return attend_fp8(case, torch.bfloat16, 0.03, 0.007, query_factor=query_factor)


def _fp8_oracle(world: World, key_scales: torch.Tensor, value_scales: torch.Tensor) -> torch.Tensor:
    def held(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        scaled = (rows.float() / scales[:, None]).clamp(-448.0, 448.0)
        return scaled.to(FP8).double() * scales[:, None].double()

    case = world.case
    reference = make_reference()
    cache = reference.allocate(
        case.shape, num_blocks=world.num_blocks, block_size=case.block_size, dtype=torch.float64, device=CPU
    )
    reference.write_kv(
        cache, held(world.history_keys, key_scales), held(world.history_values, value_scales), world.history_slots
    )
    return reference.paged_attention(
        world.query.double(),
        cache,
        world.batch,
        scale=case.scale,
        sliding_window=case.sliding_window,
        softcap=case.softcap,
        sinks=world.sinks.double() if world.sinks is not None else None,
    )


def cache_bytes(dtype: torch.dtype, slots: list[int], shape: KVShape, block_size: int, seed: int) -> dict[str, Any]:
    """Write random rows (row stride twice the needed one); return what went in and what is stored."""
    generator = torch.Generator().manual_seed(seed)
    backend = make_backend()
    cache = poisoned_cache(backend, shape, 1 + max(slots) // block_size + 1, block_size, dtype)
    kind = torch.bfloat16 if dtype == FP8 else dtype
    heads = shape.num_kv_heads
    key = torch.randn(len(slots), 2 * heads, shape.head_dim, generator=generator).mul(100).to(kind)[:, :heads]
    value = torch.randn(len(slots), 2 * heads, shape.v_head_dim, generator=generator).mul(100).to(kind)[:, heads:]
    if cache.key_scales is not None:
        cache.key_scales.copy_(torch.linspace(0.05, 1.0, heads))
        cache.value_scales.copy_(torch.linspace(0.5, 2.0, heads))
    backend.write_kv(cache, key, value, torch.tensor(slots))
    return {"key": key, "value": value, **_stored(cache)}


def _stored(cache: TritonCache) -> dict[str, Any]:
    return {
        "keys": cache.keys.float(),
        "values": cache.values.float(),
        "key_scales": cache.key_scales,
        "value_scales": cache.value_scales,
    }


@dataclass(frozen=True, slots=True)
class RopeCase:
    """One fused rotation and write."""

    shape: KVShape
    query_heads: int
    rotary: int
    interleaved: bool = False
    norms: bool = False
    dtype: torch.dtype = torch.float32
    storage: torch.dtype | None = None
    block_size: int = 16


def rope(case: RopeCase, seed: int = 0) -> dict[str, Any]:
    """Inputs and results of rope_write_kv over 5 rows, the third without a slot; q, k, v are slices of one qkv."""
    generator = torch.Generator().manual_seed(seed)
    shape, dtype = case.shape, case.dtype
    widths = [case.query_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim]
    widths.append(shape.num_kv_heads * shape.v_head_dim)
    qkv = torch.randn(5, sum(widths), generator=generator).to(dtype)
    query, key, value = (
        part.view(5, -1, width)
        for part, width in zip(
            torch.split(qkv, widths, dim=1), (shape.head_dim, shape.head_dim, shape.v_head_dim), strict=True
        )
    )
    cos_sin = torch.randn(64, case.rotary, generator=generator)
    positions = torch.tensor([0, 7, 8, 63, 7])
    norms = [torch.randn(shape.head_dim, generator=generator).to(dtype) if case.norms else None for _ in range(2)]
    slots = torch.tensor([case.block_size, 3 * case.block_size - 1, -1, case.block_size + 5, 2 * case.block_size])
    backend = make_backend()
    cache = poisoned_cache(backend, shape, 4, case.block_size, case.storage or dtype)
    if cache.key_scales is not None:
        cache.key_scales.fill_(0.01)
        cache.value_scales.fill_(0.02)
    turned = backend.rope_write_kv(
        query, key, value, cache, slot_mapping=slots, positions=positions, cos_sin=cos_sin,
        interleaved=case.interleaved, query_norm=norms[0], key_norm=norms[1], epsilon=1e-5,
    )  # fmt: skip
    return {
        "query": query, "key": key, "value": value, "cos_sin": cos_sin, "positions": positions, "slots": slots,
        "norms": norms, "turned": turned, **_stored(cache),
    }  # fmt: skip


def copied(dtype: torch.dtype, pairs: list[tuple[int, int]], shape: KVShape, block_size: int) -> list[torch.Tensor]:
    """Bytes of the memory [blocks, row] before and after copying blocks."""
    backend = make_backend()
    cache = backend.allocate(shape, num_blocks=9, block_size=block_size, dtype=dtype, device=CPU)
    raw = cache.memory.view(torch.uint8)
    raw.copy_(torch.randint(0, 256, raw.shape, generator=torch.Generator().manual_seed(3), dtype=torch.uint8))
    before = raw.clone()
    backend.copy_blocks(cache, pairs)
    return [before, raw.clone()]


def alone_and_together(case: Case, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Output of a step, and of each of its sequences in a step of its own."""
    world = build(case, dtype=dtype)
    backend = make_backend()
    cache = poisoned_cache(backend, case.shape, world.num_blocks, case.block_size, dtype)
    fill(cache, world)
    together = backend.paged_attention(world.query, cache, world.batch, scale=case.scale)
    parts = []
    starts = world.batch.query_starts.tolist()
    for index, (rows, length) in enumerate(case.sequences):
        batch = replace(
            world.batch,
            query_starts=torch.tensor([0, rows], dtype=torch.int32),
            seq_lens=world.batch.seq_lens[index : index + 1],
            block_tables=world.batch.block_tables[index : index + 1],
            slot_mapping=world.batch.slot_mapping[starts[index] : starts[index + 1]],
            num_decodes=int(rows == 1 and index < case.num_decodes),
            max_query_len=rows,
            max_seq_len=length,
        )
        query = world.query[starts[index] : starts[index + 1]]
        parts.append(backend.paged_attention(query, cache, batch, scale=case.scale))
    return together, parts


def decode_with_small_splits(case: Case, split: int, max_splits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode rows with a configuration that makes short sequences meet every branch of the split arithmetic."""
    world = build(case)
    backend = make_backend()
    cache = poisoned_cache(backend, case.shape, world.num_blocks, case.block_size, torch.float32)
    fill(cache, world)
    out = torch.full((case.num_rows, case.num_q_heads, case.shape.v_head_dim), float("nan"))
    operands = Operands(
        out=out, query=world.query, keys=cache.keys, values=cache.values, key_scales=None, value_scales=None,
        query_starts=world.batch.query_starts, seq_lens=world.batch.seq_lens, block_tables=world.batch.block_tables,
        sinks=world.sinks, num_decodes=case.num_decodes, max_query_len=1, max_seq_len=world.batch.max_seq_len,
        scale=case.scale, window=case.sliding_window or 0, softcap=case.softcap or 0.0,
    )  # fmt: skip
    default = decode_config(INTERPRETER, case.shape.head_dim, case.shape.v_head_dim, 4)
    for launch in plan_decode(operands, INTERPRETER, replace(default, tile=16, split=split, max_splits=max_splits)):
        run(launch, CPU)
    return out, world.want


def decode_beyond_the_plan(planned: int, lengths: tuple[int, ...]) -> torch.Tensor:
    """Decode rows of a batch that says max_seq_len = planned, whatever its lengths are."""
    case = Case(tuple((1, length) for length in lengths), KVShape(1, 16, 16), num_q_heads=2)
    world = build(case)
    backend = make_backend()
    cache = poisoned_cache(backend, case.shape, world.num_blocks, case.block_size, torch.float32)
    fill(cache, world)
    return backend.paged_attention(world.query, cache, replace(world.batch, max_seq_len=planned), scale=case.scale)


def norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, epsilon: float, offset: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    # Tensors travel in shared memory: without a copy, the caller's own would change.
    residual = residual.clone() if residual is not None else None
    out = make_backend().add_rms_norm(x, residual, weight, epsilon=epsilon, weight_offset=offset)
    return out, residual


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    return make_backend().silu_mul(x)


def sample(
    logits: torch.Tensor, batch: dict[str, torch.Tensor], penalties: dict[str, torch.Tensor] | None
) -> torch.Tensor:
    made = SamplingBatch(**batch, penalties=Penalties(**penalties) if penalties else None)
    return make_backend().sample(logits, made)


def dot_of_bf16(values: list[float]) -> tuple[list[float], float]:
    """Canary: values through fp32 -> bf16 -> fp32 in a kernel, and the largest error of a bf16 dot of integers."""
    from support.triton_canary import canary

    return canary(values)


def launches(case: Case) -> int:
    """Kernels that one attention call launches."""
    world = build(case)
    cache = make_backend().allocate(
        case.shape, num_blocks=world.num_blocks, block_size=case.block_size, dtype=torch.float32, device=CPU
    )
    operands = Operands(
        out=world.query, query=world.query, keys=cache.keys, values=cache.values, key_scales=None, value_scales=None,
        query_starts=world.batch.query_starts, seq_lens=world.batch.seq_lens, block_tables=world.batch.block_tables,
        sinks=None, num_decodes=case.num_decodes, max_query_len=world.batch.max_query_len,
        max_seq_len=world.batch.max_seq_len, scale=1.0, window=0, softcap=0.0,
    )  # fmt: skip
    return len(plan_attention(operands, INTERPRETER))


def whole_and_chunks(length: int, cuts: list[int], window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """A prompt's output at once, and cut at the given rows. One-row chunks stay with the prefill kernel."""
    case = Case(((length, length),), KVShape(1, 16, 16), num_q_heads=2, sliding_window=window)
    world = build(case)
    backend = make_backend()
    cache = poisoned_cache(backend, case.shape, world.num_blocks, case.block_size, torch.float32)
    fill(cache, world)
    pieces = []
    for first, last in [(0, length), *pairwise([0, *cuts, length])]:
        batch = replace(
            world.batch,
            query_starts=torch.tensor([0, last - first], dtype=torch.int32),
            seq_lens=torch.tensor([last], dtype=torch.int32),
            slot_mapping=world.batch.slot_mapping[first:last],
            num_decodes=0,
            max_query_len=last - first,
            max_seq_len=last,
        )
        pieces.append(
            backend.paged_attention(world.query[first:last], cache, batch, scale=case.scale, sliding_window=window)
        )
    return pieces[0], torch.cat(pieces[1:])
