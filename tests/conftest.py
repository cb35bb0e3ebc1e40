"""What cannot be collected here: tests of the GPU kernels import Triton, which exists for Linux only."""

import importlib.util

collect_ignore_glob = (
    []
    if importlib.util.find_spec("triton")
    else ["unit/test_kernels_triton_*", "unit/test_benchmark_kernels_gpu.py", "property/test_kernels_triton_*"]
)
