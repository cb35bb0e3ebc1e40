"""The model's text side: template and tokenizer. Work that may take long runs in threads, never on the event loop."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pagefleet_server.api.byte_detokenizer import ByteDetokenizer
from pagefleet_server.api.chat_template import ChatTemplate
from pagefleet_server.api.detokenizer import Detokenizer, TokensToText, decode_in_slices
from pagefleet_server.api.errors import BadRequestError
from pagefleet_server.api.grammar_worker import GrammarCompiler
from pagefleet_server.api.lengths import check_room, check_text_bytes
from pagefleet_server.api.parsers.choose import detect_reasoning, detect_tool_parser
from pagefleet_server.api.token_text import TokenTexts
from pagefleet_server.model_errors import ModelError
from pagefleet_server.tokenizer import LoadedTokenizer, load_tokenizer

LONG_CHARS = 64 * 1024
"""Longer texts are tokenised one at a time, so that short ones always find a free thread."""
MAX_LONG_TEXTS = 16
"""So many may be tokenised or wait for it; each may have megabytes."""
ID_SLICE = 16 * 1024
"""Token ids are made into Python objects so many at a time: that holds the interpreter, wherever it runs."""
Result = TypeVar("Result")


class LongTextsError(Exception):
    """Too many long texts want to be tokenised at once."""


class TextModel:
    """encode() and render() run in `pool`; decode() is for a handful of tokens and runs where it is called."""

    def __init__(self, loaded: LoadedTokenizer, pool: ThreadPoolExecutor) -> None:
        self._loaded = loaded
        self._pool = pool
        self._long_lane = asyncio.Semaphore(1)
        self._num_long = 0
        self._grammars = GrammarCompiler()
        self._texts = TokenTexts(loaded.tokenizer)
        self.describe = self._texts.describe
        """One token as text and bytes."""
        source = loaded.chat_template or ""
        tokens = {"bos_token": loaded.bos_token, "eos_token": loaded.eos_token}
        known = {name: token for name, token in tokens.items() if token is not None}
        self._template = ChatTemplate(source, special_tokens=known) if source else None
        takes_tools = self._template is not None and self._template.takes_tools
        self.tool_parser = detect_tool_parser(source) if takes_tools else "none"
        """How the model writes tool calls, see parsers.choose; "none" when it cannot be told of tools."""
        self.reasons = detect_reasoning(source)
        """Whether it thinks aloud."""
        self.max_token_bytes = max(len(token.encode()) for token in loaded.tokenizer.get_vocab())
        """No token stands for more bytes of text (byte-level ones write a byte as one or two: still a bound)."""

    async def close(self) -> None:
        """End the process that builds grammars."""
        await self._grammars.close()

    @property
    def tokenizer_info(self) -> dict[str, object]:
        """Special tokens, template and size, under the names of tokenizer_config.json."""
        loaded = self._loaded
        return {
            "bos_token": loaded.bos_token,
            "eos_token": loaded.eos_token,
            "chat_template": loaded.chat_template,
            "vocab_size": loaded.vocab_size,
        }

    async def encode(self, text: str, *, add_special_tokens: bool, max_model_len: int) -> list[int]:
        """Token ids. Raises BadRequestError for a text that cannot fit, without tokenising it."""

        def work() -> list[int]:
            check_text_bytes(len(text.encode()), max_token_bytes=self.max_token_bytes, max_model_len=max_model_len)
            return self._encode(text, add_special_tokens, max_model_len=max_model_len)

        return await self._in_thread(work, is_long=len(text) > LONG_CHARS)

    async def encode_any(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text that need not fit into the context."""
        return await self._in_thread(lambda: self._encode(text, add_special_tokens), is_long=len(text) > LONG_CHARS)

    async def encode_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences of words, at the beginning of a text and after a space; none twice."""

        def work() -> tuple[tuple[int, ...], ...]:
            spellings = [spelling for word in words for spelling in (word, f" {word.lstrip()}")]
            sequences = [tuple(self._encode(spelling, add_special_tokens=False)) for spelling in spellings]
            return tuple(dict.fromkeys(sequence for sequence in sequences if sequence))

        return await self._in_thread(work)

    async def compile(self, kind: str, source: str) -> str:
        """A grammar for the engine, see grammar_worker. Raises BadRequestError."""
        return await self._grammars.compile(kind, source)

    async def render(self, messages: Sequence[dict[str, Any]], **options: Any) -> str:
        """The prompt text of a conversation; options of ChatTemplate.render. Raises BadRequestError."""
        template = self._template
        if template is None:
            raise BadRequestError("this model has no chat template; use /v1/completions", code="no_chat_template")
        return await self._in_thread(lambda: template.render(messages, **options))

    def detokenizer(self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> TokensToText:
        """For one request's output."""
        if not self._texts.is_byte_level:
            return Detokenizer(lambda ids: self.decode(ids, skip_special_tokens=skip_special_tokens), prompt_token_ids)
        hidden = self._loaded.special_token_ids if skip_special_tokens else frozenset[int]()
        data = self._texts.data
        return ByteDetokenizer(lambda token: b"" if token in hidden else data(token), prompt_token_ids)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Text of a few tokens."""
        text: str = self._loaded.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    async def decode_long(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Text of any number of tokens."""

        def decode(ids: list[int]) -> str:
            return self.decode(ids, skip_special_tokens=skip_special_tokens)

        return await self._in_thread(lambda: "".join(decode_in_slices(decode, token_ids, ID_SLICE)))

    async def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Tokens as the vocabulary writes them."""
        name = self._loaded.tokenizer.id_to_token
        return await self._in_thread(lambda: [name(token_id) or "" for token_id in token_ids])

    def _encode(self, text: str, add_special_tokens: bool, *, max_model_len: int | None = None) -> list[int]:
        """Raises BadRequestError for more tokens than fit, before their ids are made."""
        (encoding,) = self._loaded.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        if max_model_len is not None:
            check_room(len(encoding), max_model_len=max_model_len)
        if len(encoding) <= ID_SLICE:
            return list(encoding.ids)
        encoding.truncate(ID_SLICE)
        return [token_id for piece in (encoding, *encoding.overflowing) for token_id in piece.ids]

    async def _in_thread(self, work: Callable[[], Result], *, is_long: bool = False) -> Result:
        if not is_long:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        if self._num_long >= MAX_LONG_TEXTS:
            raise LongTextsError(f"{self._num_long} long texts are being tokenised; try again later")
        self._num_long += 1
        try:
            return await self._in_long_lane(work)
        finally:
            self._num_long -= 1

    async def _in_long_lane(self, work: Callable[[], Result]) -> Result:
        await self._long_lane.acquire()
        future = self._pool.submit(work)
        release = asyncio.get_running_loop().call_soon_threadsafe
        future.add_done_callback(lambda _: release(self._long_lane.release))  # when the thread is free, not the caller
        try:
            return await asyncio.wrap_future(future)
        finally:
            # It holds the error that is raised here, whose traceback holds this frame and with it the whole text: a
            # circle that only a full collection finds, after thousands of refused texts.
            del future


def load_text_model(path: Path, pool: ThreadPoolExecutor, *, template: str | None = None) -> TextModel:
    """Blocking. `template`: instead of the model's own. Raises ModelError, or BadRequestError for a broken template."""
    loaded = load_tokenizer(path)
    if template is None:
        return TextModel(loaded, pool)
    try:
        return TextModel(replace(loaded, chat_template=template), pool)
    except BadRequestError as error:
        raise ModelError(f"--chat-template: {error}") from error
