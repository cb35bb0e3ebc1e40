"""Streaming chat completions over HTTP: an async iterator of pieces with their times."""

import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from pagefleet_plugin.errors import PluginError

MAX_LINE_BYTES = 1 << 20
Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text of the answer."""

    text: str
    seconds: float
    """Monotonic time of its arrival."""
    tokens: int | None
    """Tokens of the answer so far, when the server says so."""


def new_session(timeout_seconds: float) -> aiohttp.ClientSession:
    """A session with a limit on the whole of each request, and on the longest line of a stream."""
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=timeout_seconds), read_bufsize=MAX_LINE_BYTES, trust_env=False
    )


async def stream_chat(
    session: aiohttp.ClientSession,
    url: str,
    messages: Sequence[Message],
    *,
    headers: Mapping[str, str],
    extra: Mapping[str, Any],
) -> AsyncIterator[Piece]:
    """Pieces of one answer. Raises PluginError for any answer but a whole stream."""
    body = {
        "messages": list(messages),
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    } | dict(extra)
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body, headers=dict(headers)) as response:
            if response.status != 200:
                text = (await response.content.read(2048)).decode(errors="replace")
                raise PluginError(f"the server answered {response.status}: {_reason(text)}")
            async for raw in response.content:
                line = raw.decode(errors="replace").strip()
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    piece = _piece(line.removeprefix("data: "))
                    if piece is not None:
                        yield piece
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise PluginError(f"the stream from {url} broke: {type(error).__name__}: {error}") from error
    raise PluginError(f"the stream from {url} ended before [DONE]")


def _piece(text: str) -> Piece | None:
    chunk = json.loads(text)
    if "error" in chunk:
        raise PluginError(f"the server ended the stream: {chunk['error'].get('message', chunk['error'])}")
    tokens = (chunk.get("usage") or {}).get("completion_tokens")
    choices = chunk.get("choices") or []
    delta = (choices[0].get("delta") or {}) if choices else {}
    content = delta.get("content") or delta.get("reasoning_content") or ""
    return Piece(content, time.monotonic(), tokens) if content or tokens else None


def _reason(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:300]
