"""Norm and gate in Triton, interpreted on CPU, against float64; and the canary for the interpreter itself."""

import pytest
import torch

from support import triton_work as work
from support.triton_interpreter import Interpreter, interpreter, start

__all__ = ["interpreter"]

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def test_the_interpreter_is_to_be_trusted_only_as_repaired(interpreter: Interpreter) -> None:
    """Unrepaired it truncates bf16 and multiplies bit patterns: when that changes, the repair can go."""
    values = [1.9999, 1.0, -2.99, 3e38]
    want = torch.tensor(values).to(torch.bfloat16).float().tolist()
    rounded, error = interpreter.run(work.dot_of_bf16, values)
    assert rounded == want
    assert error == 0.0
    with start(repaired=False) as pool:
        rounded, error = pool.submit(work.dot_of_bf16, values).result(timeout=120)
    assert rounded != want or error != 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [16, 576, 1000])
@pytest.mark.parametrize("with_residual", [True, False])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_add_rms_norm(
    interpreter: Interpreter, dtype: torch.dtype, columns: int, with_residual: bool, offset: float
) -> None:
    generator = torch.Generator().manual_seed(columns)
    x = torch.randn(3, 2 * columns, generator=generator).to(dtype)[:, :columns]
    residual = torch.randn(3, columns, generator=generator).to(dtype) if with_residual else None
    weight = torch.randn(columns, generator=generator).to(dtype)
    out, left = interpreter.run(work.norm, x, residual, weight, 1e-5, offset)
    h = x.double() + (residual.double() if residual is not None else 0.0)
    if residual is not None and left is not None:
        torch.testing.assert_close(left.double(), h, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
        h = left.double()
    want = h / (h.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (weight.double() + offset)
    torch.testing.assert_close(out.double(), want, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [1, 1024, 1500])
def test_silu_mul(interpreter: Interpreter, dtype: torch.dtype, columns: int) -> None:
    x = (4 * torch.randn(2, 2 * columns, generator=torch.Generator().manual_seed(columns))).to(dtype)
    x[0, 0] = -200.0 if dtype == torch.float32 else -60.0  # exp overflows: the gate is 0, not NaN
    gate, up = x.double().chunk(2, dim=-1)
    want = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(
        interpreter.run(work.silu_mul, x).double(), want, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype]
    )


def test_an_output_that_nobody_writes_would_show(interpreter: Interpreter) -> None:
    assert bool(interpreter.run(torch.empty, 5).isnan().all())


def test_no_rows_are_no_work(interpreter: Interpreter) -> None:
    empty = torch.zeros(0, 32)
    assert interpreter.run(work.silu_mul, empty).shape == (0, 16)
    assert interpreter.run(work.norm, empty, None, torch.ones(32), 1e-5, 0.0)[0].shape == (0, 32)
