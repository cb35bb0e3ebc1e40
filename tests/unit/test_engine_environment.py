"""How torch's OpenMP threads wait in the engine: briefly, unless the user said otherwise."""

import pytest

from pagefleet_server.client.engine_process import OPENMP_SPINS, engine_environment


def test_openmp_threads_spin_briefly() -> None:
    assert engine_environment({"HOME": "/h"}) == {"HOME": "/h", "GOMP_SPINCOUNT": str(OPENMP_SPINS)}


@pytest.mark.parametrize("said", [{"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "ACTIVE"}])
def test_what_the_user_says_stands(said: dict[str, str]) -> None:
    assert engine_environment(said) == said
