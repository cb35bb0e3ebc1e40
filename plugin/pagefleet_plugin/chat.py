"""A conversation in the terminal, streamed."""

import asyncio
import sys
from collections.abc import Callable, Mapping
from typing import Any

from pagefleet_plugin.completions import new_session, stream_chat
from pagefleet_plugin.errors import PluginError
from pagefleet_plugin.terminal import harmless

ANSWER_SECONDS = 600.0
MAX_TURNS = 200
"""Messages kept; older ones than these leave the conversation."""


async def chat(
    url: str,
    *,
    headers: Mapping[str, str],
    extra: Mapping[str, Any],
    first: str | None,
    system: str | None,
    write: Callable[[str], object] = sys.stdout.write,
    read: Callable[[], str | None],
) -> None:
    """Ask `first` and stop; without it ask what `read` gives until None. A broken answer does not end the talk."""
    kept: list[dict[str, str]] = []
    opening = [{"role": "system", "content": system}] if system else []
    async with new_session(ANSWER_SECONDS) as session:
        while True:
            question = first if first is not None else await asyncio.to_thread(read)
            if question is None:
                return
            if not question.strip():
                continue
            kept.append({"role": "user", "content": question})
            answer: list[str] = []
            try:
                async for piece in stream_chat(session, url, [*opening, *kept], headers=headers, extra=extra):
                    answer.append(piece.text)
                    write(harmless(piece.text))
                    sys.stdout.flush()
            except PluginError as error:
                if first is not None:
                    raise
                kept.pop()
                write(f"\n[{error}]\n")
                continue
            write("\n")
            if first is not None:
                return
            kept.append({"role": "assistant", "content": "".join(answer)})
            del kept[:-MAX_TURNS]
