"""Packed linears: right, and the same bits for a row whatever stands beside it and however many threads there are."""

import logging

import pytest
import torch

from pagefleet_kernels import ops
from pagefleet_kernels.backend import LinearPacker
from pagefleet_kernels.cpu import backend as backend_module
from pagefleet_kernels.cpu.backend import CpuBackend
from pagefleet_kernels.cpu.linear import PackedLinear
from pagefleet_kernels.cpu.onednn import OneDnnLinear, OneDnnPacker, probe
from pagefleet_kernels.errors import KernelArgumentError
from support.cpu_kernels import LEVELS, backend, library, torch_threads

DTYPES = [torch.float32, torch.bfloat16]
IDS = ["fp32", "bf16"]


def weights(
    out_features: int, in_features: int, dtype: torch.dtype, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out_features, in_features, generator=generator) * in_features**-0.5
    return weight.to(dtype), torch.randn(out_features, generator=generator).to(dtype)


def pack(
    kind: str, weight: torch.Tensor, bias: torch.Tensor | None = None, *, num_threads: int = 1
) -> PackedLinear | OneDnnLinear:
    if kind == "onednn":
        linear = OneDnnPacker().pack(weight, bias)
        if linear is None:
            pytest.skip(f"oneDNN takes no {weight.dtype} on this CPU")
        return linear
    own = PackedLinear.pack(backend(kind).library, weight, bias, lambda: num_threads)
    assert own is not None
    return own


KINDS = [*LEVELS, "onednn"]


def test_a_long_sum_in_float32_is_as_good_as_torchs() -> None:
    """One accumulator over a long K drifts: it is cut into chunks."""
    weight, _ = weights(64, 8192, torch.float32)
    x = torch.randn(16, 8192, generator=torch.Generator().manual_seed(1))
    want = x.double() @ weight.double().T
    own = (pack(LEVELS[-1], weight)(x).double() - want).pow(2).mean().sqrt()
    torchs = (torch.nn.functional.linear(x, weight).double() - want).pow(2).mean().sqrt()
    assert own < 2.0 * torchs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("out_features", "in_features"),
    [(1, 2), (15, 16), (16, 30), (64, 64), (65, 130), (127, 576), (200, 1536), (49, 2050)],
)
def test_a_packed_linear_matches_float64(
    out_features: int, in_features: int, with_bias: bool, dtype: torch.dtype, kind: str
) -> None:
    weight, bias = weights(out_features, in_features, dtype)
    linear = pack(kind, weight, bias if with_bias else None)
    x = torch.randn(13, in_features, generator=torch.Generator().manual_seed(1)).to(dtype)
    want = x.double() @ weight.double().T + (bias.double() if with_bias else 0.0)
    unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-18
    for rows in (13, 6, 5, 4, 3, 2, 1, 0):
        got = linear(x[:rows])
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want[:rows], atol=unit, rtol=unit)


def assert_rows_do_not_depend_on_neighbours(
    linear: PackedLinear | OneDnnLinear, x: torch.Tensor, counts: list[int]
) -> None:
    want = linear(x)
    for count in counts:
        for first in {0, 5, x.shape[0] - count}:
            if 0 <= first <= x.shape[0] - count:
                assert torch.equal(linear(x[first : first + count].contiguous()), want[first : first + count])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("out_features", [49, 128])
def test_a_wide_result_is_the_sum_before_it_is_rounded(out_features: int, level: str) -> None:
    """Logits: in bf16 many of them are equal, and greedy then takes the wrong one."""
    weight, bias = weights(out_features, 576, torch.bfloat16)
    built = library(level)
    wide = PackedLinear.pack(built, weight, bias, lambda: 1, out_dtype=torch.float32)
    narrow = PackedLinear.pack(built, weight, bias, lambda: 1)
    assert wide is not None
    assert narrow is not None
    x = torch.randn(13, 576, generator=torch.Generator().manual_seed(1)).bfloat16()
    for rows in (13, 5, 1, 0):
        got = wide(x[:rows])
        assert got.dtype == torch.float32
        want = x[:rows].double() @ weight.double().T + bias.double()
        torch.testing.assert_close(got.double(), want, rtol=2.0**-16, atol=2.0**-16)
        assert torch.equal(got.bfloat16(), narrow(x[:rows]))
    assert PackedLinear.pack(built, weight, bias, lambda: 1, out_dtype=torch.float64) is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize(
    ("out_features", "in_features"), [(192, 576), (576, 1536), (96, 2048), (320, 3072), (64, 4096), (80, 8192)]
)
def test_a_row_has_the_same_bits_in_any_batch_and_on_any_threads(
    out_features: int, in_features: int, dtype: torch.dtype, kind: str
) -> None:
    weight, bias = weights(out_features, in_features, dtype)
    x = torch.randn(256, in_features, generator=torch.Generator().manual_seed(1)).to(dtype)
    results = []
    for threads in (1, 2):
        with torch_threads(threads):
            linear = pack(kind, weight, bias, num_threads=threads)
            assert_rows_do_not_depend_on_neighbours(linear, x, [1, 2, 3, 7, 16, 64])
            results.append(linear(x))
    assert torch.equal(results[0], results[1])


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize(
    ("out_features", "in_features"),
    [(960, 576), (3072, 576), (576, 1536), (2048, 2048), (512, 2560), (1024, 4096), (384, 5120), (256, 8192)],
)
def test_a_row_has_the_same_bits_among_thousands(
    out_features: int, in_features: int, dtype: torch.dtype, kind: str
) -> None:
    weight, _ = weights(out_features, in_features, dtype)
    x = torch.randn(2048, in_features, generator=torch.Generator().manual_seed(1)).to(dtype)
    for threads in (1, 2):
        with torch_threads(threads):
            linear = pack(kind, weight, num_threads=threads)
            counts = [1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 33, 64, 100, 128, 200, 256, 500, 777, 1024]
            assert_rows_do_not_depend_on_neighbours(linear, x, counts)


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_of_any_rank_and_stride_are_taken(kind: str) -> None:
    weight, bias = weights(20, 32, torch.float32)
    linear = pack(kind, weight, bias)
    x = torch.randn(2, 3, 4, 32)
    want = torch.nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(linear(x), want)
    torch.testing.assert_close(linear(x[0, 0, 0]), want[0, 0, 0])
    wide = torch.full((7, 70), float("nan"))
    wide[:, 3:35] = torch.randn(7, 32)
    torch.testing.assert_close(linear(wide[:, 3:35]), torch.nn.functional.linear(wide[:, 3:35], weight, bias))
    transposed = torch.randn(32, 6).T
    torch.testing.assert_close(linear(transposed), torch.nn.functional.linear(transposed, weight, bias))
    assert linear(x[:0]).shape == (0, 3, 4, 20)


def test_the_packed_copy_outlives_the_weight() -> None:
    weight, bias = weights(20, 32, torch.float32)
    linear = pack(LEVELS[-1], weight, bias)
    x = torch.randn(3, 32)
    want = torch.nn.functional.linear(x, weight, bias)
    weight.fill_(float("nan"))
    bias.fill_(float("nan"))
    torch.testing.assert_close(linear(x), want)


def test_a_transposed_weight_and_a_view_of_one_are_packed_as_they_read() -> None:
    x = torch.randn(3, 32)
    for weight in (torch.randn(32, 20).T, torch.randn(50, 40)[10:30, 4:36]):
        torch.testing.assert_close(pack(LEVELS[-1], weight)(x), torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize(
    "x",
    [None, torch.tensor(1.0), torch.zeros(2, 16).to_sparse(), torch._neg_view(torch.zeros(2, 16))],
    ids=["none", "one number", "sparse", "negated"],
)
def test_what_is_no_plain_row_of_numbers_is_refused(x: torch.Tensor) -> None:
    with pytest.raises(KernelArgumentError, match=r"x is .*; it must be (a tensor|dense)"):
        pack(LEVELS[-1], weights(16, 16, torch.float32)[0])(x)


@pytest.mark.parametrize("bad", [torch.zeros(3, 31), torch.zeros(3, 32, dtype=torch.bfloat16)])
def test_an_input_of_another_width_or_dtype_is_refused(bad: torch.Tensor) -> None:
    linear = pack(LEVELS[-1], weights(20, 32, torch.float32)[0])
    with pytest.raises(KernelArgumentError, match=r"must be a tensor \[\.\.\., 32\] of torch\.float32"):
        linear(bad)


def test_the_backend_packs_what_it_can_and_says_when_it_cannot() -> None:
    owner = backend()
    assert isinstance(owner, LinearPacker)
    assert ops.pack_linear(owner, torch.randn(8, 8), None) is not None
    assert ops.pack_linear(owner, torch.randn(8, 8).to(torch.float64), None) is None
    assert owner.pack_linear(torch.randn(8, 8), None, out_dtype=torch.bfloat16) is None
    odd = ops.pack_linear(owner, torch.randn(8, 7), None)
    assert isinstance(odd, PackedLinear)


def test_on_amx_bf16_goes_to_onednn_unless_sums_are_wanted_unrounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "cpu_flags", lambda: frozenset({"amx_bf16"}))
    owner = CpuBackend(library(LEVELS[-1]))
    weight = torch.randn(64, 64)
    assert isinstance(owner.pack_linear(weight, None), PackedLinear)
    if OneDnnPacker().pack(weight.to(torch.bfloat16), None) is not None:
        assert isinstance(owner.pack_linear(weight.to(torch.bfloat16), None), OneDnnLinear)
    wide = owner.pack_linear(weight.to(torch.bfloat16), None, out_dtype=torch.float32)
    assert isinstance(wide, PackedLinear)


class UnevenLinear:
    """Gives other bits below `safe` rows, as oneDNN does for some shapes."""

    def __init__(self, safe: int) -> None:
        self.safe = safe

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] >= self.safe else x * 2.0001


@pytest.mark.parametrize(("safe", "want"), [(1, 2), (2, 2), (3, 3), (6, 7), (17, 33), (34, 65)])
def test_the_probe_finds_the_smallest_safe_row_count(safe: int, want: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert probe(UnevenLinear(safe), 8, torch.float32) == want
    assert bool(caplog.records) == (want > 2)


def test_a_single_row_is_never_left_to_onednn_alone() -> None:
    """oneDNN gave a single bf16 row (K = 1536) another bit in one output of thousands; a probe did not see it."""
    for dtype in DTYPES:
        linear = pack("onednn", weights(64, 64, dtype)[0])
        assert isinstance(linear, OneDnnLinear)
        assert linear.min_rows >= 2


def test_the_probe_learns_nothing_from_a_weight_of_zeros() -> None:
    packer = OneDnnPacker()
    linear = packer.pack(torch.zeros(8, 8), None)
    assert linear is not None
    assert not packer._min_rows
    assert packer.pack(torch.randn(8, 8), None) is not None
    assert list(packer._min_rows) == [(8, 8, torch.float32, torch.get_num_threads())]
