"""Planning attention: shapes and strides in, launches out. Reads no tensor's values: it never waits for the device."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from pagefleet_kernels.triton.cache import FP8
from pagefleet_kernels.triton.configs import DecodeConfig, PrefillConfig, decode_config, pow2, prefill_config
from pagefleet_kernels.triton.kernels import decode as decode_kernels
from pagefleet_kernels.triton.kernels import prefill as prefill_kernels
from pagefleet_kernels.triton.launch import Device, Launch

LOG2E = math.log2(math.e)
COMBINE_CHUNK = 16
"""Partial results that the combine step sums at a time; fixed, because it decides the order of summation."""
SPLIT_BUCKETS = (1, 4, 16, 64)
"""Grid sizes of the split axis: a captured graph serves every batch of its bucket."""


@dataclass(frozen=True, slots=True)
class Operands:
    """Everything one attention call reads and writes; see Backend.paged_attention."""

    out: torch.Tensor
    """[T, Hq, Dv]."""
    query: torch.Tensor
    """[T, Hq, D]."""
    keys: torch.Tensor
    """[blocks, block_size, Hkv, D]."""
    values: torch.Tensor
    """[blocks, block_size, Hkv, Dv]."""
    key_scales: torch.Tensor | None
    value_scales: torch.Tensor | None
    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    sinks: torch.Tensor | None
    num_decodes: int
    max_query_len: int
    max_seq_len: int
    scale: float
    window: int
    """0: none."""
    softcap: float
    """0: none."""

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.query.shape[1] // self.keys.shape[2]


def decode_slots(config: DecodeConfig, *, max_seq_len: int, window: int) -> int:
    """Splits that a row of up to max_seq_len tokens can have, rounded up to a bucket."""
    most = min(config.max_splits, max(1, -(-max_seq_len // config.split)))
    if window:
        # A window of w tokens touches at most this many splits of `split` tokens, and fewer longer ones.
        most = min(most, -(-(window - 1) // config.split) + 1)
    return next(bucket for bucket in SPLIT_BUCKETS if bucket >= most)


def plan_decode(operands: Operands, device: Device, config: DecodeConfig | None = None) -> tuple[Launch, ...]:
    """One launch, and one more to combine when some row may have several splits."""
    num_seqs, num_heads = operands.num_decodes, operands.query.shape[1]
    width, v_width = operands.keys.shape[3], operands.values.shape[3]
    config = config or decode_config(device, width, v_width, operands.keys.dtype.itemsize)
    slots = decode_slots(config, max_seq_len=operands.max_seq_len, window=operands.window)
    options: dict[str, Any] = {"dtype": torch.float32, "device": operands.query.device}
    partial_out = torch.empty((num_seqs, num_heads, slots, v_width) if slots > 1 else (1,), **options)
    partial_lse = torch.empty((num_seqs, num_heads, slots) if slots > 1 else (1,), **options)
    block_heads = min(64, pow2(operands.group))
    head_blocks = -(-operands.group // block_heads)
    shared = {"SPLIT": config.split, "MAX_SPLITS": config.max_splits, "HAS_WINDOW": operands.window > 0}
    attend = Launch(
        kernel=decode_kernels.paged_decode,
        grid=(num_seqs, operands.keys.shape[2] * head_blocks, slots),
        arguments={
            "out": operands.out,
            "query": operands.query,
            "keys": operands.keys,
            "values": operands.values,
            "block_tables": operands.block_tables,
            "seq_lens": operands.seq_lens,
            "sinks": operands.sinks,
            "key_scales": operands.key_scales,
            "value_scales": operands.value_scales,
            "partial_out": partial_out,
            "partial_lse": partial_lse,
            "slots": slots,
            **_shape_arguments(operands),
        },
        constants={"BLOCK_H": block_heads, "TILE": config.tile, **_shape_constants(operands), **shared},
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if slots == 1:
        return (attend,)
    combine = Launch(
        kernel=decode_kernels.combine_splits,
        grid=(num_seqs, num_heads),
        arguments={
            "out": operands.out,
            "partial_out": partial_out,
            "partial_lse": partial_lse,
            "seq_lens": operands.seq_lens,
            "window": operands.window,
            "slots": slots,
            "stride_out_row": operands.out.stride(0),
            "stride_out_head": operands.out.stride(1),
        },
        constants={"DV": v_width, "DV_PAD": pow2(v_width), "CHUNK": COMBINE_CHUNK, **shared},
        num_warps=4,
        num_stages=1,
    )
    return attend, combine


def plan_prefill(operands: Operands, device: Device, config: PrefillConfig | None = None) -> tuple[Launch, ...]:
    """One launch over the sequences behind the decodes."""
    num_seqs = operands.seq_lens.shape[0] - operands.num_decodes
    num_rows = operands.query.shape[0] - operands.num_decodes
    width, v_width = operands.keys.shape[3], operands.values.shape[3]
    config = config or prefill_config(device, width, v_width, operands.keys.dtype.itemsize)
    block_group = min(operands.group, config.rows)
    head_blocks = -(-operands.group // block_group)
    block_tokens = config.rows // block_group
    # Upper bound over all ways in which the rows may fall to sequences: see find_sequence.
    blocks = num_rows // block_tokens + num_seqs if num_seqs and num_rows else 0
    launch = Launch(
        kernel=prefill_kernels.paged_prefill,
        grid=(blocks, operands.keys.shape[2] * head_blocks),
        arguments={
            "out": operands.out,
            "query": operands.query,
            "keys": operands.keys,
            "values": operands.values,
            "query_starts": operands.query_starts,
            "block_tables": operands.block_tables,
            "seq_lens": operands.seq_lens,
            "sinks": operands.sinks,
            "key_scales": operands.key_scales,
            "value_scales": operands.value_scales,
            "first_seq": operands.num_decodes,
            "num_seqs": num_seqs,
            **_shape_arguments(operands),
        },
        constants={"BLOCK_G": block_group, "ROWS": config.rows, "TILE": config.tile, **_shape_constants(operands)},
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return (launch,)


def plan_attention(operands: Operands, device: Device) -> tuple[Launch, ...]:
    """Decode rows and the others, each by the kernel made for it."""
    launches: tuple[Launch, ...] = ()
    if operands.num_decodes:
        launches += plan_decode(operands, device)
    if operands.query.shape[0] > operands.num_decodes:
        launches += plan_prefill(operands, device)
    return launches


def _shape_arguments(operands: Operands) -> dict[str, Any]:
    return {
        "scale_log2": operands.scale * LOG2E,
        "cap_log2": (operands.softcap or 1.0) * LOG2E,
        "window": operands.window,
        "stride_out_row": operands.out.stride(0),
        "stride_out_head": operands.out.stride(1),
        "stride_query_row": operands.query.stride(0),
        "stride_query_head": operands.query.stride(1),
        "stride_key_block": operands.keys.stride(0),
        "stride_key_token": operands.keys.stride(1),
        "stride_key_head": operands.keys.stride(2),
        "stride_value_block": operands.values.stride(0),
        "stride_value_token": operands.values.stride(1),
        "stride_value_head": operands.values.stride(2),
        "stride_table": operands.block_tables.stride(0),
    }


def _shape_constants(operands: Operands) -> dict[str, Any]:
    width, v_width = operands.keys.shape[3], operands.values.shape[3]
    return {
        "GROUP": operands.group,
        "D": width,
        "D_PAD": pow2(width),
        "DV": v_width,
        "DV_PAD": pow2(v_width),
        "PAGE": operands.keys.shape[1],
        "HAS_WINDOW": operands.window > 0,
        "HAS_CAP": operands.softcap > 0.0,
        "KV_FP8": operands.keys.dtype == FP8,
        # Keys and values of a token then lie at the same offset from their bases: one address serves both.
        "SAME_ROWS": operands.keys.stride()[:2] == operands.values.stride()[:2],
        # fp32 dots: tf32 would cost 3 digits.
        "PRECISION": "ieee",
    }
