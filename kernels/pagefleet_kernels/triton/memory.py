"""Planning KV writes and block copies."""

from dataclasses import dataclass
from typing import Any

import torch

from pagefleet_kernels.triton.configs import pow2
from pagefleet_kernels.triton.kernels import kv as kv_kernels
from pagefleet_kernels.triton.launch import Launch

COPY_WORDS = 2048
"""8-byte words of one copy program: 16 KiB."""
TILE_ELEMENTS = 2048
"""Elements that one program of a write holds, about."""


@dataclass(frozen=True, slots=True)
class KVTarget:
    """Where rows go."""

    keys: torch.Tensor
    """[blocks, block_size, Hkv, D]."""
    values: torch.Tensor
    """[blocks, block_size, Hkv, Dv]."""
    key_scales: torch.Tensor | None
    value_scales: torch.Tensor | None
    slot_mapping: torch.Tensor
    """int64 [T]."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """How query and key rows are turned before they are used."""

    positions: torch.Tensor
    """int64 [T]: rows of cos_sin."""
    cos_sin: torch.Tensor
    """fp32 [positions, R], cosines then sines of R / 2 angles; R even, <= D, 0 turns nothing; columns >= R
    pass through."""
    interleaved: bool
    """Pairs are (2 i, 2 i + 1), as in GPT-J, instead of (i, i + R / 2)."""
    query_norm: torch.Tensor | None
    """[D]: RMS norm of each query head first (Qwen3). None: none."""
    key_norm: torch.Tensor | None
    epsilon: float
    norm_offset: float = 0.0
    """Added to the norms' weights (Gemma's are stored less 1)."""


def plan_write(target: KVTarget, key: torch.Tensor, value: torch.Tensor) -> Launch:
    """key [T, Hkv, D], value [T, Hkv, Dv] -> their slots."""
    heads, width, v_width = target.keys.shape[2], target.keys.shape[3], target.values.shape[3]
    block_heads = _heads_per_program(heads, max(width, v_width))
    return Launch(
        kernel=kv_kernels.write_kv,
        grid=(key.shape[0], -(-heads // block_heads)),
        arguments={
            "keys": target.keys,
            "values": target.values,
            "key": key,
            "value": value,
            "slot_mapping": target.slot_mapping,
            "key_scales": target.key_scales,
            "value_scales": target.value_scales,
            **_target_strides(target),
            **_row_strides(key, value),
        },
        constants={
            "HEADS": heads,
            "BLOCK_H": block_heads,
            "D": width,
            "D_PAD": pow2(width),
            "DV": v_width,
            "DV_PAD": pow2(v_width),
            "PAGE": target.keys.shape[1],
        },
        num_warps=4,
        num_stages=1,
    )


def plan_rope_write(
    target: KVTarget,
    rotation: Rotation,
    query_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> Launch:
    """query [T, Hq, D] -> query_out, turned; key, turned, and value -> their slots."""
    heads, width, v_width = target.keys.shape[2], target.keys.shape[3], target.values.shape[3]
    query_heads, rotary = query.shape[1], rotation.cos_sin.shape[1]
    block_heads = _heads_per_program(max(heads, query_heads), max(width, v_width))
    blocks = -(-query_heads // block_heads) + 2 * -(-heads // block_heads)
    return Launch(
        kernel=kv_kernels.rope_write_kv,
        grid=(query.shape[0], blocks),
        arguments={
            "query_out": query_out,
            "query": query,
            "key": key,
            "value": value,
            "keys": target.keys,
            "values": target.values,
            "positions": rotation.positions,
            "cos_sin": rotation.cos_sin,
            "slot_mapping": target.slot_mapping,
            "query_norm": rotation.query_norm,
            "key_norm": rotation.key_norm,
            "key_scales": target.key_scales,
            "value_scales": target.value_scales,
            "num_positions": rotation.cos_sin.shape[0],
            "norm_offset": rotation.norm_offset,
            "eps": rotation.epsilon,
            "stride_out_row": query_out.stride(0),
            "stride_out_head": query_out.stride(1),
            "stride_query_row": query.stride(0),
            "stride_query_head": query.stride(1),
            **_row_strides(key, value),
            **_target_strides(target),
        },
        constants={
            "QUERY_HEADS": query_heads,
            "HEADS": heads,
            "BLOCK_H": block_heads,
            "D": width,
            "ROTARY": rotary,
            "HALF_PAD": pow2(rotary // 2),
            "REST_PAD": pow2(max(1, width - rotary)),
            "DV": v_width,
            "DV_PAD": pow2(v_width),
            "PAGE": target.keys.shape[1],
            "INTERLEAVED": rotation.interleaved,
        },
        num_warps=4,
        num_stages=1,
    )


def plan_copy(memory: torch.Tensor, pairs: torch.Tensor) -> Launch:
    """memory [blocks, row], rows a multiple of 8 bytes; pairs int64 [N, 2] on its device."""
    words = memory.view(torch.uint8).view(torch.int64)
    return Launch(
        kernel=kv_kernels.copy_blocks,
        grid=(pairs.shape[0], -(-words.shape[1] // COPY_WORDS)),
        arguments={"memory": words, "pairs": pairs, "block_words": words.shape[1], "stride_block": words.stride(0)},
        constants={"WORDS": COPY_WORDS},
        num_warps=4,
        num_stages=1,
    )


def _heads_per_program(heads: int, width: int) -> int:
    return max(1, min(pow2(heads, 1), TILE_ELEMENTS // pow2(width)))


def _target_strides(target: KVTarget) -> dict[str, Any]:
    return {
        "stride_key_block": target.keys.stride(0),
        "stride_key_token": target.keys.stride(1),
        "stride_key_head": target.keys.stride(2),
        "stride_value_block": target.values.stride(0),
        "stride_value_token": target.values.stride(1),
        "stride_value_head": target.values.stride(2),
    }


def _row_strides(key: torch.Tensor, value: torch.Tensor) -> dict[str, Any]:
    return {
        "stride_new_key_row": key.stride(0),
        "stride_new_key_head": key.stride(1),
        "stride_new_value_row": value.stride(0),
        "stride_new_value_head": value.stride(1),
    }
