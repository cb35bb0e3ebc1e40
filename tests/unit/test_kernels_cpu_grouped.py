"""Linears of weights in their own scales: exact, and the same bits for a row whatever stands beside it."""

from dataclasses import replace

import pytest
import torch

from pagefleet_kernels import grouped
from pagefleet_kernels.cpu.linear_grouped import GroupedLinear
from pagefleet_kernels.errors import KernelArgumentError
from pagefleet_kernels.grouped import GroupedWeight
from pagefleet_kernels.reference.backend import ReferenceBackend
from support.cpu_kernels import LEVELS, backend, library

DTYPES = [torch.float32, torch.bfloat16]
IDS = ["fp32", "bf16"]
PLAIN = tuple(range(16))
UNEVEN = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FORMS = {
    "q4_0": (tuple(range(-8, 8)), 32, torch.float16, False),
    "q4_1": (PLAIN, 32, torch.float16, True),
    "iq4_nl": (UNEVEN, 32, torch.float16, False),
    "q8_0": (None, 32, torch.float16, False),
    "q5_1": (None, 32, torch.float16, True),
    "q4_k": (PLAIN, 32, torch.float32, True),
    "q6_k": (None, 16, torch.float32, False),
    "q2_k": (PLAIN, 16, torch.float32, True),
}


def weight(out_features: int, in_features: int, form: str, seed: int = 0) -> GroupedWeight:
    levels, group, dtype, minimums = FORMS[form]
    generator = torch.Generator().manual_seed(seed)
    low, high = (-128, 128) if levels is None else (0, 16)
    codes = torch.randint(low, high, (out_features, in_features), generator=generator)
    shape = out_features, in_features // group
    scales = torch.randn(shape, generator=generator) * 0.02 * in_features**-0.5
    lowest = torch.randn(shape, generator=generator) * in_features**-0.5 if minimums else None
    return GroupedWeight(
        codes=codes.to(torch.int8 if levels is None else torch.uint8),
        levels=levels,
        scales=scales.to(dtype),
        minimums=None if lowest is None else lowest.to(dtype),
    )


def pack(
    level: str,
    given: GroupedWeight,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    *,
    num_threads: int = 1,
    wide: bool = False,
) -> GroupedLinear:
    linear = grouped.pack_grouped(backend(level, num_threads), given, bias, dtype=dtype, wide=wide)
    assert isinstance(linear, GroupedLinear)
    return linear


def rows(count: int, in_features: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, in_features, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 32), (15, 96), (65, 64), (200, 576), (49, 2080)])
def test_a_linear_matches_float64(
    out_features: int, in_features: int, form: str, dtype: torch.dtype, level: str
) -> None:
    library(level)
    given = weight(out_features, in_features, form)
    bias = rows(1, out_features, dtype)[0]
    x = rows(13, in_features, dtype)
    exact = x.double() @ given.dequantize().double().T
    unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-18
    plain, wide = pack(level, given, dtype), pack(level, given, dtype, bias, wide=True)
    for count in (13, 6, 5, 4, 3, 2, 1, 0):
        got = plain(x[:count])
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), exact[:count], atol=unit, rtol=unit)
        sums = wide(x[:count])
        assert sums.dtype == torch.float32
        torch.testing.assert_close(sums.double(), exact[:count] + bias.double(), atol=2.0**-17, rtol=2.0**-17)


@pytest.mark.parametrize("level", LEVELS)
def test_every_level_comes_out_exactly(level: str) -> None:
    """One element of x alone, scales of one: the sums are the levels themselves."""
    library(level)
    for form in ("iq4_nl", "q8_0"):
        levels, group, dtype, _ = FORMS[form]
        count = 16 if levels is not None else 256
        codes = torch.arange(count) - (0 if levels is not None else 128)
        given = GroupedWeight(
            codes=codes.to(torch.uint8 if levels is not None else torch.int8).unsqueeze(1).repeat(1, 64),
            levels=levels,
            scales=torch.ones(count, 64 // group, dtype=dtype),
        )
        want = given.dequantize().T
        for x_dtype in DTYPES:
            x = torch.eye(64, dtype=x_dtype)
            assert torch.equal(pack(level, given, x_dtype, wide=True)(x), want)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("form", ["q4_1", "q8_0", "q6_k"])
@pytest.mark.parametrize(("out_features", "in_features"), [(192, 576), (576, 1536), (80, 4096)])
def test_a_row_has_the_same_bits_in_any_batch_and_on_any_threads(
    out_features: int, in_features: int, form: str, dtype: torch.dtype, level: str
) -> None:
    library(level)
    given = weight(out_features, in_features, form)
    x = rows(256, in_features, dtype)
    want = pack(level, given, dtype, num_threads=1)(x)
    for threads in (1, 2):
        linear = pack(level, given, dtype, num_threads=threads)
        for count in (256, 97, 64, 16, 7, 3, 2, 1):
            for first in {0, 5, 256 - count}:
                if first + count <= 256:
                    assert torch.equal(linear(x[first : first + count].contiguous()), want[first : first + count])


@pytest.mark.parametrize("level", LEVELS)
def test_inputs_of_any_rank_and_stride_are_taken(level: str) -> None:
    library(level)
    given = weight(20, 32, "q4_1")
    linear = pack(level, given, torch.float32)
    x = torch.randn(2, 3, 32)
    want = x @ given.dequantize().T
    torch.testing.assert_close(linear(x), want)
    torch.testing.assert_close(linear(x[0, 0]), want[0, 0])
    wide = torch.full((7, 70), float("nan"))
    wide[:, 3:35] = torch.randn(7, 32)
    torch.testing.assert_close(linear(wide[:, 3:35]), wide[:, 3:35] @ given.dequantize().T)
    transposed = torch.randn(32, 6).T
    torch.testing.assert_close(linear(transposed), transposed @ given.dequantize().T)


def test_the_packed_copy_outlives_the_weight() -> None:
    given = weight(20, 32, "q4_1")
    linear = pack(LEVELS[-1], given, torch.float32)
    x = torch.randn(3, 32)
    want = x @ given.dequantize().T
    for part in (given.codes, given.scales, given.minimums):
        assert part is not None
        part.zero_()
    torch.testing.assert_close(linear(x), want)


def test_weights_of_several_forms_are_joined_without_rounding() -> None:
    for forms in (("q4_1", "q4_1"), ("q4_0", "q4_1"), ("q4_1", "q8_0", "q6_k"), ("q4_k", "q2_k"), ("q8_0", "q4_0")):
        parts = [weight(3 + index, 64, form, seed=index) for index, form in enumerate(forms)]
        joined = grouped.join(parts)
        assert torch.equal(joined.dequantize(), torch.cat([part.dequantize() for part in parts]))
    same = [weight(3, 64, "q4_1"), weight(5, 64, "q4_1")]
    assert grouped.join(same).bits == 4
    with pytest.raises(KernelArgumentError, match="of one width"):
        grouped.join([weight(3, 64, "q4_1"), weight(3, 32, "q4_1")])


def test_what_cannot_be_held_is_said() -> None:
    given = weight(4, 64, "q4_1")
    owner = backend(LEVELS[-1])
    assert grouped.pack_grouped(ReferenceBackend(), given, None, dtype=torch.float32) is None
    assert grouped.pack_grouped(owner, given, None, dtype=torch.float16) is None


def bad(**changes: object) -> GroupedWeight:
    return replace(weight(4, 64, "q4_1"), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (bad(codes=torch.zeros(4, 64, dtype=torch.int8)), "weight.codes"),
        (bad(codes=torch.full((4, 64), 16, dtype=torch.uint8)), "below 16"),
        (bad(codes=torch.zeros(0, 64, dtype=torch.uint8)), "N, K >= 1"),
        (bad(levels=(0,) * 15), "16 numbers"),
        (bad(levels=(*range(15), 128)), "-128..127"),
        (bad(scales=torch.zeros(4, 2)), "weight.minimums"),
        (bad(scales=torch.zeros(4, 2, dtype=torch.bfloat16)), "float16 or float32"),
        (bad(scales=torch.zeros(4, 1, dtype=torch.float16)), "an even group"),
        (bad(scales=torch.zeros(4, 64, dtype=torch.float16)), "an even group"),
        (bad(scales=torch.zeros(4, 3, dtype=torch.float16)), "an even group"),
        (bad(scales=torch.zeros(3, 2, dtype=torch.float16)), "weight.scales"),
        (bad(minimums=torch.zeros(4, 1, dtype=torch.float16)), "weight.minimums"),
    ],
)
def test_a_weight_that_is_none_is_refused(given: GroupedWeight, message: str) -> None:
    with pytest.raises(KernelArgumentError, match=message):
        grouped.pack_grouped(backend(LEVELS[-1]), given, None, dtype=torch.float32)


def test_a_bias_or_an_input_of_another_shape_or_dtype_is_refused() -> None:
    given = weight(4, 64, "q4_1")
    with pytest.raises(KernelArgumentError, match="bias"):
        pack(LEVELS[-1], given, torch.float32, torch.zeros(5))
    linear = pack(LEVELS[-1], given, torch.float32)
    for x in (torch.zeros(3, 63), torch.zeros(3, 64, dtype=torch.bfloat16)):
        with pytest.raises(KernelArgumentError, match=r"must be a tensor \[\.\.\., 64\] of torch\.float32"):
            linear(x)
