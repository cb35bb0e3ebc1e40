"""From token ids to text, piece by piece: the pieces joined are the text, and no character is ever split."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
CONTEXT_TOKENS = 8
"""Tokens in front that decide how the next one is written: leading spaces, byte runs (a character and a torn one)."""
MAX_CHARACTER_BYTES = 4
CUT_TRIES = 16
MAX_WINDOW_TOKENS = 64
"""The window is cut even without a clean boundary: output that never forms a character must not cost more and more."""

Decode = Callable[[list[int]], str]


def decode_in_slices(decode: Decode, token_ids: Sequence[int], size: int) -> Iterator[str]:
    """The text of any number of tokens in pieces of about `size` tokens: decoding all at once would keep the
    interpreter to itself. Cut where no character is torn; where none is whole for CUT_TRIES tokens, anywhere."""
    start, context, num_known = 0, list[int](), 0
    while start < len(token_ids):
        last = min(start + size, len(token_ids))
        for end in range(last, max(start, last - CUT_TRIES), -1):
            text = decode([*context, *token_ids[start:end]])
            if end == len(token_ids) or not text.endswith(REPLACEMENT):
                break
        yield text[num_known:]
        context, num_known = _find_context(decode, token_ids[max(0, end - CONTEXT_TOKENS - 1) : end])
        start = end


class TokensToText(Protocol):
    """What makes text of one request's tokens."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; may be empty."""

    def flush(self) -> str:
        """At the end: what was held back."""


class Detokenizer:
    """Text of one request's output, for any tokenizer.

    Decodes a short window of recent tokens each time and gives out what is new. A trailing U+FFFD may be the start of
    a character whose other bytes are still to come, so it is held back until it is replaced or something follows.
    """

    def __init__(self, decode: Decode, prompt_token_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window, self._given = _find_context(decode, prompt_token_ids)
        """Recent tokens, and how many characters of their text are given out, or belong to the prompt."""
        self._prompt_text = decode(self._window) if self._window else ""
        self._boundaries: list[int] = []
        """Window lengths at which everything was given out."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; may be empty."""
        return "".join(self._step(token_id) for token_id in token_ids)

    def flush(self) -> str:
        """At the end: what was held back, unfinished characters as U+FFFD."""
        text = self._decode(self._window) if self._window else ""
        self._skip_prompt(text)
        piece = text[self._given :]
        self._given = len(text)
        return piece

    def _step(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        stable = _stable(text)
        piece = ""
        if len(stable) > self._given:
            self._skip_prompt(text)
            piece = stable[self._given :]
            self._given = max(self._given, len(stable))
        if len(stable) == len(text):
            self._boundaries.append(len(self._window))
            self._trim()
        elif len(self._window) >= MAX_WINDOW_TOKENS:
            self._start_window_at(len(self._window) - CONTEXT_TOKENS)
        return piece

    def _skip_prompt(self, text: str) -> None:
        """A prompt may end inside a character: when the output does not complete it, its U+FFFD is not the output's."""
        if self._prompt_text and text.startswith(self._prompt_text):
            self._given = max(self._given, len(self._prompt_text))
        self._prompt_text = ""

    def _trim(self) -> None:
        """At a boundary: start the window at an earlier one that leaves enough context. (Elsewhere byte fallback may
        write the whole window as U+FFFD for the sake of its last byte, and what was given out could not be counted.)"""
        if len(self._window) >= 2 * CONTEXT_TOKENS:
            cut = max((b for b in self._boundaries if b <= len(self._window) - CONTEXT_TOKENS), default=0)
            if cut or len(self._window) >= MAX_WINDOW_TOKENS:
                self._start_window_at(cut or len(self._window) - CONTEXT_TOKENS)

    def _start_window_at(self, cut: int) -> None:
        del self._window[:cut]
        self._boundaries = [boundary - cut for boundary in self._boundaries if boundary > cut]
        self._given = len(_stable(self._decode(self._window)))


def _stable(text: str) -> str:
    """Without the trailing U+FFFD: byte fallback writes one for each byte of the unfinished character."""
    return text.rstrip(REPLACEMENT)


def _find_context(decode: Decode, token_ids: Sequence[int]) -> tuple[list[int], int]:
    """Up to CONTEXT_TOKENS last tokens that do not begin inside a character, and the number of their characters. They
    may end inside one: up to three tokens are tried away, because byte fallback writes a run with an unfinished
    character as U+FFFD throughout."""
    for length in range(min(CONTEXT_TOKENS, len(token_ids)), 0, -1):
        tail = list(token_ids[-length:])
        whole = decode(tail)
        for num_unfinished in range(min(length + 1, MAX_CHARACTER_BYTES)):
            head = tail[: length - num_unfinished]
            if not head and length < len(token_ids):
                break
            text = decode(head) if head else ""
            if not text.startswith(REPLACEMENT) and not text.endswith(REPLACEMENT):
                return tail, max(len(text), len(_stable(whole)))
        if not whole.startswith(REPLACEMENT):
            return tail, len(_stable(whole))
    return [], 0
