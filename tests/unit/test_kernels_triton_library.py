"""The ops as torch sees them: registered, described truthfully, compilable; and when there is no backend at all."""

import os
import subprocess
import sys

import pytest
import torch

from pagefleet_kernels.batch import KVShape
from pagefleet_kernels.dispatch import select_backend
from pagefleet_kernels.errors import BackendUnavailable
from pagefleet_kernels.triton import make_backend
from support import triton_library_work as work
from support.triton_interpreter import Interpreter, interpreter

__all__ = ["interpreter"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_says_why_it_is_not_available() -> None:
    with pytest.raises(BackendUnavailable, match="no CUDA device"):
        make_backend()
    with pytest.raises(BackendUnavailable, match="no CUDA device"):
        select_backend(torch.device("cpu"), "triton")


def test_importing_the_package_does_not_import_triton() -> None:
    """A CPU server imports the package to ask whether it can run; that must not cost a second."""
    code = "import sys, pagefleet_kernels.triton; print('triton' in sys.modules)"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "False"


def test_a_step_compiles_into_one_graph(interpreter: Interpreter) -> None:
    """fullgraph=True raises on any break; the cache is written through the graph."""
    eager, compiled = interpreter.run(work.compiled_step, torch.float32)
    torch.testing.assert_close(eager, compiled, rtol=1e-6, atol=1e-6)


OPS = ["paged_attention", "write_kv", "rope_write_kv", "copy_blocks", "rms_norm", "add_rms_norm", "silu_mul", "sample"]


@pytest.mark.parametrize("op", OPS)
def test_registrations_tell_the_truth(interpreter: Interpreter, op: str) -> None:
    """torch's own checks: what a schema says is mutated and aliased, shapes from fake tensors."""
    results = interpreter.run(work.opcheck, op)
    assert set(results.values()) == {"SUCCESS"}


def test_fp64_memory_is_refused(interpreter: Interpreter) -> None:
    message = interpreter.run(work.refusal_of_dtype, torch.float64)
    assert "dtype is torch.float64" in message
    assert "torch.bfloat16" in message


def test_foreign_memory_is_refused(interpreter: Interpreter) -> None:
    message = interpreter.run(work.refusal_of_foreign_cache)
    assert "cache is a ReferenceCache" in message


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [KVShape(8, 128, 128), KVShape(1, 17, 5)], ids=str)
def test_bytes_per_block_is_what_is_allocated(interpreter: Interpreter, dtype: torch.dtype, shape: KVShape) -> None:
    said, held = interpreter.run(work.block_bytes, dtype, shape)
    assert said * 3 == held
    assert said % 16 == 0
