"""Blocks in their own scales are the numbers of dequantised ones, bit for bit; rounding takes the nearest level."""

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize

from pagefleet_kernels import grouped
from pagefleet_kernels.cpu.linear_grouped import GroupedLinear
from pagefleet_server.models.gguf_groups import bytes_per_weight, grouped_weight
from pagefleet_server.models.round_to_groups import round_to_groups
from support.cpu_kernels import backend

HALVES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q6_K": (208,),
}
"""Where a block's float16 numbers lie."""
ROWS, BLOCKS_IN_ROW = 7, 3


def raw_blocks(name: str) -> torch.Tensor:
    """Random bytes with finite scales."""
    _, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    rng = np.random.default_rng(0)
    count = ROWS * BLOCKS_IN_ROW
    raw = rng.integers(0, 256, (count, num_bytes), dtype=np.uint8)
    for at in HALVES[name]:
        halves = (rng.standard_normal(count) * 10.0 ** rng.integers(-7, 2, count)).astype(np.float16)
        raw[:, at : at + 2] = halves.view(np.uint8).reshape(count, 2)
    return torch.from_numpy(raw)


@pytest.mark.parametrize("name", sorted(HALVES))
def test_a_tensor_keeps_its_numbers(name: str) -> None:
    kind = GGMLQuantizationType[name]
    raw = raw_blocks(name)
    weight = grouped_weight(kind.value, raw.view(-1), ROWS)
    assert weight is not None
    want = np.asarray(gguf_dequantize(raw.numpy(), kind), dtype=np.float32).reshape(ROWS, -1)
    assert np.array_equal(weight.dequantize().numpy(), want)
    assert bytes_per_weight(kind.value) == weight.num_bytes / weight.codes.numel()
    linear = grouped.pack_grouped(backend(), weight, None, dtype=torch.float32)
    assert isinstance(linear, GroupedLinear)
    # A weight a row: the linear of unit vectors is the weight, up to the order of one addition.
    got = linear(torch.eye(want.shape[1])).T.numpy()
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6 * np.abs(want).max())


def test_a_type_without_scales_is_none() -> None:
    for name in ("F16", "F32", "BF16", "Q2_K"):
        kind = GGMLQuantizationType[name].value
        assert grouped_weight(kind, torch.zeros(84, dtype=torch.uint8), 1) is None
        assert bytes_per_weight(kind) is None


@pytest.mark.parametrize(("form", "steps"), [("q8_0", 127 * 2), ("q4_1", 15)])
def test_rounding_takes_the_nearest_level(form: str, steps: int) -> None:
    weight = torch.randn(9, 96, generator=torch.Generator().manual_seed(0))
    weight[0] = 0.0
    weight[1] = 0.25
    weight[2, :32] = torch.linspace(-3.0, 5.0, 32)
    found = round_to_groups(weight.bfloat16(), form)
    assert found is not None
    groups = weight.bfloat16().float().view(9, 3, 32)
    span = groups.amax(2) - groups.amin(2) if form == "q4_1" else 2 * groups.abs().amax(2)
    # Half a step, and what the scales lose as float16.
    bound = (0.5 / steps + 2.0**-10) * span + 2.0**-10 * groups.abs().amax(2)
    error = (found.dequantize().view(9, 3, 32) - groups).abs().amax(2)
    assert bool((error <= bound).all())
    assert torch.equal(found.dequantize()[0], torch.zeros(96))


def test_a_width_without_whole_groups_is_not_rounded() -> None:
    assert round_to_groups(torch.zeros(4, 48), "q8_0") is None
