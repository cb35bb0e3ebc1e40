"""Compiles grammars in a process of its own: one that takes too long or too much memory is ended, not waited for.

The library has limits, and holds them in most places; but a schema of twenty characters ("multipleOf": 10000019) keeps
it busy for minutes, in the engine as well, which would stand still with every stream. So each grammar is first built
here, and only one that was built quickly goes to the engine.

As a program: reads one JSON document a line, [kind, source], and answers with one, {"grammar"} or {"error"}.
"""

import asyncio
import json
import math
import os
import resource
import sys
import time
from collections import OrderedDict
from functools import cache
from typing import Any

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from pagefleet_server.api.errors import BadRequestError
from pagefleet_server.api.grammar import compile_grammar
from pagefleet_server.engine.parent import ParentGoneError, die_with_parent, leave_signals_to_parent
from pagefleet_server.grammar_limits import make_limits

COMMAND = (sys.executable, "-P", "-m", "pagefleet_server.api.grammar_worker")
WALL_SECONDS = 10.0
"""From asking to the answer, whatever else the machine does; then the worker is killed."""
CPU_SECONDS = 1
"""Of one grammar, and up to one more; then the kernel ends the worker, also when nobody waits for it any more."""
BUILD_SECONDS = 0.5
"""CPU time of a grammar that the engine may be given: so long may all streams stand still."""
MEMORY_BYTES = 2 * 1024**3
LINE_BYTES = 16 * 1024 * 1024
"""A grammar is some times as long as its source, which has at most 64 KiB."""
MAX_GRAMMARS = 64


class GrammarCompiler:
    """Starts the worker with the first grammar, again after it had to be ended. What became of the last grammars is
    remembered, and waits for nobody's new one."""

    def __init__(self, *, wall_seconds: float = WALL_SECONDS) -> None:
        self._wall_seconds = wall_seconds
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()
        self._known: OrderedDict[tuple[str, str], dict[str, Any]] = OrderedDict()
        """Kind and source -> the worker's answer."""

    async def compile(self, kind: str, source: str) -> str:
        """A grammar for the engine, see grammar.compile_grammar. Raises BadRequestError, also when it is too costly."""
        asked = (kind, source)
        if asked not in self._known:
            async with self._lock:
                if asked not in self._known:
                    self._known[asked] = await self._ask(kind, source)
                    if len(self._known) > MAX_GRAMMARS:
                        self._known.popitem(last=False)
        self._known.move_to_end(asked)
        answer = self._known[asked]
        if "error" in answer:
            raise BadRequestError(answer["error"], code="invalid_grammar")
        return str(answer["grammar"])

    async def close(self) -> None:
        """End the worker."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()

    async def _ask(self, kind: str, source: str) -> dict[str, Any]:
        """The worker's answer, or that it had to be ended. Raises BadRequestError when it was given no time."""
        answered = False
        too_long = f"{kind}: takes too long to build"
        try:
            async with asyncio.timeout(self._wall_seconds):
                answer = await self._exchange(kind, source)
            answered = True
        except TimeoutError as error:  # of the whole machine's doing, perhaps: the next one may try again
            raise BadRequestError(too_long, code="invalid_grammar") from error
        except (ConnectionError, ValueError, asyncio.IncompleteReadError):
            return {"error": too_long}
        finally:
            if not answered:  # also when the client has left meanwhile: its answer must not be the next one's
                await self.close()
        return answer

    async def _exchange(self, kind: str, source: str) -> dict[str, Any]:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                *(*COMMAND, str(os.getpid())),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=LINE_BYTES,
            )
        writer, reader = self._process.stdin, self._process.stdout
        assert writer is not None and reader is not None
        writer.write(json.dumps([kind, source]).encode() + b"\n")
        await writer.drain()
        answer: dict[str, Any] = json.loads(await reader.readuntil(b"\n"))
        return answer


class _Bytes:
    """A vocabulary of single bytes: what a grammar costs to build does not depend on the model's."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([value]) for value in range(256)), b"</s>")

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


NOTHING_FITS = "NoExtensionBias"
"""The library's word for a grammar in which no first token is allowed, such as one that only refers to itself."""


@cache
def byte_tokenizer() -> LLTokenizer:
    """Made once."""
    return LLTokenizer(TokenizerWrapper(_Bytes()))


def build(kind: str, source: str) -> str:
    """Compile, and build a matcher as the engine will. Raises BadRequestError."""
    grammar = compile_grammar(kind, source)
    begun = time.process_time()
    matcher = LLMatcher(byte_tokenizer(), grammar, log_level=0, limits=make_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        told = matcher.get_error().splitlines()[0][:300]
        reason = "no text can ever be complete in this shape" if told.endswith(NOTHING_FITS) else told
        raise BadRequestError(f"{kind}: {reason}", code="invalid_grammar")
    if time.process_time() - begun > BUILD_SECONDS:
        raise BadRequestError(f"{kind}: takes too long to build", code="invalid_grammar")
    return grammar


def main() -> None:
    """Answer until the other side closes. The kernel ends this process with its parent, or when it costs too much."""
    try:
        die_with_parent(int(sys.argv[1]))
    except ParentGoneError:
        return
    leave_signals_to_parent()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for line in sys.stdin.buffer:
        used = resource.getrusage(resource.RUSAGE_SELF)
        most = math.ceil(used.ru_utime + used.ru_stime) + CPU_SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))
        kind, source = json.loads(line)
        try:
            answer = {"grammar": build(kind, source)}
        except BadRequestError as error:
            answer = {"error": str(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
