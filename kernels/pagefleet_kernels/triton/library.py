"""The ops as torch sees them: `torch.ops.pagefleet.*`, so that torch.compile(fullgraph=True) and CUDA graphs work.

Defined through torch.library.Library (the custom_op decorator costs 20 us a call). A layer's cache goes in as its one
`memory` tensor and its geometry, so that no two arguments alias; shapes of results come from `register_fake`. Nothing
here reads a tensor's values on the host. Importing this module registers the ops, once per process.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from pagefleet_kernels.batch import KVShape
from pagefleet_kernels.sampling_batch import Penalties, SamplingBatch
from pagefleet_kernels.triton.attention import Operands, plan_attention
from pagefleet_kernels.triton.cache import kv_views
from pagefleet_kernels.triton.launch import Device, run
from pagefleet_kernels.triton.memory import KVTarget, Rotation, plan_copy, plan_rope_write, plan_write
from pagefleet_kernels.triton.pointwise import plan_activate, plan_add_norm
from pagefleet_kernels.triton.sampling import plan_sample

LIBRARY: Any = torch.library.Library("pagefleet", "FRAGMENT")  # type: ignore[no-untyped-call]
"""Held for as long as the process: the registrations end with it."""

_CACHE = "SymInt block_size, SymInt num_kv_heads, SymInt head_dim, SymInt v_head_dim"
_SCALES = "Tensor? key_scales, Tensor? value_scales"

SCHEMAS = (
    f"paged_attention(Tensor query, Tensor memory, {_CACHE}, {_SCALES}, Tensor query_starts, Tensor seq_lens,"
    " Tensor block_tables, Tensor? sinks, SymInt num_decodes, SymInt max_query_len, SymInt max_seq_len, float scale,"
    " SymInt window, float softcap) -> Tensor",
    f"write_kv(Tensor(a!) memory, {_CACHE}, {_SCALES}, Tensor key, Tensor value, Tensor slot_mapping) -> ()",
    f"rope_write_kv(Tensor query, Tensor key, Tensor value, Tensor(a!) memory, {_CACHE}, {_SCALES},"
    " Tensor slot_mapping, Tensor positions, Tensor cos_sin, bool interleaved, Tensor? query_norm, Tensor? key_norm,"
    " float epsilon) -> Tensor",
    "copy_blocks(Tensor(a!) memory, Tensor pairs) -> ()",
    "rms_norm(Tensor x, Tensor weight, float epsilon, float weight_offset) -> Tensor",
    "add_rms_norm(Tensor x, Tensor(a!) residual, Tensor weight, float epsilon, float weight_offset) -> Tensor",
    "silu_mul(Tensor x) -> Tensor",
    "sample(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seeds,"
    " Tensor positions, Tensor? repetition, Tensor? presence, Tensor? frequency, Tensor? output_counts,"
    " Tensor? prompt_seen) -> Tensor",
)


def _paged_attention(
    query: torch.Tensor,
    memory: torch.Tensor,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    sinks: torch.Tensor | None,
    num_decodes: int,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    shape = KVShape(num_kv_heads=num_kv_heads, head_dim=head_dim, v_head_dim=v_head_dim)
    keys, values = kv_views(memory, shape, block_size)
    out = query.new_empty(query.shape[0], query.shape[1], v_head_dim)
    operands = Operands(
        out=out,
        query=query,
        keys=keys,
        values=values,
        key_scales=key_scales,
        value_scales=value_scales,
        query_starts=query_starts,
        seq_lens=seq_lens,
        block_tables=block_tables,
        sinks=sinks,
        num_decodes=num_decodes,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        scale=scale,
        window=window,
        softcap=softcap,
    )
    for launch in plan_attention(operands, Device.of(query.device)):
        run(launch, query.device)
    return out


def _paged_attention_fake(
    query: torch.Tensor,
    memory: torch.Tensor,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    *_: object,
) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[1], v_head_dim)


def _write_kv(
    memory: torch.Tensor,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    shape = KVShape(num_kv_heads=num_kv_heads, head_dim=head_dim, v_head_dim=v_head_dim)
    keys, values = kv_views(memory, shape, block_size)
    run(plan_write(KVTarget(keys, values, key_scales, value_scales, slot_mapping), key, value), memory.device)


def _rope_write_kv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    memory: torch.Tensor,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    interleaved: bool,
    query_norm: torch.Tensor | None,
    key_norm: torch.Tensor | None,
    epsilon: float,
) -> torch.Tensor:
    shape = KVShape(num_kv_heads=num_kv_heads, head_dim=head_dim, v_head_dim=v_head_dim)
    keys, values = kv_views(memory, shape, block_size)
    out = query.new_empty(query.shape)
    rotation = Rotation(
        positions=positions,
        cos_sin=cos_sin,
        interleaved=interleaved,
        query_norm=query_norm,
        key_norm=key_norm,
        epsilon=epsilon,
    )
    target = KVTarget(keys, values, key_scales, value_scales, slot_mapping)
    run(plan_rope_write(target, rotation, out, query, key, value), memory.device)
    return out


def _copy_blocks(memory: torch.Tensor, pairs: torch.Tensor) -> None:
    run(plan_copy(memory, pairs), memory.device)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, weight_offset: float) -> torch.Tensor:
    out = x.new_empty(x.shape)
    run(plan_add_norm(out, x, None, weight, epsilon=epsilon, weight_offset=weight_offset), x.device)
    return out


def _add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float, weight_offset: float
) -> torch.Tensor:
    out = x.new_empty(x.shape)
    run(plan_add_norm(out, x, residual, weight, epsilon=epsilon, weight_offset=weight_offset), x.device)
    return out


def _silu_mul(x: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(x.shape[0], x.shape[1] // 2)
    run(plan_activate(out, x), x.device)
    return out


def _sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    repetition: torch.Tensor | None,
    presence: torch.Tensor | None,
    frequency: torch.Tensor | None,
    output_counts: torch.Tensor | None,
    prompt_seen: torch.Tensor | None,
) -> torch.Tensor:
    penalties = None
    if (
        repetition is not None
        and presence is not None
        and frequency is not None
        and output_counts is not None
        and prompt_seen is not None
    ):
        penalties = Penalties(repetition, presence, frequency, output_counts, prompt_seen)
    batch = SamplingBatch(temperature, top_k, top_p, min_p, seeds, positions, penalties)
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    for launch in plan_sample(tokens, logits, batch):
        run(launch, logits.device)
    return tokens


def _nothing(*_: object) -> None:
    """Ops without a result."""


def _register() -> None:
    for schema in SCHEMAS:
        LIBRARY.define(schema)
    implementations: Mapping[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "paged_attention": (_paged_attention, _paged_attention_fake),
        "write_kv": (_write_kv, _nothing),
        "rope_write_kv": (_rope_write_kv, lambda query, *_: query.new_empty(query.shape)),
        "copy_blocks": (_copy_blocks, _nothing),
        "rms_norm": (_rms_norm, lambda x, *_: x.new_empty(x.shape)),
        "add_rms_norm": (_add_rms_norm, lambda x, *_: x.new_empty(x.shape)),
        "silu_mul": (_silu_mul, lambda x: x.new_empty(x.shape[0], x.shape[1] // 2)),
        "sample": (_sample, lambda logits, *_: logits.new_empty(logits.shape[0], dtype=torch.int64)),
    }
    for name, (function, fake) in implementations.items():
        # Not only CUDA: under Triton's interpreter the same functions run on CPU tensors.
        LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"pagefleet::{name}", fake, lib=LIBRARY)


_register()
