"""One choice's output: stop strings, stop tokens, minimum lengths, and what is counted."""

from typing import Any

from pagefleet_server.api.byte_detokenizer import ByteDetokenizer
from pagefleet_server.api.detokenizer import Detokenizer
from pagefleet_server.api.output_text import Delta, OutputText, TextRules

EOS = 0
TOKENS = ["</s>", "a", "b", "c", "ab", "c!"]


def decode(token_ids: list[int]) -> str:
    return "".join(TOKENS[i] for i in token_ids)


def output(**rules: Any) -> OutputText:
    return OutputText(Detokenizer(decode, [1, 2]), TextRules(**{"hidden_stop_ids": frozenset({EOS}), **rules}))


def test_text_comes_token_by_token() -> None:
    text = output()
    assert text.feed([1], None) == Delta("a", (1,))
    assert text.feed([2, 3], "length") == Delta("bc", (2, 3), "length")
    assert text.num_tokens == 3


def test_the_models_own_end_is_counted_and_not_shown() -> None:
    text = output()
    assert text.feed([1, EOS], "stop") == Delta("a", (1, EOS), "stop", None)
    assert text.num_tokens == 2


def test_a_stop_token_of_the_client_is_the_reason_and_not_shown() -> None:
    assert output().feed([1, 2], "stop") == Delta("a", (1, 2), "stop", 2)


def test_a_stop_token_is_shown_when_asked_for() -> None:
    assert output(include_stop=True).feed([1, 2], "stop") == Delta("ab", (1, 2), "stop", 2)


def test_a_stop_string_across_tokens_ends_the_text_in_front_of_it() -> None:
    text = output(stops=("bc",))
    assert text.feed([1], None).text == "a"
    assert text.feed([2], None).text == ""
    assert text.feed([3, 1], None) == Delta("", (3,), "stop", "bc")
    assert text.num_tokens == 3, "the token behind the stop string does not count"


def test_a_held_back_beginning_comes_out_at_the_end() -> None:
    """Text behind the stop once leaked at the flush, or the held back part was lost."""
    text = output(stops=("bcc",))
    assert text.feed([4], None).text == "a"
    assert text.feed([3], "length") == Delta("bc", (3,), "length")


def test_a_stop_string_that_the_last_token_completes_is_honoured() -> None:
    assert output(stops=("c!",)).feed([4, 5], "length") == Delta("ab", (4, 5), "stop", "c!")


def test_stop_strings_do_not_count_before_the_minimum() -> None:
    text = output(stops=("b",), min_tokens=2)
    assert text.feed([1, 2], None).text == "ab"
    assert text.feed([2], None) == Delta("", (2,), "stop", "b")


def test_an_unfinished_character_at_the_end_is_shown_as_one() -> None:
    pieces = [b"\xe6", b"\xbc", b"x"]
    text = OutputText(ByteDetokenizer(pieces.__getitem__), TextRules())
    assert text.feed([0, 1], "length") == Delta("\ufffd", (0, 1), "length")
