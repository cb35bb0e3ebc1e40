"""Log-probabilities as OpenAI's two routes write them. Pure: values in, dicts out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pagefleet_server.core.step import TokenLogprobs

LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""
MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class TokenText:
    """How a single token looks."""

    text: str
    """Bytes that form no character as U+FFFD."""
    data: bytes
    """Joined over tokens, the bytes of the text."""


Describe = Callable[[int], TokenText]
Drawn = Sequence[tuple[int, TokenLogprobs]]
"""Token id, and how likely it and others were."""


def completion_logprobs(drawn: Drawn, describe: Describe, *, offset: int) -> dict[str, Any]:
    """For /v1/completions; `offset` is the number of characters in front of the first token."""
    texts = [describe(token_id).text for token_id, _ in drawn]
    offsets = [offset + sum(len(text) for text in texts[:index]) for index in range(len(texts))]
    return {
        "text_offset": offsets,
        "tokens": texts,
        "token_logprobs": [finite(item.logprob) for _, item in drawn],
        "top_logprobs": [
            {describe(other).text: finite(value) for other, value in (*item.top, (token_id, item.logprob))}
            for token_id, item in drawn
        ],
    }


def chat_logprobs(drawn: Drawn, describe: Describe) -> dict[str, Any]:
    """For /v1/chat/completions."""

    def entry(token_id: int, value: float) -> dict[str, Any]:
        token = describe(token_id)
        return {"token": token.text, "logprob": finite(value), "bytes": list(token.data)}

    content = [
        entry(token_id, item.logprob) | {"top_logprobs": [entry(*other) for other in item.top]}
        for token_id, item in drawn
    ]
    return {"content": content, "refusal": None}


def finite(value: float) -> float:
    """At least LEAST."""
    return max(value, LEAST)
