"""Our block formats against the gguf package's, bit for bit, on random bytes: every bit pattern means something."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from pagefleet_server.gguf_metadata import TENSOR_BLOCKS
from pagefleet_server.models.gguf_blocks import dequantize

BLOCKS = 257
HALVES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
}
"""Where a block's float16 numbers lie."""


@pytest.mark.parametrize("name", sorted(HALVES))
def test_block_format_has_the_bits_of_the_gguf_package(name: str) -> None:
    kind = GGMLQuantizationType[name]
    elements, num_bytes = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (BLOCKS, num_bytes), dtype=np.uint8)
    for at in HALVES[name]:  # finite scales of both signs, among them subnormal ones
        halves = (rng.standard_normal(BLOCKS) * 10.0 ** rng.integers(-7, 2, BLOCKS)).astype(np.float16)
        raw[:, at : at + 2] = halves.view(np.uint8).reshape(BLOCKS, 2)
    want = np.asarray(gguf.quants.dequantize(raw, kind), dtype=np.float32).reshape(-1)
    got = dequantize(kind.value, torch.from_numpy(raw.reshape(-1)))
    assert got is not None and got.shape == (BLOCKS * elements,)
    assert np.array_equal(got.numpy().view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_plain_types_are_read_as_they_are(name: str) -> None:
    kind = GGMLQuantizationType[name]
    values = np.array([[0.0, -1.5, 3.25, 1e-3]], dtype=np.float32)
    raw = np.ascontiguousarray(gguf.quants.quantize(values, kind)).view(np.uint8).reshape(-1)
    want = np.asarray(gguf.quants.dequantize(raw.reshape(1, -1), kind), dtype=np.float32).reshape(-1)
    got = dequantize(kind.value, torch.from_numpy(raw))
    assert got is not None and np.array_equal(got.numpy(), want)


def test_unknown_type_is_said_not_guessed() -> None:
    assert dequantize(GGMLQuantizationType.IQ4_XS.value, torch.zeros(136, dtype=torch.uint8)) is None


def test_sizes_of_every_type_are_those_of_the_gguf_package() -> None:
    want = {kind.value: tuple(size) for kind, size in GGML_QUANT_SIZES.items()}
    assert {kind: size for kind, size in TENSOR_BLOCKS.items() if kind in want} == {
        kind: size for kind, size in want.items() if kind in TENSOR_BLOCKS
    }
    assert want.keys() <= TENSOR_BLOCKS.keys()
