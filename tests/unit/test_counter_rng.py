import pytest

from pagefleet_server.runner.counter_rng import Words, philox_4x32, uniform

MAX = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "want"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((MAX, MAX, MAX, MAX), (MAX, MAX), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_answers(counter: Words, key: tuple[int, int], want: Words) -> None:
    assert philox_4x32(counter, key) == want


def test_numbers_depend_on_every_bit_of_seed_and_position() -> None:
    base = uniform(1 << 40, 1 << 40)
    assert len({base, uniform((1 << 40) + 1, 1 << 40), uniform(1 << 41, 1 << 40), uniform(1 << 40, 1 << 41)}) == 4
    assert uniform(3, 5) == uniform(3, 5)
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)


def test_numbers_fill_the_unit_interval_evenly() -> None:
    numbers = [uniform(9, position) for position in range(20_000)]
    assert all(0.0 <= number < 1.0 for number in numbers)
    counts = [0] * 20
    for number in numbers:
        counts[int(number * 20)] += 1
    chi_square = sum((count - 1000) ** 2 / 1000 for count in counts)
    assert chi_square < 43.8  # 99.9 % point for 19 degrees of freedom
