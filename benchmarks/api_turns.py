"""How long one request can hold the API's event loop: the CPU time of the longest turn beside costly requests.

    python benchmarks/api_turns.py [PART OF A NAME ...]

A probe, and every stream, waits as long as the longest turn. CPU time does not depend on what else the machine does, so
this says the same on a busy one. The engine is the real process around a runner without a model (tests/support). Goal:
no turn takes 50 ms, whatever a body of the largest allowed size asks for.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import Raw, json

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path.insert(0, str(TESTS))

from pagefleet_server.api.server import Server  # noqa: E402  # the folder is put on the path above
from support import api_server  # noqa: E402

GOAL_MS = 50.0
MARK = "turn of"
TICK_SECONDS = 0.001
SETTLE_SECONDS = 0.1
"""After the answer: what is freed behind it counts as well."""


@dataclass(frozen=True)
class Costly:
    """A request, and after how long its client leaves."""

    name: str
    path: str
    body: dict[str, Any]
    seconds: float = 120.0


def make_requests() -> list[Costly]:
    """Each near a bound of its own."""
    ids = [number * 7919 % 50 for number in range(600_000)]
    text = "abcd efgh " * 390_000
    message = [{"role": "user", "content": "abc"}]
    completion, chat = "/v1/completions", "/v1/chat/completions"
    many = {"n": 128, "max_tokens": 200, "ignore_eos": True}
    biases = {str(number): 1.0 for number in range(50)}
    digits, keys = [1] * 2_000_000, dict.fromkeys(map(str, range(40_000)), 1)

    def called(arguments: str) -> dict[str, Any]:
        calls = [{"type": "function", "function": {"name": "f", "arguments": arguments}}]
        return {"messages": [{"role": "assistant", "tool_calls": calls}]}

    def function(number: int) -> dict[str, Any]:
        kinds = {f"field{field}": {"type": "string"} for field in range(100)}
        return {"type": "function", "function": {"name": f"f{number}", "parameters": {"properties": kinds}}}

    return [
        Costly("600,000 token ids that fit", completion, {"prompt": ids, "max_tokens": 1}, seconds=3),
        Costly("1,024 prompts of ids", completion, {"prompt": [[1, 2, 3]] * 1024, "max_tokens": 1}),
        Costly("1,024 prompts of text", completion, {"prompt": ["abc"] * 1024, "max_tokens": 1}),
        Costly("1,024 prompts, client leaves", completion, {"prompt": [[1]] * 1024, "max_tokens": 9000}, seconds=2),
        Costly("128 outputs, 20 log-probabilities", completion, {"prompt": "abc", "logprobs": 20, **many}),
        Costly("the same in a chat", chat, {"messages": message, "logprobs": True, "top_logprobs": 20, **many}),
        Costly("the same as a stream", completion, {"prompt": "abc", "logprobs": 20, "stream": True, **many}),
        Costly("an echo with log-probabilities", completion, {"prompt": ids[:2000], "echo": True, "logprobs": 20}),
        Costly(
            "65,000 allowed ids, 128 outputs", completion, {"prompt": "a", "allowed_token_ids": ids[:65_000], **many}
        ),
        Costly("biases for 1,024 prompts", completion, {"prompt": [[1]] * 1024, "logit_bias": biases, "max_tokens": 2}),
        Costly("prompt ids beside 128 outputs", completion, {"prompt": ids[:9000], "return_token_ids": True, "n": 128}),
        Costly("a text that fits nowhere", completion, {"prompt": text}),
        Costly("a text of 3.9 MB to count", "/tokenize", {"prompt": text}),
        Costly("600,000 ids to read", "/detokenize", {"tokens": ids}),
        Costly("2,000,000 ids, refused", completion, {"prompt": digits}),
        Costly("the same in a list of lists", completion, {"prompt": [digits]}),
        Costly("the same in an unknown field", completion, {"prompt": "a", "foo": digits}),
        Costly("300,000 fields", completion, {f"{number}": 1 for number in range(300_000)}),
        Costly("40,000 keys in one field", chat, {"messages": message, "chat_template_kwargs": keys}),
        Costly("100,000 stop strings", completion, {"prompt": "a", "stop": ["ab"] * 100_000}),
        Costly("nesting without end", completion, {"prompt": "a", "foo": Raw(b"[" * 4_000_000)}),
        Costly("a text of escapes", completion, {"prompt": '\n",{[' * 460_000}),
        Costly("a million lists in a call's arguments", chat, called("[" + "[]," * 1_000_000 + "1]")),
        Costly("32,000 numbers in them", chat, called("[" + "1," * 32_000 + "1]")),
        Costly("128 functions of 100 fields", chat, {"messages": message, "tools": [function(n) for n in range(128)]}),
        Costly("4,096 messages", chat, {"messages": message * 4096, "max_tokens": 1}),
    ]


def serve(argv: list[str]) -> None:
    """support.api_server's server, which tells its long turns."""
    serving = Server.run

    async def watched(self: Server) -> Any:
        watcher = asyncio.create_task(watch())
        try:
            return await serving(self)
        finally:
            watcher.cancel()

    Server.run = watched  # type: ignore[method-assign]  # this process is the benchmark's own
    sys.argv = [sys.argv[0], *argv]
    api_server.main()


async def watch() -> None:
    """One line on stderr for each long turn."""
    while True:
        begun = time.thread_time()
        await asyncio.sleep(TICK_SECONDS)
        took = (time.thread_time() - begun) * 1000
        if took > 1:
            print(f"{MARK} {took:.1f}", file=sys.stderr, flush=True)


async def measure(wanted: list[str]) -> None:
    """Print one line for each request."""
    original = api_server.memory_command

    def command(fault: str, model: Path, *flags: str) -> list[str]:
        python, _, _, *rest = original(fault, model, *flags)
        return [python, __file__, "--serve", *rest]

    api_server.memory_command = command
    flags = ("--max-num-seqs", "256", "--max-num-batched-tokens", "4096", "--num-kv-blocks", "100000")
    with tempfile.TemporaryDirectory() as folder:
        async with api_server.memory_server(Path(folder), "fine", *flags, "--max-queue", "1024") as talk:
            for costly in make_requests():
                if not wanted or any(part in costly.name for part in wanted):
                    print(await measure_one(talk, costly), flush=True)


async def measure_one(talk: api_server.Talk, costly: Costly) -> str:
    """One line."""
    known = len(talk.server.log)
    data, outcome = json.encode(costly.body), "left"
    try:
        async with asyncio.timeout(costly.seconds):
            headers = {"Content-Type": "application/json"}
            async with talk.session.post(costly.path, data=data, headers=headers) as response:
                outcome = f"{response.status}, {len(await response.read())} bytes"
    except TimeoutError:
        await asyncio.sleep(1)
    await asyncio.sleep(SETTLE_SECONDS)
    turns = [float(line.split()[-1]) for line in talk.server.log[known:].splitlines() if line.startswith(MARK)]
    longest = max(turns, default=1.0)
    return f"{longest:6.1f} ms CPU{' TOO LONG' if longest > GOAL_MS else ''}: {costly.name} ({outcome})"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2:])
    else:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("names", nargs="*")
        asyncio.run(measure(parser.parse_args().names))
