"""Log-probabilities as OpenAI's two routes write them. Pure: values in, dicts out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import msgspec

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
Told = Sequence[tuple[int, TokenLogprobs | None]]
"""The same, where nothing is known of a prompt's first token."""


def completion_logprobs(told: Told, describe: Describe, *, offset: int) -> dict[str, Any]:
    """For /v1/completions; `offset` is the number of characters in front of the first token."""
    texts = [describe(token_id).text for token_id, _ in told]
    return {
        "text_offset": list(accumulate((len(text) for text in texts[:-1]), initial=offset)) if texts else [],
        "tokens": texts,
        "token_logprobs": [None if item is None else finite(item.logprob) for _, item in told],
        "top_logprobs": [
            None
            if item is None
            else {describe(other).text: finite(value) for other, value in (*item.top, (token_id, item.logprob))}
            for token_id, item in told
        ],
    }


def prompt_logprobs(told: Told, describe: Describe, *, num_top: int) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each token of the prompt, the likeliest ones and itself; null for the first."""

    def entry(token_id: int, value: float, rank: int) -> dict[str, Any]:
        return {"logprob": finite(value), "rank": rank, "decoded_token": describe(token_id).text}

    lists: list[dict[str, Any] | None] = []
    for token_id, item in told:
        if item is None:
            lists.append(None)
            continue
        top = {str(other): entry(other, value, rank) for rank, (other, value) in enumerate(item.top[:num_top], 1)}
        lists.append(top | {str(token_id): entry(token_id, item.logprob, item.rank)})
    return lists


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


def pack(document: dict[str, Any]) -> dict[str, Any]:
    """The same with its lists written as JSON: log-probabilities are a hundred times as small so, and need only be
    copied when the whole answer is written."""
    return {name: msgspec.json.encode(value) if isinstance(value, list) else value for name, value in document.items()}


def join_packed(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One document of the packed ones, their lists joined. At least one part."""
    return {
        name: join_lists([part[name] for part in parts]) if isinstance(value, bytes) else value
        for name, value in parts[0].items()
    }


def join_lists(lists: Sequence[bytes]) -> msgspec.Raw:
    """JSON lists as one."""
    inside = (part[1:-1] for part in lists)
    return msgspec.Raw(b"[" + b",".join(part for part in inside if part) + b"]")


def finite(value: float) -> float:
    """At least LEAST."""
    return max(value, LEAST)
