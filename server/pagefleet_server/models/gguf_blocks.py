"""ggml's block formats, back to float32 with torch: whole tensors at once, on all threads.

Formats: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h; every result has the bits of the gguf package's
own dequantisation.
"""

from collections.abc import Callable, Mapping

import torch

Blocks = torch.Tensor
"""uint8 [N, bytes of a block]."""
Values = torch.Tensor
"""float32 [N, elements of a block]."""


def dequantize(kind: int, raw: torch.Tensor) -> torch.Tensor | None:
    """raw uint8 [bytes] of whole blocks of a ggml type -> float32 [elements]; None for a type that is not here."""
    plain = _PLAIN.get(kind)
    if plain is not None:
        return raw.view(plain).to(torch.float32)
    found = _FORMATS.get(kind)
    if found is None:
        return None
    num_bytes, unpack = found
    return unpack(raw.view(-1, num_bytes)).reshape(-1)


def half(blocks: Blocks, at: int) -> torch.Tensor:
    """[N, 1]: the float16 at byte `at`."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).to(torch.float32)


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [N, ..., B] -> [N, ..., 2, B]: low halves, then high ones."""
    return torch.stack((packed & 0x0F, packed >> 4), dim=-2)


def parts(packed: torch.Tensor, width: int, bits: int) -> torch.Tensor:
    """uint8 [N, B] -> [N, B / width, 8 / bits, width]: every `bits` bits of each group of bytes, the lowest first."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).view(1, 1, -1, 1)
    found: torch.Tensor = (packed.reshape(len(packed), -1, 1, width) >> shifts) & (2**bits - 1)
    return found


def _q4_0(b: Blocks) -> Values:
    quants = nibbles(b[:, 2:]).reshape(len(b), 32).to(torch.int8) - 8
    return half(b, 0) * quants.to(torch.float32)


def _q4_1(b: Blocks) -> Values:
    return half(b, 0) * nibbles(b[:, 4:]).reshape(len(b), 32).to(torch.float32) + half(b, 2)


def fifth_bits(high: torch.Tensor) -> torch.Tensor:
    """uint8 [N, 4] -> [N, 32]: bit i of the little-endian number is element i's."""
    return parts(high, 1, 1).reshape(len(high), 32)


def _q5_0(b: Blocks) -> Values:
    quants = nibbles(b[:, 6:]).reshape(len(b), 32) | (fifth_bits(b[:, 2:6]) << 4)
    return half(b, 0) * (quants.to(torch.int8) - 16).to(torch.float32)


def _q5_1(b: Blocks) -> Values:
    quants = nibbles(b[:, 8:]).reshape(len(b), 32) | (fifth_bits(b[:, 4:8]) << 4)
    return half(b, 0) * quants.to(torch.float32) + half(b, 2)


def _q8_0(b: Blocks) -> Values:
    return half(b, 0) * b[:, 2:].contiguous().view(torch.int8).to(torch.float32)


def _q2_k(b: Blocks) -> Values:
    """16 groups of 16: a 4-bit scale and a 4-bit minimum each."""
    scales = b[:, :16]
    scale = half(b, 80) * (scales & 0x0F).to(torch.float32)
    minimum = half(b, 82) * (scales >> 4).to(torch.float32)
    quants = parts(b[:, 16:80], 32, 2).reshape(len(b), 16, 16).to(torch.float32)
    return scale.unsqueeze(2) * quants - minimum.unsqueeze(2)


def _q3_k(b: Blocks) -> Values:
    """16 groups of 16: a signed 6-bit scale each; the third bits lie apart, inverted."""
    low = nibbles(b[:, 96:104]).reshape(len(b), 16)
    high = parts(b[:, 104:108], 4, 2).reshape(len(b), 16)
    scale = half(b, 108) * ((low | (high << 4)).to(torch.int8) - 32).to(torch.float32)
    quants = parts(b[:, 32:96], 32, 2).reshape(len(b), 16, 16).to(torch.int8)
    missing = (parts(b[:, :32], 32, 1).reshape(len(b), 16, 16) ^ 1).to(torch.int8)
    return scale.unsqueeze(2) * (quants - (missing << 2)).to(torch.float32)


def scales_and_minimums(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 [N, 12] -> float32 [N, 8, 1] twice: 6 bits each."""
    first, second, rest = packed.reshape(-1, 3, 4).unbind(1)
    scale = torch.cat((first & 0x3F, (rest & 0x0F) | ((first >> 2) & 0x30)), dim=1)
    minimum = torch.cat((second & 0x3F, (rest >> 4) | ((second >> 2) & 0x30)), dim=1)
    return scale.to(torch.float32).unsqueeze(2), minimum.to(torch.float32).unsqueeze(2)


def _k_groups(b: Blocks, quants: torch.Tensor) -> Values:
    """Q4_K and Q5_K: 8 groups of 32 with scale and minimum."""
    scale, minimum = scales_and_minimums(b[:, 4:16])
    return (half(b, 0).unsqueeze(2) * scale) * quants.to(torch.float32) - half(b, 2).unsqueeze(2) * minimum


def _q4_k(b: Blocks) -> Values:
    return _k_groups(b, parts(b[:, 16:144], 32, 4).reshape(len(b), 8, 32))


def _q5_k(b: Blocks) -> Values:
    low = parts(b[:, 48:176], 32, 4).reshape(len(b), 8, 32)
    high = parts(b[:, 16:48], 32, 1).reshape(len(b), 8, 32)
    return _k_groups(b, low | (high << 4))


def _q6_k(b: Blocks) -> Values:
    """16 groups of 16: a signed 8-bit scale each."""
    low = parts(b[:, :128], 64, 4).reshape(len(b), 8, 32)
    high = parts(b[:, 128:192], 32, 2).reshape(len(b), 8, 32)
    quants = ((low | (high << 4)).to(torch.int8) - 32).reshape(len(b), 16, 16)
    scale = half(b, 208) * b[:, 192:208].contiguous().view(torch.int8).to(torch.float32)
    return scale.unsqueeze(2) * quants.to(torch.float32)


_PLAIN: Mapping[int, torch.dtype] = {0: torch.float32, 1: torch.float16, 28: torch.float64, 30: torch.bfloat16}
"""ggml type -> dtype, for types without blocks."""
_FORMATS: Mapping[int, tuple[int, Callable[[Blocks], Values]]] = {
    2: (18, _q4_0),
    3: (20, _q4_1),
    6: (22, _q5_0),
    7: (24, _q5_1),
    8: (34, _q8_0),
    10: (84, _q2_k),
    11: (110, _q3_k),
    12: (144, _q4_k),
    13: (176, _q5_k),
    14: (210, _q6_k),
}
"""ggml type -> bytes of a block, and its format."""
