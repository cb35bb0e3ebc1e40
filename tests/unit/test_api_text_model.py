"""The text side's threads: short texts pass long ones, long ones are counted, nobody who leaves keeps a place."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pagefleet_server.api import text_model
from pagefleet_server.api.errors import BadRequestError
from pagefleet_server.api.text_model import ID_SLICE, LONG_CHARS, LongTextsError, TextModel, load_text_model
from pagefleet_server.model_errors import ModelError
from support.api_server import write_letter_model

LONG = "ab" * LONG_CHARS


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture
def model(tmp_path: Path, pool: ThreadPoolExecutor) -> TextModel:
    return load_text_model(write_letter_model(tmp_path), pool)


@pytest.fixture
def held(model: TextModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Long texts are not tokenised before this is set."""
    go_on = threading.Event()
    encode: Callable[..., list[int]] = model._encode

    def wait_and_encode(text: str, *args: object, **options: object) -> list[int]:
        if len(text) > LONG_CHARS:
            assert go_on.wait(60)
        return encode(text, *args, **options)

    monkeypatch.setattr(model, "_encode", wait_and_encode)
    yield go_on
    go_on.set()


def test_a_given_template_that_is_broken_is_told_by_its_flag(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    with pytest.raises(ModelError, match=r"--chat-template: the chat template cannot be used: .*, line 2"):
        load_text_model(write_letter_model(tmp_path), pool, template="{{ messages }}\n{% for x %}")


async def tokens(model: TextModel, text: str) -> int:
    return len(await model.encode_any(text, add_special_tokens=False))


async def test_ids_of_a_long_text_are_made_in_slices_and_none_is_lost(model: TextModel) -> None:
    text = "abcdefg" * (ID_SLICE // 2)
    ids = await model.encode_any(text, add_special_tokens=False)
    assert len(ids) == len(text) > 3 * ID_SLICE
    assert model.decode(ids, skip_special_tokens=False) == text


async def test_ids_without_end_are_decoded_in_slices(model: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million at once kept the interpreter for 70 ms."""
    longest, decode = 0, model.decode

    def watch(ids: list[int], *, skip_special_tokens: bool) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids, skip_special_tokens=skip_special_tokens)

    monkeypatch.setattr(model, "decode", watch)
    ids = [1, 2, 3] * ID_SLICE
    assert await model.decode_long(ids, skip_special_tokens=False) == "abc" * ID_SLICE
    assert longest < ID_SLICE + 100


async def test_a_text_with_too_many_tokens_is_refused_with_their_number(model: TextModel) -> None:
    with pytest.raises(BadRequestError, match="context is 100 tokens; the prompt has 100"):
        await model.encode("a" * 100, add_special_tokens=False, max_model_len=100)
    assert len(await model.encode("a" * 99, add_special_tokens=False, max_model_len=100)) == 99


async def test_short_texts_pass_long_ones(model: TextModel, held: threading.Event) -> None:
    """Two prompts of megabytes once held both threads for seconds."""
    long = [asyncio.create_task(tokens(model, LONG)) for _ in range(3)]
    await asyncio.sleep(0)
    assert await tokens(model, "abc") == 3
    assert not any(task.done() for task in long)
    held.set()
    assert await asyncio.gather(*long) == [2 * LONG_CHARS] * 3


async def test_long_texts_are_bounded_and_a_caller_that_leaves_gives_its_place_back(
    model: TextModel, held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_model, "MAX_LONG_TEXTS", 2)
    first, second = (asyncio.create_task(tokens(model, LONG)) for _ in range(2))
    await asyncio.sleep(0)
    with pytest.raises(LongTextsError, match="2 long texts"):
        await tokens(model, LONG)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    third = asyncio.create_task(tokens(model, LONG))
    await asyncio.sleep(0)
    assert await tokens(model, "abc") == 3, "the thread of the one that left does not count twice"
    held.set()
    assert list(await asyncio.gather(second, third)) == [2 * LONG_CHARS] * 2
