"""What a single token looks like, and log-probabilities as the two routes write them."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pagefleet_server.api.logprobs import TokenText, chat_logprobs, completion_logprobs
from pagefleet_server.api.token_text import TokenTexts
from pagefleet_server.core.step import TokenLogprobs


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


@pytest.mark.parametrize("text", ["plain", "a b\n", "漢字 é 🙂", "\x00\x7f\xad"])
def test_byte_level_tokens_join_to_the_text(text: str) -> None:
    tokenizer = byte_level()
    describe = TokenTexts(tokenizer).describe
    assert b"".join(describe(token_id).data for token_id in tokenizer.encode(text).ids) == text.encode()


def test_a_part_of_a_character_is_shown_as_one_sign() -> None:
    tokenizer = byte_level()
    first = tokenizer.encode("é").ids[0]
    assert TokenTexts(tokenizer).describe(first) == TokenText("\ufffd", b"\xc3")


def test_added_tokens_are_shown_as_they_are_written() -> None:
    tokenizer = byte_level()
    assert TokenTexts(tokenizer).describe(256) == TokenText("<|end|>", b"<|end|>")
    assert TokenTexts(tokenizer).describe(999) == TokenText("", b"")


def test_marked_spaces_and_byte_tokens_are_told_apart_from_text() -> None:
    vocabulary = {"▁hi": 0, "<0xE6>": 1, "<0xZZ>": 2}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    describe = TokenTexts(tokenizer).describe
    assert [describe(index).data for index in range(3)] == [b" hi", b"\xe6", b"<0xZZ>"]


def test_the_drawn_token_is_always_among_the_told_ones() -> None:
    def describe(token_id: int) -> TokenText:
        return TokenText("ab"[token_id] * 2, b"")

    drawn = [(0, TokenLogprobs(-2.0, 2, ((1, -0.5),))), (1, TokenLogprobs(float("-inf"), 9, ()))]
    told = completion_logprobs(drawn, describe, offset=5)
    assert completion_logprobs([(0, None)], describe, offset=0)["token_logprobs"] == [None]
    assert told["top_logprobs"] == [{"bb": -0.5, "aa": -2.0}, {"bb": -9999.0}]
    assert (told["text_offset"], told["token_logprobs"]) == ([5, 7], [-2.0, -9999.0])
    assert [entry["top_logprobs"] for entry in chat_logprobs(drawn, describe)["content"]] == [
        [{"token": "bb", "logprob": -0.5, "bytes": []}],
        [],
    ]
