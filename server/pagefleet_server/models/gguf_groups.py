"""ggml's block formats as the kernels multiply by them: small integers with a scale, and perhaps a minimum, a group."""

from collections.abc import Callable, Mapping

import torch

from pagefleet_kernels.grouped import GroupedWeight
from pagefleet_server.gguf_metadata import TENSOR_BLOCKS
from pagefleet_server.models.gguf_blocks import Blocks, fifth_bits, half, nibbles, parts, scales_and_minimums

_UNSIGNED, _SIGNED = tuple(range(16)), tuple(range(-8, 8))
_IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

_Groups = tuple[torch.Tensor, tuple[int, ...] | None, torch.Tensor, torch.Tensor | None]
"""Codes [B, elements of a block], levels, scales [B, groups of a block], minimums likewise: see GroupedWeight."""


def grouped_weight(kind: int, raw: torch.Tensor, rows: int) -> GroupedWeight | None:
    """raw uint8 [bytes] of a tensor of so many rows -> its numbers, not one of them rounded; None for a type that has
    no scales or is not here."""
    found = _FORMATS.get(kind)
    if found is None:
        return None
    _, block_bytes = TENSOR_BLOCKS[kind]
    codes, levels, scales, minimums = found[1](raw.view(-1, block_bytes))
    return GroupedWeight(
        codes=codes.reshape(rows, -1),
        levels=levels,
        scales=scales.reshape(rows, -1),
        minimums=None if minimums is None else minimums.reshape(rows, -1),
    )


def bytes_per_weight(kind: int) -> float | None:
    """Of such a tensor in the kernels' layout; None for a type that grouped_weight does not take."""
    found = _FORMATS.get(kind)
    return None if found is None else found[0]


def _stored(b: Blocks, at: int) -> torch.Tensor:
    """[B, 1]: the float16 at byte `at`, as it is."""
    return b[:, at : at + 2].contiguous().view(torch.float16)


def _q4_0(b: Blocks) -> _Groups:
    return nibbles(b[:, 2:]), _SIGNED, _stored(b, 0), None


def _q4_1(b: Blocks) -> _Groups:
    return nibbles(b[:, 4:]), _UNSIGNED, _stored(b, 0), _stored(b, 2)


def _iq4_nl(b: Blocks) -> _Groups:
    return nibbles(b[:, 2:]), _IQ4_NL, _stored(b, 0), None


def _five_bits(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    return (nibbles(low).reshape(len(low), 32) | (fifth_bits(high) << 4)).to(torch.int8)


def _q5_0(b: Blocks) -> _Groups:
    return _five_bits(b[:, 6:], b[:, 2:6]) - 16, None, _stored(b, 0), None


def _q5_1(b: Blocks) -> _Groups:
    return _five_bits(b[:, 8:], b[:, 4:8]), None, _stored(b, 0), _stored(b, 2)


def _q8_0(b: Blocks) -> _Groups:
    return b[:, 2:].contiguous().view(torch.int8), None, _stored(b, 0), None


def _k_scales(b: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    """Of Q4_K and Q5_K [B, 8]: products of 11 and 6 bits, which float32 holds exactly."""
    scale, minimum = scales_and_minimums(b[:, 4:16])
    return half(b, 0) * scale.squeeze(2), -(half(b, 2) * minimum.squeeze(2))


def _q4_k(b: Blocks) -> _Groups:
    return parts(b[:, 16:144], 32, 4), _UNSIGNED, *_k_scales(b)


def _q5_k(b: Blocks) -> _Groups:
    low = parts(b[:, 48:176], 32, 4).reshape(len(b), 8, 32)
    high = parts(b[:, 16:48], 32, 1).reshape(len(b), 8, 32)
    return (low | (high << 4)).to(torch.int8), None, *_k_scales(b)


def _q6_k(b: Blocks) -> _Groups:
    low = parts(b[:, :128], 64, 4).reshape(len(b), 8, 32)
    high = parts(b[:, 128:192], 32, 2).reshape(len(b), 8, 32)
    scales = half(b, 208) * b[:, 192:208].contiguous().view(torch.int8).to(torch.float32)
    return (low | (high << 4)).to(torch.int8) - 32, None, scales, None


_FORMATS: Mapping[int, tuple[float, Callable[[Blocks], _Groups]]] = {
    2: (0.5 + 2 / 32, _q4_0),
    3: (0.5 + 4 / 32, _q4_1),
    6: (1.0 + 2 / 32, _q5_0),
    7: (1.0 + 4 / 32, _q5_1),
    8: (1.0 + 2 / 32, _q8_0),
    12: (0.5 + 8 / 32, _q4_k),
    13: (1.0 + 8 / 32, _q5_k),
    14: (1.0 + 4 / 16, _q6_k),
    20: (0.5 + 2 / 32, _iq4_nl),
}
"""ggml type -> bytes of a weight in the kernels' layout, its part of scale and minimum included; and its format."""
