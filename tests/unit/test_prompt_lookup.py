"""Guesses from what stood there before: found, continued, bounded, and fewer when they are wrong."""

import random
from itertools import pairwise

import pytest

from pagefleet_server.core.prompt_lookup import MAX_PAUSE, Drafter, NgramIndex, SpeculationLimits

LIMITS = SpeculationLimits(num_tokens=6, min_ngram=2, max_ngram=3, max_num_seqs=2)


def test_the_latest_place_of_the_longest_ending_is_found() -> None:
    tokens = [1, 2, 3, 9, 8, 2, 3, 7, 2, 3]
    index = NgramIndex(range(2, 4))
    index.extend(tokens)
    assert index.find(tokens) == 7  # (2, 3), which stood at 5 and 6 last
    tokens = [1, 2, 3, 9, 8, 2, 3, 7, 1, 2, 3]
    index = NgramIndex(range(2, 4))
    index.extend(tokens)
    assert index.find(tokens) == 3  # (1, 2, 3) goes before the later (2, 3)


def test_an_ending_does_not_find_itself() -> None:
    index = NgramIndex(range(1, 3))
    index.extend([1, 2, 3])
    assert index.find([1, 2, 3]) is None
    for short in ([], [1]):
        assert NgramIndex(range(1, 3)).find(short) is None


def test_growing_token_by_token_finds_what_a_search_finds() -> None:
    rng = random.Random(3)
    tokens: list[int] = []
    index = NgramIndex(range(2, 5))
    for _ in range(400):
        tokens.append(rng.randrange(4))
        index.extend(tokens)
        assert index.find(tokens) == search(tokens, range(2, 5))


def search(tokens: list[int], sizes: range) -> int | None:
    for size in reversed(sizes):
        for end in range(len(tokens) - 1, size - 1, -1):
            if size < len(tokens) and tokens[end - size : end] == tokens[-size:]:
                return end
    return None


def test_the_index_is_bounded_and_keeps_what_is_recent() -> None:
    tokens = list(range(5000))
    index = NgramIndex(range(2, 4), max_generation=100)
    for end in range(0, 5001, 50):
        index.extend(tokens[:end])
        assert len(index) <= 2 * 100 + 2 * 2
    assert index.find([*tokens, 4970, 4971]) == 4972
    assert index.find([*tokens, 70, 71]) is None


def test_a_draft_goes_on_where_the_text_went_on_then() -> None:
    assert Drafter(LIMITS).draft([5, 6, 7, 8, 9, 5, 6], room=3) == [7, 8, 9]
    assert Drafter(LIMITS).draft([5, 6, 7, 8, 9, 5, 6], room=0) == []


def test_a_loop_goes_on_in_the_draft() -> None:
    assert Drafter(LIMITS).draft([1, 2, 3, 1, 2, 3, 1, 2], room=10) == [3, 1, 2, 3, 1, 2]
    assert Drafter(LIMITS).draft([4, 4, 4], room=10) == [4] * 6


def test_right_guesses_make_longer_drafts_and_wrong_ones_shorter() -> None:
    loop = [1, 2] * 10
    drafter = Drafter(LIMITS)
    lengths = []
    for accepted in (2, 3, 4, 5, 6):
        drafted = len(drafter.draft(loop, room=10))
        lengths.append(drafted)
        drafter.observe(drafted, min(accepted, drafted))
    assert lengths == [6, 3, 6, 5, 6]
    assert (drafter.num_drafted, drafter.num_accepted) == (26, 2 + 3 + 4 + 5 + 6)


def test_wrong_guesses_make_ever_longer_pauses_up_to_a_bound() -> None:
    loop = [1, 2] * 10
    drafter = Drafter(LIMITS)
    drafts_at = []
    for step in range(200):
        if drafted := len(drafter.draft(loop, room=10)):
            drafts_at.append(step)
            drafter.observe(drafted, 0)
    pauses = [later - earlier - 1 for earlier, later in pairwise(drafts_at)]
    assert pauses[:4] == [1, 3, 7, 15]
    assert set(pauses[4:]) == {MAX_PAUSE}
    for _ in range(MAX_PAUSE + 1):
        drafted = len(drafter.draft(loop, room=10))
    assert drafted == 1
    drafter.observe(1, 1)
    assert len(drafter.draft(loop, room=10)) == 2


@pytest.mark.parametrize(
    "wrong", [{"num_tokens": 0}, {"min_ngram": 0}, {"max_num_seqs": 0}, {"min_ngram": 5, "max_ngram": 4}]
)
def test_limits_that_cannot_work_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="is"):
        SpeculationLimits(**({"num_tokens": 3} | wrong))
