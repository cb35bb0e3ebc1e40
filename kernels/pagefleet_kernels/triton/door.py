"""Checks of the arguments of the ops that `pagefleet_kernels.ops` does not cover. Reads no tensor: nothing waits."""

import torch

from pagefleet_kernels.checks import check_apart, check_rank, check_tensor, refuse
from pagefleet_kernels.sampling_batch import SamplingBatch
from pagefleet_kernels.triton.cache import FP8, TritonCache

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MAX_NORM_WIDTH = 65536
"""One program holds a whole row."""


def check_rope(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: TritonCache,
    *,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    query_norm: torch.Tensor | None,
    key_norm: torch.Tensor | None,
) -> None:
    """Refuse what does not fit together in TritonBackend.rope_write_kv."""
    shape, device = cache.shape, cache.device
    check_rank("query", query, "[T, Hq, D]")
    rows, heads, _ = query.shape
    dtype = _float_dtype("query", query) if cache.dtype == FP8 else cache.dtype
    check_tensor("query", query, (rows, heads, shape.head_dim), dtype, device)
    check_tensor("key", key, (rows, shape.num_kv_heads, shape.head_dim), dtype, device)
    check_tensor("value", value, (rows, shape.num_kv_heads, shape.v_head_dim), dtype, device)
    check_tensor("slot_mapping", slot_mapping, (rows,), torch.int64, device)
    check_tensor("positions", positions, (rows,), torch.int64, device)
    check_rank("cos_sin", cos_sin, "[P, R]")
    if cos_sin.shape[1] % 2 or not 2 <= cos_sin.shape[1] <= shape.head_dim:
        raise refuse("cos_sin", f"of shape {tuple(cos_sin.shape)}", f"[P, R] with R even, in [2, {shape.head_dim}]")
    check_tensor("cos_sin", cos_sin, tuple(cos_sin.shape), torch.float32, device)
    _check_contiguous("cos_sin", cos_sin)
    for name, norm in (("query_norm", query_norm), ("key_norm", key_norm)):
        if norm is not None:
            check_tensor(name, norm, (shape.head_dim,), dtype, device)


def check_norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor) -> None:
    """Refuse what does not fit together in TritonBackend.add_rms_norm."""
    _check_matrix("x", x)
    if not 1 <= x.shape[1] <= MAX_NORM_WIDTH:
        raise refuse("x", f"of width {x.shape[1]}", f"of width in [1, {MAX_NORM_WIDTH}]")
    check_tensor("weight", weight, (x.shape[1],), x.dtype, x.device)
    if residual is not None:
        check_tensor("residual", residual, tuple(x.shape), x.dtype, x.device)
        if x.shape[0] > 1 and residual.stride(0) < x.shape[1]:
            raise refuse("residual", f"strided {residual.stride()}", "of rows apart from each other: it is written")
        check_apart("residual", residual, x=x)


def check_gate(x: torch.Tensor) -> None:
    """Refuse what TritonBackend.silu_mul cannot halve."""
    _check_matrix("x", x)
    if x.shape[1] % 2 or not x.shape[1]:
        raise refuse("x", f"of width {x.shape[1]}", "even and >= 2: gates, then ups")


def check_sampling(logits: torch.Tensor, batch: SamplingBatch) -> None:
    """Refuse what does not fit together in TritonBackend.sample."""
    _check_matrix("logits", logits)
    rows, vocab = logits.shape
    if not vocab:
        raise refuse("logits", "without a vocabulary", "[B, V] with V >= 1")
    vectors = [
        ("temperature", batch.temperature, torch.float32),
        ("top_k", batch.top_k, torch.int32),
        ("top_p", batch.top_p, torch.float32),
        ("min_p", batch.min_p, torch.float32),
        ("seeds", batch.seeds, torch.int64),
        ("positions", batch.positions, torch.int64),
    ]
    penalties = batch.penalties
    if penalties is not None:
        vectors += [
            ("repetition", penalties.repetition, torch.float32),
            ("presence", penalties.presence, torch.float32),
            ("frequency", penalties.frequency, torch.float32),
        ]
        for name, table, kind in (
            ("output_counts", penalties.output_counts, torch.int32),
            ("prompt_seen", penalties.prompt_seen, torch.int8),
        ):
            check_tensor(name, table, (rows, vocab), kind, logits.device)
            _check_contiguous(name, table)
    for name, vector, dtype in vectors:
        check_tensor(name, vector, (rows,), dtype, logits.device)


def _check_matrix(name: str, tensor: torch.Tensor) -> None:
    check_rank(name, tensor, "[T, N]")
    check_tensor(name, tensor, tuple(tensor.shape), _float_dtype(name, tensor), tensor.device)


def _float_dtype(name: str, tensor: torch.Tensor) -> torch.dtype:
    if tensor.dtype not in FLOATS:
        raise refuse(name, f"of dtype {tensor.dtype}", f"of {', '.join(str(dtype) for dtype in FLOATS)}")
    return tensor.dtype


def _check_contiguous(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        raise refuse(name, f"strided {tensor.stride()}", "contiguous")
