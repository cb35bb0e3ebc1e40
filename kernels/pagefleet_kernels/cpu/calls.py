"""What the library's functions take: src/*.h, field by field."""

import ctypes
from collections.abc import Mapping
from types import MappingProxyType

import torch

_P, _I32, _I64, _F32 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


class AttentionCall(ctypes.Structure):
    """src/attention.h, field by field."""

    _fields_ = (
        ("query", _P),
        ("out", _P),
        ("kv", _P),
        ("query_starts", _P),
        ("seq_lens", _P),
        ("block_tables", _P),
        ("sinks", _P),
        ("query_row_stride", _I64),
        ("query_head_stride", _I64),
        ("table_stride", _I64),
        ("num_rows", _I32),
        ("num_seqs", _I32),
        ("num_q_heads", _I32),
        ("num_kv_heads", _I32),
        ("head_dim", _I32),
        ("v_head_dim", _I32),
        ("num_blocks", _I32),
        ("block_size", _I32),
        ("max_blocks", _I32),
        ("window", _I32),
        ("num_threads", _I32),
        ("scale", _F32),
        ("softcap", _F32),
    )


class WriteCall(ctypes.Structure):
    """src/kv_write.h, field by field."""

    _fields_ = (
        ("key", _P),
        ("value", _P),
        ("kv", _P),
        ("slots", _P),
        ("key_row_stride", _I64),
        ("key_head_stride", _I64),
        ("value_row_stride", _I64),
        ("value_head_stride", _I64),
        ("num_tokens", _I32),
        ("num_kv_heads", _I32),
        ("head_dim", _I32),
        ("v_head_dim", _I32),
        ("num_blocks", _I32),
        ("block_size", _I32),
        ("num_threads", _I32),
    )


class LinearCall(ctypes.Structure):
    """src/linear.h, field by field."""

    _fields_ = (
        ("x", _P),
        ("out", _P),
        ("weight", _P),
        ("bias", _P),
        ("x_row_stride", _I64),
        ("num_rows", _I32),
        ("in_features", _I32),
        ("out_features", _I32),
        ("num_threads", _I32),
        ("wide_out", _I32),
    )


class GroupedLinearCall(ctypes.Structure):
    """src/grouped_layout.h, field by field."""

    _fields_ = (
        ("linear", LinearCall),
        ("group", _I32),
        ("bits", _I32),
        ("wide_scales", _I32),
        ("has_minimums", _I32),
        ("levels", ctypes.c_int8 * 16),
    )


class PackGroupedCall(ctypes.Structure):
    """src/grouped_layout.h, field by field."""

    _fields_ = (
        ("codes", _P),
        ("scales", _P),
        ("minimums", _P),
        ("packed", _P),
        ("num_outputs", _I32),
        ("in_features", _I32),
        ("group", _I32),
        ("bits", _I32),
        ("wide_scales", _I32),
        ("num_threads", _I32),
    )


class NormCall(ctypes.Structure):
    """src/elementwise.h, field by field."""

    _fields_ = (
        ("x", _P),
        ("residual", _P),
        ("weight", _P),
        ("bias", _P),
        ("out", _P),
        ("x_row_stride", _I64),
        ("num_rows", _I32),
        ("width", _I32),
        ("num_threads", _I32),
        ("centred", _I32),
        ("epsilon", _F32),
        ("weight_offset", _F32),
        ("x_scale", _F32),
    )


class RopeCall(ctypes.Structure):
    """src/rope.h, field by field."""

    _fields_ = (
        ("write", WriteCall),
        ("query", _P),
        ("turned", _P),
        ("query_norm", _P),
        ("key_norm", _P),
        ("positions", _P),
        ("table", _P),
        ("query_row_stride", _I64),
        ("query_head_stride", _I64),
        ("num_q_heads", _I32),
        ("rotary_dim", _I32),
        ("num_positions", _I32),
        ("interleaved", _I32),
        ("epsilon", _F32),
        ("norm_offset", _F32),
    )


class GateCall(ctypes.Structure):
    """src/elementwise.h, field by field."""

    _fields_ = (
        ("gate_up", _P),
        ("out", _P),
        ("row_stride", _I64),
        ("num_rows", _I32),
        ("width", _I32),
        ("activation", _I32),
        ("gated", _I32),
        ("num_threads", _I32),
    )


class Op(ctypes.Structure):
    """src/program.h, field by field."""

    _fields_ = (("call", _P), ("kind", _I32))


class SampleCall(ctypes.Structure):
    """src/sampler.h, field by field."""

    _fields_ = (
        ("logits", _P),
        ("temperature", _P),
        ("top_k", _P),
        ("top_p", _P),
        ("min_p", _P),
        ("uniform", _P),
        ("tokens", _P),
        ("row_stride", _I64),
        ("num_rows", _I32),
        ("vocabulary", _I32),
        ("num_threads", _I32),
    )


OP_KINDS: Mapping[type[ctypes.Structure], int] = MappingProxyType(
    {LinearCall: 0, NormCall: 1, RopeCall: 2, AttentionCall: 3, GateCall: 4, GroupedLinearCall: 5}
)
"""What a program is made of -> Op.kind: src/program.h."""

DTYPE_CODES: Mapping[torch.dtype, int] = MappingProxyType({torch.float32: 0, torch.bfloat16: 1})
"""What the library computes on -> its `dtype` argument."""


def _checked(call: type[ctypes.Structure]) -> tuple[object, ...]:
    return ctypes.POINTER(call), _I32, _WHERE


_WHERE = ctypes.POINTER(_I32)
SIGNATURES: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "pagefleet_attention": _checked(AttentionCall),
        "pagefleet_write_kv": _checked(WriteCall),
        "pagefleet_linear": _checked(LinearCall),
        "pagefleet_add_norm": _checked(NormCall),
        "pagefleet_rope_write_kv": _checked(RopeCall),
        "pagefleet_gate": _checked(GateCall),
        "pagefleet_sample": _checked(SampleCall),
        "pagefleet_run_program": (ctypes.POINTER(Op), _I32, _I32, _WHERE),
        "pagefleet_copy_blocks": (_P, _P, _I64, _I64, _I64, _WHERE),
        "pagefleet_grouped_linear": _checked(GroupedLinearCall),
        "pagefleet_pack_grouped": (ctypes.POINTER(PackGroupedCall), _WHERE),
        "pagefleet_pack_linear": (_P, _I64, _I32, _I32, _P, _I32, _I32, _WHERE),
    }
)
"""Functions that return a status: 0, or what they refuse, with the index where they stopped in their last argument."""
