"""The one public signature of each op. Arguments are checked here, at the door; the backend trusts them.

Every function takes the backend first: it is chosen once, by `dispatch.select_backend`, and passed along. A cache goes
back only to the backend that allocated it. Checks of shape, dtype, device and stride cost no device work and always
run. Checks of values (block ids, slots, lengths) read the tensors; they run with `check_bounds` (the default). A caller
that runs many layers over one batch calls `check_batch` once and passes `check_bounds=False`.
"""

from collections.abc import Sequence

import torch

from pagefleet_kernels.backend import Backend, KVCache, LinearFunction, LinearPacker, Program, ProgramMaker
from pagefleet_kernels.batch import AttentionBatch, KVShape
from pagefleet_kernels.checks import (
    INT32_MAX,
    check_batch,
    check_batch_form,
    check_block_geometry,
    check_integer,
    check_kv_shape,
    check_plain,
    check_positive,
    check_rank,
    check_row_dtype,
    check_score_rule,
    check_slots,
    check_tensor,
    refuse,
)

__all__ = [
    "allocate",
    "bytes_per_block",
    "check_batch",
    "copy_blocks",
    "new_program",
    "pack_linear",
    "paged_attention",
    "write_kv",
]


def allocate(
    backend: Backend,
    shape: KVShape,
    *,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> KVCache:
    """Zeroed KV memory of one layer for num_blocks blocks, the null block 0 included (so num_blocks >= 2).

    dtype: the rows' own, or float8_e4m3fn, half the bytes of 16-bit floats, where the backend holds it: rows of any
    float dtype are then converted as they are written. Raises KernelArgumentError, BackendUnavailable; MemoryError or
    torch's RuntimeError when the device has not so much.
    """
    check_kv_shape(shape)
    check_block_geometry(block_size, dtype)
    if not 2 <= check_integer("num_blocks", num_blocks) <= INT32_MAX:
        raise refuse("num_blocks", num_blocks, f"in [2, {INT32_MAX}] (block 0 is the null block)")
    if not isinstance(device, torch.device):
        raise refuse("device", repr(device), "a torch.device")
    return backend.allocate(shape, num_blocks=num_blocks, block_size=block_size, dtype=dtype, device=device)


def bytes_per_block(backend: Backend, shape: KVShape, *, block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block of one layer takes in the backend's layout, padding included."""
    check_kv_shape(shape)
    check_block_geometry(block_size, dtype)
    return backend.bytes_per_block(shape, block_size=block_size, dtype=dtype)


def write_kv(
    backend: Backend,
    cache: KVCache,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    check_bounds: bool = True,
) -> None:
    """Store key [T, Hkv, D] and value [T, Hkv, Dv] at slot_mapping int64 [T]; slot -1 is skipped.

    key and value: the cache's dtype (of a quantised cache: one float dtype) and device, last dimension contiguous, any
    stride above it. Slots are distinct.
    Slots of the null block (0 <= slot < block_size) are refused. Raises KernelArgumentError.
    """
    shape = _shape_of(cache)
    check_rank("key", key, "[T, Hkv, D]")
    num_tokens = key.shape[0]
    dtype = check_row_dtype("key", key, cache.dtype)
    check_tensor("key", key, (num_tokens, shape.num_kv_heads, shape.head_dim), dtype, cache.device)
    check_tensor("value", value, (num_tokens, shape.num_kv_heads, shape.v_head_dim), dtype, cache.device)
    check_tensor("slot_mapping", slot_mapping, (num_tokens,), torch.int64, cache.device)
    if check_bounds:
        check_slots(slot_mapping, cache.num_blocks, cache.block_size)
    backend.write_kv(cache, key, value, slot_mapping)


def paged_attention(
    backend: Backend,
    query: torch.Tensor,
    cache: KVCache,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    check_bounds: bool = True,
) -> torch.Tensor:
    """Causal attention of query [T, Hq, D] over the cache -> a new [T, Hq, Dv] tensor in the query's dtype.

    The rows' K and V must already be in the cache (`write_kv` first). query: the cache's dtype (of a quantised cache:
    any float dtype) and device, last dimension contiguous. Hq is a multiple of the cache's Hkv; query head h reads kv
    head h // (Hq // Hkv).
    scale multiplies the scores. sliding_window w >= 1: a row at position p sees keys k with p - k < w.
    softcap c > 0: scores become c * tanh(s / c). sinks [Hq], float: one extra logit per head in the softmax, without
    value. Rows of padding (slot -1, in sequences with seq_len 0) come out as zeros. Raises KernelArgumentError.
    """
    shape = _shape_of(cache)
    check_rank("query", query, "[T, Hq, D]")
    num_rows, num_q_heads = query.shape[0], query.shape[1]
    dtype = check_row_dtype("query", query, cache.dtype)
    check_tensor("query", query, (num_rows, num_q_heads, shape.head_dim), dtype, cache.device)
    if num_q_heads == 0 or num_q_heads % shape.num_kv_heads:
        raise refuse("query", f"{num_q_heads} heads", f"a multiple of the cache's {shape.num_kv_heads} kv heads")
    check_batch_form(batch, num_rows, cache.device)
    check_score_rule(scale, sliding_window, softcap)
    if sinks is not None:
        check_rank("sinks", sinks, "[Hq]")
        if not sinks.dtype.is_floating_point:
            raise refuse("sinks", f"dtype {sinks.dtype}", "a floating dtype")
        check_tensor("sinks", sinks, (num_q_heads,), sinks.dtype, cache.device)
    if check_bounds:
        check_batch(batch, num_blocks=cache.num_blocks, block_size=cache.block_size)
    return backend.paged_attention(
        query, cache, batch, scale=scale, sliding_window=sliding_window, softcap=softcap, sinks=sinks
    )


def copy_blocks(backend: Backend, cache: KVCache, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy whole blocks, (source, destination) each. Destinations are distinct, not the null block, and no sources."""
    _shape_of(cache)
    for index, pair in enumerate(pairs):
        if not isinstance(pair, Sequence) or len(pair) != 2:
            raise refuse(f"pairs[{index}]", pair, "(source, destination)")
    sources = {source for source, _ in pairs}
    seen: set[int] = set()
    for index, (source, destination) in enumerate(pairs):
        check_integer(f"pairs[{index}] source", source)
        check_integer(f"pairs[{index}] destination", destination)
        if not 0 <= source < cache.num_blocks:
            raise refuse(f"pairs[{index}] source", source, f"in [0, {cache.num_blocks})")
        if not 1 <= destination < cache.num_blocks:
            raise refuse(f"pairs[{index}] destination", destination, f"in [1, {cache.num_blocks})")
        if destination in seen:
            raise refuse(f"pairs[{index}] destination", destination, "written once only")
        if destination in sources:
            raise refuse(f"pairs[{index}] destination", destination, "no source of the same call")
        seen.add(destination)
    if pairs:
        backend.copy_blocks(cache, pairs)


def pack_linear(
    backend: Backend, weight: torch.Tensor, bias: torch.Tensor | None, *, out_dtype: torch.dtype | None = None
) -> LinearFunction | None:
    """weight [N, K], bias [N] or None -> a function x [..., K] -> [..., N]; None when the backend offers no better one.

    The function holds its own copy: the caller may free the weight. out_dtype: what the result comes in: None or the
    weight's dtype, or float32 for sums that are not rounded (logits: in bfloat16 many of them are equal).
    """
    check_rank("weight", weight, "[N, K]")
    if 0 in weight.shape or max(weight.shape) > INT32_MAX:
        raise refuse("weight", f"of shape {tuple(weight.shape)}", f"[N, K] with N, K in [1, {INT32_MAX}]")
    if not weight.dtype.is_floating_point:
        raise refuse("weight", f"of dtype {weight.dtype}", "a floating dtype")
    check_plain("weight", weight)
    if bias is not None:
        check_tensor("bias", bias, (weight.shape[0],), weight.dtype, weight.device)
    if out_dtype not in (None, weight.dtype, torch.float32):
        raise refuse("out_dtype", out_dtype, f"None, the weight's {weight.dtype}, or torch.float32")
    if not isinstance(backend, LinearPacker):
        return None
    return backend.pack_linear(weight, bias, out_dtype=out_dtype)


def new_program(
    backend: Backend, *, dtype: torch.dtype, device: torch.device, max_rows: int, plain: bool = False
) -> Program:
    """An empty program (see backend.Program): the backend's own, or, where it has none or plain is asked for, one of
    torch and the backend's ops. Raises BackendUnavailable for a dtype or device that the backend's own does not
    hold."""
    check_positive("max_rows", max_rows)
    if isinstance(backend, ProgramMaker) and not plain:
        return backend.program(dtype=dtype, device=device, max_rows=max_rows)
    from pagefleet_kernels.torch_program import TorchProgram

    return TorchProgram(backend, dtype=dtype, device=device, max_rows=max_rows)


def _shape_of(cache: KVCache) -> KVShape:
    shape = getattr(cache, "shape", None)
    if not isinstance(shape, KVShape):
        raise refuse("cache", f"a {type(cache).__name__}", "one that the backend allocated")
    return shape
