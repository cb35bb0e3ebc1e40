"""KV in another dtype than the model's: what the ops take, and what a server that cannot hold it says."""

from pathlib import Path

import pytest
import torch

from pagefleet_kernels import ops
from pagefleet_kernels.batch import KVShape
from pagefleet_kernels.checks import check_row_dtype
from pagefleet_kernels.dispatch import select_backend
from pagefleet_kernels.errors import BackendUnavailable, KernelArgumentError
from pagefleet_server.model_errors import ModelError
from pagefleet_server.runner.kv_memory import kv_dtype
from pagefleet_server.runner.runner import build_runner
from pagefleet_server.settings import CacheSettings, EngineSettings, ModelSettings
from support.stepping import quiet
from support.tiny_models import write_tiny_llama

FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("rows", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_any_float_dtype_go_into_a_quantised_cache(rows: torch.dtype) -> None:
    tensor = torch.zeros(1, dtype=rows)
    assert check_row_dtype("key", tensor, FP8) == rows
    assert check_row_dtype("key", tensor, torch.bfloat16) == torch.bfloat16


@pytest.mark.parametrize("rows", [torch.float64, torch.int8, FP8])
def test_other_rows_are_refused(rows: torch.dtype) -> None:
    with pytest.raises(KernelArgumentError, match=r"key is of dtype .* for a cache of torch.float8_e4m3fn"):
        check_row_dtype("key", torch.zeros(1).to(rows), FP8)


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_backends_that_cannot_say_so(name: str) -> None:
    backend = select_backend(torch.device("cpu"), name)
    with pytest.raises(BackendUnavailable, match="float8_e4m3fn"):
        ops.bytes_per_block(backend, KVShape(2, 16, 16), block_size=16, dtype=FP8)
    with pytest.raises(BackendUnavailable, match="float8_e4m3fn"):
        ops.allocate(backend, KVShape(2, 16, 16), num_blocks=3, block_size=16, dtype=FP8, device=torch.device("cpu"))


def test_the_settings_values() -> None:
    assert kv_dtype("auto", torch.bfloat16) == torch.bfloat16
    assert kv_dtype("fp8", torch.bfloat16) == kv_dtype("fp8_e4m3", torch.float32) == FP8
    with pytest.raises(ModelError, match="--kv-cache-dtype 'fp8_e5m2': expected one of auto, fp8, fp8_e4m3"):
        kv_dtype("fp8_e5m2", torch.bfloat16)


@pytest.mark.parametrize("executor", ["fused", "transformers"])
def test_a_server_on_a_cpu_refuses_at_the_start(tmp_path: Path, executor: str) -> None:
    settings = EngineSettings(
        model=ModelSettings(model=str(write_tiny_llama(tmp_path)), device="cpu", threads=1, executor=executor),
        cache=CacheSettings(num_kv_blocks=8, kv_cache_dtype="fp8"),
    )
    with pytest.raises(ModelError, match=r"--kv-cache-dtype: no KV in float8_e4m3fn with the cpu backend on cpu: the"):
        build_runner(settings, quiet)
