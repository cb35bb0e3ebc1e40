"""The pieces joined are the text, for every way of cutting its bytes into tokens; no piece holds half a character."""

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from pagefleet_server.api.byte_detokenizer import ByteDetokenizer
from pagefleet_server.api.detokenizer import CONTEXT_TOKENS, MAX_WINDOW_TOKENS, Decode, Detokenizer, decode_in_slices
from pagefleet_server.api.token_text import TokenTexts
from pagefleet_server.tokenizer import load_tokenizer
from support.smollm2 import smollm2_gguf

TEXTS = st.text(st.one_of(st.sampled_from("a é€漢🙂\u200d\n"), st.characters(exclude_categories=["Cs"])), max_size=60)


def cut(data: bytes, points: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(point % (len(data) + 1) for point in points)})
    return [data[start:end] for start, end in itertools.pairwise(edges)]


def byte_level(tokens: list[bytes]) -> Decode:
    """As the ByteLevel decoder: all bytes together, invalid ones as U+FFFD."""
    return lambda ids: b"".join(tokens[i] for i in ids).decode(errors="replace")


def run(decode: Decode, prompt: list[int], output: list[int], group: int = 1) -> list[str]:
    detokenizer = Detokenizer(decode, prompt)
    pieces = [detokenizer.feed(output[start : start + group]) for start in range(0, len(output), group)]
    return [*pieces, detokenizer.flush()]


@given(prompt=TEXTS, text=TEXTS, points=st.lists(st.integers(0, 400), max_size=80), group=st.integers(1, 5))
def test_pieces_join_to_the_text_for_every_split(prompt: str, text: str, points: list[int], group: int) -> None:
    before, after = cut(prompt.encode(), points), cut(text.encode(), points)
    tokens = before + after
    ids = list(range(len(tokens)))
    pieces = run(byte_level(tokens), ids[: len(before)], ids[len(before) :], group)
    assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@given(text=TEXTS, points=st.lists(st.integers(0, 400), max_size=80), start=st.integers(0, 400))
def test_a_prompt_that_ends_inside_a_character_is_never_leaked(text: str, points: list[int], start: int) -> None:
    """The first delta once held the whole prompt when it ended in the middle of a character."""
    assume("\ufffd" not in text)
    data = text.encode()
    start %= len(data) + 1
    before, after = cut(data[:start], points), cut(data[start:], points)
    tokens = before + after
    ids = list(range(len(tokens)))
    pieces = run(byte_level(tokens), ids[: len(before)], ids[len(before) :])
    whole = len(data[:start].decode(errors="ignore"))
    assert "".join(pieces) == text[whole:]


@given(data=st.binary(max_size=200), points=st.lists(st.integers(0, 400), max_size=80))
def test_bytes_that_form_no_text_become_what_one_decode_gives(data: bytes, points: list[int]) -> None:
    tokens = cut(data, points)
    pieces = run(byte_level(tokens), [], list(range(len(tokens))))
    assert "".join(pieces) == data.decode(errors="replace")


@given(data=st.binary(min_size=1, max_size=8), text=TEXTS)
def test_a_broken_prompt_end_adds_nothing_to_the_output(data: bytes, text: str) -> None:
    tokens = [b"say ", data, *(char.encode() for char in text)]
    pieces = run(byte_level(tokens), [0, 1], list(range(2, len(tokens))))
    together = (data + text.encode()).decode(errors="replace")
    assert together.endswith("".join(pieces))
    assert len("".join(pieces)) <= len(text) + 1, "a character that prompt and output form together is the output's"


def test_output_without_any_character_costs_bounded_work() -> None:
    longest = 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return "\ufffd" * len(ids)

    detokenizer = Detokenizer(decode)
    for _ in range(1000):
        detokenizer.feed([0])
    assert longest <= MAX_WINDOW_TOKENS


@given(text=TEXTS, size=st.integers(4, 30))
def test_slices_of_a_long_text_join_to_what_one_decode_gives(text: str, size: int) -> None:
    """Of single bytes: at most three of them in a row end inside a character."""
    tokens = [bytes([byte]) for byte in text.encode()]
    longest = 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return byte_level(tokens)(ids)

    assert "".join(decode_in_slices(decode, range(len(tokens)), size)) == text
    assert longest <= size + CONTEXT_TOKENS


def test_slices_of_what_forms_no_character_are_cut_anywhere() -> None:
    pieces = list(decode_in_slices(lambda ids: "\ufffd" * len(ids), [0] * 1000, 30))
    assert len(pieces) < 80 and all(len(piece) <= 30 for piece in pieces)


REAL = load_tokenizer(smollm2_gguf())
REAL_TEXTS = TokenTexts(REAL.tokenizer)


@given(
    prompt=st.lists(st.integers(0, 49151), max_size=12),
    output=st.lists(st.integers(0, 49151), max_size=30),
    text=TEXTS,
    group=st.integers(1, 4),
)
def test_joining_bytes_gives_what_the_tokenizer_decodes(
    prompt: list[int], output: list[int], text: str, group: int
) -> None:
    """Tokens of a real byte-level model: any sequence of them, and those of a text."""
    ids = output + REAL.tokenizer.encode(text, add_special_tokens=False).ids
    hidden = REAL.special_token_ids
    fast = ByteDetokenizer(lambda i: b"" if i in hidden else REAL_TEXTS.data(i), [])
    pieces = [fast.feed(ids[start : start + group]) for start in range(0, len(ids), group)]
    assert "".join([*pieces, fast.flush()]) == REAL.tokenizer.decode(ids, skip_special_tokens=True)


@given(text=TEXTS, start=st.integers(0, 400), rest=st.binary(max_size=6))
def test_joining_bytes_leaks_nothing_of_a_torn_prompt(text: str, start: int, rest: bytes) -> None:
    assume("\ufffd" not in text)
    data = text.encode()
    start %= len(data) + 1
    ids = [*data[:start]], [*data[start:]]
    fast = ByteDetokenizer(lambda i: bytes([i]), ids[0])
    whole = len(data[:start].decode(errors="ignore"))
    assert fast.feed(ids[1]) + fast.flush() == text[whole:]
    torn = ByteDetokenizer(lambda i: bytes([i]), [0xE2, 0x82])
    assert torn.feed(list(b"x" + rest)) + torn.flush() == "x" + rest.decode(errors="replace")


def byte_fallback_tokenizer() -> Tokenizer:
    """As SentencePiece models decode: `▁` is a space, unknown characters are spelled in byte tokens."""
    words = ["▁", "a", "b", "▁hello", "▁a", "漢"]
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {word: 256 + i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


FALLBACK = byte_fallback_tokenizer()
CHARACTERS = st.one_of(
    st.integers(256, 261).map(lambda token_id: [token_id]),
    st.characters(exclude_categories=["Cs"]).map(lambda char: list(char.encode())),
)


@given(prompt=st.lists(CHARACTERS, max_size=8), output=st.lists(CHARACTERS, max_size=40))
def test_byte_fallback_output_joins_to_the_text_behind_the_prompt(
    prompt: list[list[int]], output: list[list[int]]
) -> None:
    before, after = list(itertools.chain(*prompt)), list(itertools.chain(*output))
    whole = FALLBACK.decode(before + after)
    shown = FALLBACK.decode(before)
    text = "".join(run(FALLBACK.decode, before, after))
    assert text == whole[len(shown) :] or (not before and text == whole)
    assert "\ufffd" in whole or "\ufffd" not in text


@given(output=st.lists(CHARACTERS, max_size=60), size=st.integers(4, 30))
def test_slices_of_byte_fallback_join_to_what_one_decode_gives(output: list[list[int]], size: int) -> None:
    """Llama 2's kind: a run of byte tokens with half a character is U+FFFD throughout, and the first space is lost."""
    ids = list(itertools.chain(*output))
    assert "".join(decode_in_slices(FALLBACK.decode, ids, size)) == FALLBACK.decode(ids)


@pytest.mark.parametrize("text", ["🙂" * 50, "漢" * 50, "é" * 50])
def test_long_runs_of_byte_tokens_stay_whole(text: str) -> None:
    assert "".join(run(FALLBACK.decode, [256], list(text.encode()))) == text


@pytest.mark.parametrize("in_front", [[], [257], [259, 260]])
@pytest.mark.parametrize("num_given", range(5))
def test_a_prompt_cut_inside_a_run_of_byte_tokens_does_not_spoil_the_output(
    num_given: int, in_front: list[int]
) -> None:
    data = list(("🙂" * 10).encode())
    for num_whole in (1, 7):
        start = 4 * num_whole + num_given
        text = "".join(run(FALLBACK.decode, in_front + data[:start], data[start:] + list("🙂".encode())))
        assert text == "🙂" * (11 - start // 4)
