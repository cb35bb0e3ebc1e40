"""The GPU benchmark in small, in the interpreting process."""

from pathlib import Path
from typing import Any

import torch

from pagefleet_kernels.batch import KVShape
from pagefleet_kernels.triton import make_backend
from pagefleet_kernels.triton.cache import FP8


def benchmark_run(path: str, *, broken: tuple[str, ...] = (), seconds: float = 1e6) -> list[str]:
    """All of the GPU benchmark on sizes that an interpreter can afford, its table at path -> what it calls failed.

    broken: methods of the backend that raise, as a kernel that does not compile on the device would.
    """
    from benchmarks.gpu_checks import CheckCase
    from benchmarks.gpu_neighbours import NeighbourSizes
    from benchmarks.gpu_works import Scale, Work
    from benchmarks.kernels_gpu import Report, run

    sequences = ((1, 5), (1, 40), (1, 0), (9, 9), (20, 50), (0, 3))
    shape = KVShape(2, 32, 16)
    small: dict[str, Any] = {"head_dim": 32, "heads": 4, "kv_heads": 2}
    scale = Scale(
        decodes=(
            Work("decode", 2, 1, 40, floor_ratio=0.5, **small),
            Work("decode fp8", 2, 1, 40, storage=FP8, **small),
        ),
        prefills=(Work("prefill", 1, 20, 20, target_tflops=1, **small), Work("chunk", 1, 5, 20, **small)),
        fp8_gains=("decode",),
        checks=(
            CheckCase("fp32", shape, 4, torch.float32, sequences=sequences),
            CheckCase("bf16, window", shape, 4, window=17, sinks=True, sequences=sequences),
            CheckCase("fp8", shape, 4, FP8, softcap=20.0, sequences=sequences),
        ),
        check_lengths=(5, 300),
        neighbours=NeighbourSizes(2, 3, 3, 3, width=64, gate_width=32, vocab=300),
        copy_bytes=1 << 16,
        matmul_width=16,
        most_buffers=2,
    )
    backend = make_backend()
    for name in broken:
        setattr(backend, name, _out_of_memory)
    report = Report(Path(path), seconds)
    run(backend, scale, report, swept=not broken)
    return report.failed


def _out_of_memory(*_: Any, **__: Any) -> None:
    raise RuntimeError("CUDA out of memory")
