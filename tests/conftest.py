"""What holds for all tests. Hypothesis has no deadline: machines that test are shared, and speed is measured elsewhere.
Tests of the GPU kernels import Triton, which exists for Linux only; without it they cannot be collected."""

import importlib.util

from hypothesis import settings

settings.register_profile("house", deadline=None)
settings.load_profile("house")

collect_ignore_glob = (
    []
    if importlib.util.find_spec("triton")
    else ["unit/test_kernels_triton_*", "unit/test_benchmark_kernels_gpu.py", "property/test_kernels_triton_*"]
)
