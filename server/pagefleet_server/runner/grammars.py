"""Which tokens a request's grammar allows next.

A matcher's state follows from the output so far, so it is only a cache: one that was dropped, or whose request was
preempted, is rebuilt from the history.
"""

import contextlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from pagefleet_server.core.step import ScheduledRequest
from pagefleet_server.grammar_limits import TOO_COMPLEX, is_too_complex, make_limits
from pagefleet_server.model_errors import ModelError
from pagefleet_server.tokenizer import load_tokenizer

_logger = logging.getLogger(__name__)

Mask = npt.NDArray[np.bool_]
"""[V]: True where the token is allowed."""
MAX_BUILT = 64
"""Grammars of which an unused matcher is kept: a copy takes a fraction of a millisecond, building one up to half a
second, in a step that every stream waits for, and a request may want 128 of them."""
MAX_MATCHERS = 1024
KEPT_STEPS = 16
"""A matcher that so many steps did not ask belongs to a request that has ended, or waits again: it may hold half a
megabyte."""


@dataclass(slots=True)
class _State:
    matcher: LLMatcher
    num_consumed: int = 0
    """Output tokens that the matcher has seen."""
    last_step: int = 0
    """That asked it."""


class GrammarTooComplexError(Exception):
    """A request's grammar asks more of a step than MAX_STEP_ITEMS allows."""


class Grammars:
    """The matchers of running requests. A grammar that otherwise fails in the middle allows only the end."""

    def __init__(self, load: Callable[[], LLTokenizer], *, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """`load` is called once, for the first request that has a grammar."""
        self._load = load
        self._vocab_size = vocab_size
        self._eos = list(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._states: OrderedDict[str, _State] = OrderedDict()
        self._built: OrderedDict[str, LLMatcher] = OrderedDict()
        """Grammar -> a matcher that has seen nothing."""
        self.num_steps = 0
        """Steps of the engine so far, with a grammar or without."""

    @property
    def num_matchers(self) -> int:
        """Kept now."""
        return len(self._states)

    def begin_step(self) -> None:
        """Call it for each step, with a grammar in it or without."""
        self.num_steps += 1
        while self._states and next(iter(self._states.values())).last_step < self.num_steps - KEPT_STEPS:
            self._states.popitem(last=False)

    def allowed(self, request: ScheduledRequest) -> Mask:
        """For the token that this step draws. request.sampling.grammar and request.history are given. Raises
        GrammarTooComplexError."""
        assert request.sampling.grammar is not None and request.history is not None
        state = self._state(request.request_id, request.sampling.grammar)
        output = request.history.token_ids[request.history.num_prompt :]
        for token_id in output[state.num_consumed :]:
            state.matcher.consume_token(token_id)
        state.num_consumed = len(output)
        over = state.matcher.is_error() or state.matcher.is_stopped()
        bits = None if over else state.matcher.compute_bitmask()
        if is_too_complex(state.matcher):
            self._built.pop(request.sampling.grammar, None)  # copies share what their lexer has learnt
            raise GrammarTooComplexError(f"{TOO_COMPLEX}; write it without rules that are their own neighbours")
        if bits is None or state.matcher.is_error():
            if state.matcher.is_error():
                _logger.warning(
                    "request %s: its grammar fails: %s", request.request_id, state.matcher.get_error()[:300]
                )
            return self._only_end()
        packed = np.frombuffer(bits, dtype=np.uint8)
        mask = np.unpackbits(packed, bitorder="little", count=self._vocab_size).astype(np.bool_)
        return mask if mask.any() else self._only_end()

    def _state(self, request_id: str, grammar: str) -> _State:
        state = self._states.get(request_id)
        if state is None:
            state = self._states[request_id] = _State(self._build(grammar))
            if len(self._states) > MAX_MATCHERS:
                self._states.popitem(last=False)
        state.last_step = self.num_steps
        self._states.move_to_end(request_id)
        return state

    def _build(self, grammar: str) -> LLMatcher:
        built = self._built.get(grammar)
        if built is None:
            if self._tokenizer is None:
                self._tokenizer = self._load()
            built = self._built[grammar] = LLMatcher(self._tokenizer, grammar, log_level=0, limits=make_limits())
            if len(self._built) > MAX_BUILT:
                self._built.popitem(last=False)
        self._built.move_to_end(grammar)
        return built.deep_copy()

    def _only_end(self) -> Mask:
        mask = np.zeros(self._vocab_size, dtype=np.bool_)
        mask[self._eos] = True
        return mask


def load_in_background(
    path: Path,
    *,
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
    delay_seconds: float,
    sleep: Callable[[float], None] = time.sleep,
) -> Grammars:
    """Grammars whose tokenizer is made in a thread, or for the first grammar if that comes before. Making it (half a
    second with a large vocabulary) holds the interpreter, and every stream with it: the thread waits until no step
    has run for `delay_seconds`, however long that takes.

    A model without a tokenizer fails at the first grammar, with ModelError: its API process would not have started."""
    lock = threading.Lock()
    made: list[LLTokenizer] = []

    def load() -> LLTokenizer:
        with lock:
            if not made:
                made.append(make_tokenizer(path, vocab_size, eos_token_ids))
            return made[0]

    grammars = Grammars(load, vocab_size=vocab_size, eos_token_ids=eos_token_ids)

    def load_ahead() -> None:
        seen = -1
        while seen != grammars.num_steps and not made:
            seen = grammars.num_steps
            sleep(delay_seconds)
        with contextlib.suppress(ModelError):  # told to whoever needs it
            load()

    threading.Thread(target=load_ahead, name="grammar-tokenizer", daemon=True).start()
    return grammars


def make_tokenizer(path: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
    """The model's tokenizer as the matcher library wants it. Raises ModelError."""
    document = load_tokenizer(path).tokenizer.to_str()
    return LLTokenizer(document, n_vocab=vocab_size, eos_token=list(eos_token_ids))
