"""One choice's output as it grows: tokens in, text out, with the stop rules applied."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pagefleet_server.api.detokenizer import TokensToText
from pagefleet_server.api.stop_strings import StopStrings
from pagefleet_server.core.step import TokenLogprobs


@dataclass(frozen=True, slots=True)
class TextRules:
    """How a request wants its text ended."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    """Stop strings and stop tokens stay in the text."""
    min_tokens: int = 0
    """Stop strings inside the text of the first min_tokens tokens do not count."""
    hidden_stop_ids: frozenset[int] = frozenset()
    """Stop ids that are no answer to `why`: the model's own end of sequence."""
    hides_output: bool = False
    """Nothing is told of what is drawn: only the prompt was asked for, and a request draws at least one token."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What new tokens brought."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """The stop string or the stop token id that ended it; None for the model's own end."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each token, when asked for."""


class OutputText:
    """Fold of one request's outputs. After a Delta with finish_reason nothing may be fed."""

    def __init__(self, detokenizer: TokensToText, rules: TextRules) -> None:
        self._detokenizer = detokenizer
        self._scanner = StopStrings(rules.stops, include_in_output=rules.include_stop)
        self._rules = rules
        self.num_tokens = 0
        """Tokens so far, a stop token included, tokens after a stop string excluded."""

    def feed(
        self, token_ids: Sequence[int], finish_reason: str | None, logprobs: Sequence[TokenLogprobs] = ()
    ) -> Delta:
        """The engine's next tokens and, with the last ones, its finish reason."""
        if self._rules.hides_output:
            return Delta("", (), finish_reason and "length")
        delta = self._feed(token_ids, finish_reason)
        return replace(delta, logprobs=tuple(logprobs[: len(delta.token_ids)])) if logprobs else delta

    def _feed(self, token_ids: Sequence[int], finish_reason: str | None) -> Delta:
        text: list[str] = []
        for index, token_id in enumerate(token_ids):
            self.num_tokens += 1
            is_stop_token = finish_reason == "stop" and index == len(token_ids) - 1
            if is_stop_token and not self._rules.include_stop:
                break
            piece = self._detokenizer.feed((token_id,))
            stop = self._scan(piece, text)
            if stop is not None:
                return Delta("".join(text), tuple(token_ids[: index + 1]), "stop", stop)
        if finish_reason is None:
            return Delta("".join(text), tuple(token_ids))
        stop = self._scan(self._detokenizer.flush(), text)
        if stop is not None:
            return Delta("".join(text), tuple(token_ids), "stop", stop)
        text.append(self._scanner.flush())
        stop_id = token_ids[-1] if finish_reason == "stop" and token_ids else None
        hidden = stop_id in self._rules.hidden_stop_ids
        return Delta("".join(text), tuple(token_ids), finish_reason, None if hidden else stop_id)

    def _scan(self, piece: str, text: list[str]) -> str | None:
        if self.num_tokens <= self._rules.min_tokens:
            text.append(piece)
            return None
        scanned = self._scanner.feed(piece)
        text.append(scanned.text)
        return scanned.stop
