"""A stop string ends the text at the same place however the text is cut, and nothing more is held back than needed."""

from hypothesis import given
from hypothesis import strategies as st

from pagefleet_server.api.stop_strings import StopStrings

STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)
TEXTS = st.text("abc", max_size=30)
SIZES = st.lists(st.integers(0, 6), min_size=1, max_size=30)


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """First stop string to be complete; the longest of those complete at once."""
    for end in range(1, len(text) + 1):
        found = max((stop for stop in stops if text[:end].endswith(stop)), key=len, default=None)
        if found is not None:
            return text[: end - len(found)], found
    return text, None


def pieces_of(text: str, sizes: list[int]) -> list[str]:
    pieces, index = [], 0
    while text:
        size = sizes[index % len(sizes)] or (1 if not any(sizes) else 0)
        pieces.append(text[:size])
        text = text[size:]
        index += 1
    return pieces


@given(text=TEXTS, stops=STOPS, sizes=SIZES)
def test_the_result_does_not_depend_on_the_cuts(text: str, stops: list[str], sizes: list[int]) -> None:
    scanner, given_out, stopped = StopStrings(stops), "", None
    for piece in pieces_of(text, sizes):
        scanned = scanner.feed(piece)
        given_out += scanned.text
        if scanned.stop is not None:
            stopped = scanned.stop
            break
    else:
        given_out += scanner.flush()
    assert (given_out, stopped) == expected(text, stops)


@given(text=TEXTS, stops=STOPS)
def test_held_back_is_exactly_what_a_stop_string_could_begin_with(text: str, stops: list[str]) -> None:
    scanner, given_out = StopStrings(stops), ""
    for index, char in enumerate(text):
        scanned = scanner.feed(char)
        if scanned.stop is not None:
            return
        given_out += scanned.text
        seen = text[: index + 1]
        held = max((n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n])), default=0)
        assert given_out == seen[: len(seen) - held]


@given(text=TEXTS, stops=STOPS, sizes=SIZES)
def test_included_stop_string_stands_at_the_end(text: str, stops: list[str], sizes: list[int]) -> None:
    before, stop = expected(text, stops)
    scanner, given_out = StopStrings(stops, include_in_output=True), ""
    for piece in pieces_of(text, sizes):
        scanned = scanner.feed(piece)
        given_out += scanned.text
        if scanned.stop is not None:
            break
    else:
        given_out += scanner.flush()
    assert given_out == before + (stop or "")
