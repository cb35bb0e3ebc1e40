"""What holds for all tests. Hypothesis has no deadline: machines that test are shared, and speed is measured elsewhere.
Tests of the GPU kernels import Triton, which exists for Linux only; without it they cannot be collected."""

import importlib.util
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("house", deadline=None)
settings.load_profile("house")

collect_ignore_glob = (
    []
    if importlib.util.find_spec("triton")
    else ["unit/test_kernels_triton_*", "unit/test_benchmark_kernels_gpu.py", "property/test_kernels_triton_*"]
)


@pytest.fixture(autouse=True, scope="module")
def poisoned_outputs(request: pytest.FixtureRequest) -> Iterator[None]:
    """In tests of kernels an output is NaN before it is written: else what nobody writes may hold the last test's."""
    if "test_kernels_" not in request.module.__name__:
        yield
        return
    from support.poison import poisoned_tensors

    with poisoned_tensors():
        yield
