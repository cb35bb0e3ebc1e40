"""Row-wise ops and the sampler of the CPU library against float64, with strides, odd widths and threads."""

import pytest
import torch

from pagefleet_kernels.cpu.row_ops import CpuRowOps
from pagefleet_kernels.errors import KernelArgumentError
from support.cpu_kernels import LEVELS, backend

DTYPES = [torch.float32, torch.bfloat16]
IDS = ["fp32", "bf16"]


def ops(level: str = LEVELS[0], num_threads: int = 1) -> CpuRowOps:
    return backend(level, num_threads).row_ops


def normal(*size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def strided(rows: torch.Tensor) -> torch.Tensor:
    """The same values as a view into wider rows of NaN."""
    wide = torch.full((*rows.shape[:-1], rows.shape[-1] + 7), float("nan"), dtype=rows.dtype)
    wide[..., 3 : 3 + rows.shape[-1]] = rows
    return wide[..., 3 : 3 + rows.shape[-1]]


def assert_rounded_once(got: torch.Tensor, want: torch.Tensor) -> None:
    unit = 2.0**-8 if got.dtype == torch.bfloat16 else 2.0**-20
    torch.testing.assert_close(got.double(), want, atol=unit / 2, rtol=unit)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("width", [1, 15, 16, 33, 576])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_add_rms_norm_matches_float64(width: int, offset: float, dtype: torch.dtype, level: str) -> None:
    x, residual, weight = (normal(9, width, dtype=dtype, seed=seed) for seed in range(3))
    weight = weight[0]
    summed = (residual.float() + x.float()).to(dtype)
    for before, hidden in ((None, x.double()), (residual.clone(), summed.double())):
        got = ops(level).add_rms_norm(strided(x), before, weight, epsilon=1e-5, weight_offset=offset)
        scale = torch.rsqrt(hidden.pow(2).mean(1, keepdim=True) + 1e-5)
        assert_rounded_once(got, hidden * scale * (weight.double() + offset))
        if before is not None:
            assert torch.equal(before, summed)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("width", [1, 16, 45, 1536])
def test_gated_activations_match_float64(width: int, dtype: torch.dtype, level: str) -> None:
    x = normal(6, 2 * width, dtype=dtype) * 4
    gate, up = x.double().chunk(2, dim=1)
    assert_rounded_once(ops(level).gated(strided(x)), torch.nn.functional.silu(gate) * up)
    assert_rounded_once(ops(level).gated(x, "gelu_tanh"), torch.nn.functional.gelu(gate, approximate="tanh") * up)


@pytest.mark.parametrize("level", LEVELS)
def test_gated_activations_hold_at_the_ends_of_the_range(level: str) -> None:
    gates = torch.tensor([[-1e30, -200.0, -88.0, -20.0, 0.0, 20.0, 88.0, 200.0, 1e30, float("nan")]])
    got = ops(level).gated(torch.cat([gates, torch.ones(1, 10)], dim=1))
    torch.testing.assert_close(got, torch.nn.functional.silu(gates), equal_nan=True, atol=1e-30, rtol=1e-5)
    got = ops(level).gated(torch.cat([gates, torch.ones(1, 10)], dim=1), "gelu_tanh")
    want = torch.nn.functional.gelu(gates, approximate="tanh")
    torch.testing.assert_close(got, want, equal_nan=True, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_rows_do_not_depend_on_neighbours_or_threads(dtype: torch.dtype) -> None:
    x, residual, weight = normal(400, 576, dtype=dtype), normal(400, 576, dtype=dtype, seed=1), normal(576, dtype=dtype)
    logits = normal(40, 5000, dtype=dtype, seed=2)
    results = []
    for threads in (1, 2, 5):
        op, state = ops(num_threads=threads), residual.clone()
        normed = op.add_rms_norm(x, state, weight, epsilon=1e-6)
        results.append((normed, state, op.gated(x), draws(op, logits)))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    assert torch.equal(ops().add_rms_norm(x[7:8], residual[7:8].clone(), weight, epsilon=1e-6)[0], results[0][0][7])
    assert torch.equal(ops().gated(x[7:8])[0], results[0][2][7])


def draws(op: CpuRowOps, logits: torch.Tensor) -> torch.Tensor:
    rows = logits.shape[0]
    return op.sample(
        logits,
        temperature=torch.linspace(0.0, 2.0, rows),
        top_k=torch.arange(rows, dtype=torch.int32),
        top_p=torch.linspace(0.2, 1.0, rows),
        min_p=torch.zeros(rows),
        uniform=torch.linspace(0.0, 0.999, rows, dtype=torch.float64),
    )


def test_wrong_arguments_name_argument_value_and_bound() -> None:
    op, x = ops(), normal(4, 8)
    with pytest.raises(KernelArgumentError, match=r"x is of dtype torch.float16; it must be of torch.float32 or"):
        op.add_rms_norm(x.half(), None, x[0].half(), epsilon=1e-5)
    with pytest.raises(KernelArgumentError, match=r"weight is of shape \(7,\); it must be of shape \(8,\)"):
        op.add_rms_norm(x, None, x[0, :7], epsilon=1e-5)
    with pytest.raises(KernelArgumentError, match=r"residual is strided"):
        op.add_rms_norm(x, strided(x), x[0], epsilon=1e-5)
    with pytest.raises(KernelArgumentError, match=r"gate_up is of width 7"):
        op.gated(x[:, :7])
    with pytest.raises(KernelArgumentError, match=r"activation is 'relu'; it must be one of silu, gelu_tanh"):
        op.gated(x, "relu")
    with pytest.raises(KernelArgumentError, match=r"gate_up is of shape \(8,\); it must be \[T, N\]"):
        op.gated(x[0])


def test_an_output_that_nobody_writes_would_show() -> None:
    assert bool(torch.empty(5).isnan().all())
    assert bool(torch.empty_like(torch.zeros(5, dtype=torch.bfloat16)).isnan().all())


@pytest.mark.parametrize("rows", [0, 1])
def test_no_rows_and_one_row_are_fine(rows: int) -> None:
    op, x = ops(), normal(rows, 64)
    assert op.add_rms_norm(x, None, normal(64), epsilon=1e-5).shape == (rows, 64)
    assert op.gated(x).shape == (rows, 32)
    assert draws(op, x).shape == (rows,)
