"""Where packed weights lie: apart from each other, on cache lines, in pieces that go when their weights go."""

from pathlib import Path

import pytest

from pagefleet_kernels.cpu.weight_memory import HUGE_PAGE, LINE, PIECE_BYTES, WeightMemory


class Advice:
    """Notes what is asked for."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []

    def __call__(self, address: int, num_bytes: int) -> None:
        self.ranges.append((address, num_bytes))


SIZES = [1, 63, 64, 65, 0, 4096, 3_000_001, PIECE_BYTES - 64, PIECE_BYTES, PIECE_BYTES + 1, 500, PIECE_BYTES // 2 + 1]


def test_weights_lie_apart_on_cache_lines_inside_advised_memory() -> None:
    advice = Advice()
    memory = WeightMemory(advice)
    taken = [memory.take(size) for size in SIZES]
    assert [len(tensor) for tensor in taken] == SIZES
    places = sorted((tensor.data_ptr(), tensor.data_ptr() + len(tensor)) for tensor in taken if len(tensor))
    for (start, end), (following, _) in zip(places, [*places[1:], (1 << 62, 0)], strict=True):
        assert start % LINE == 0
        assert end <= following
        assert any(first <= start and end <= first + size for first, size in advice.ranges)
    for number, tensor in enumerate(taken):
        assert not tensor.any()
        tensor.fill_(number)
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(taken))


def test_small_weights_share_pieces_and_a_large_one_spoils_none() -> None:
    advice = Advice()
    memory = WeightMemory(advice)
    first = memory.take(1 << 20)
    assert first.data_ptr() % HUGE_PAGE == 0
    memory.take(PIECE_BYTES * 2)
    second = memory.take(1 << 20)
    assert second.data_ptr() == first.data_ptr() + (1 << 20)
    assert len(advice.ranges) == 2


@pytest.mark.parametrize("size", [4096, PIECE_BYTES + 1])
def test_memory_goes_with_the_last_weight_in_it(size: int) -> None:
    memory = WeightMemory(lambda _address, _bytes: None)
    kept, dropped = memory.take(size), memory.take(size)
    del dropped
    kept.fill_(1)
    assert int(kept.long().sum()) == size
    for _ in range(2):
        memory.take(PIECE_BYTES - 64)  # another piece is begun
    before = _mapped_kib()
    del kept
    assert _mapped_kib() < before


def _mapped_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmSize"))
