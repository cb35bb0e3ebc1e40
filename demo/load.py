"""A bounded load of streaming chats, and one question: what a client of the Service sees."""

import asyncio
import json
from types import TracebackType

import aiohttp

PROMPT = "Tell me a long story about a small robot who learns to paint. "
RETRIES = 20
STREAM_SECONDS = 180.0


async def ask(url: str, question: str) -> str:
    """One greedy chat completion, not streamed. Raises RuntimeError when there is no answer."""
    body = {
        "model": "smollm2-135m",
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 32,
        "temperature": 0,
    }
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session,
            session.post(f"{url}/v1/chat/completions", json=body) as response,
        ):
            text = await response.text()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise RuntimeError(f"the question has no answer: {error!r}") from error
    else:
        if response.status != 200:
            raise RuntimeError(f"the question was answered with {response.status}: {text}")
        return str(json.loads(text)["choices"][0]["message"]["content"])


class Load:
    """`streams` clients, each opening one stream after another until the context ends; then open streams finish."""

    def __init__(self, url: str, *, streams: int, max_tokens: int, prompt_repeats: int = 1) -> None:
        self._url = url
        self._streams = streams
        self._max_tokens = max_tokens
        self._prompt = PROMPT * prompt_repeats
        self._stopping = asyncio.Event()
        self._clients: list[asyncio.Task[None]] = []
        self.counts = {"opened": 0, "finished": 0, "broken": 0, "retried": 0, "tokens": 0}

    async def __aenter__(self) -> "Load":
        self._clients = [asyncio.create_task(self._client(number)) for number in range(self._streams)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        if kind is not None:
            for client in self._clients:
                client.cancel()
        await asyncio.gather(*self._clients, return_exceptions=kind is not None)

    async def _client(self, number: int) -> None:
        timeout = aiohttp.ClientTimeout(total=STREAM_SECONDS)
        while not self._stopping.is_set():
            # A connection each: the Service picks a pod per connection.
            async with aiohttp.ClientSession(timeout=timeout) as session:
                for _ in range(RETRIES):
                    if await self._stream(session, number):
                        break
                    self.counts["retried"] += 1
                    await asyncio.sleep(1)

    async def _stream(self, session: aiohttp.ClientSession, number: int) -> bool:
        """One stream to its end. False when the server asked to come back later (503 before anything was sent)."""
        body = {
            "messages": [{"role": "user", "content": f"{self._prompt}Chapter {number}:"}],
            "max_tokens": self._max_tokens,
            "ignore_eos": True,
            "stream": True,
            "temperature": 0.8,
            "seed": number,
        }
        finished = False
        opened = False
        try:
            async with session.post(f"{self._url}/v1/chat/completions", json=body) as response:
                if response.status in (429, 503):
                    return False
                self.counts["opened"] += 1
                opened = True
                if response.status != 200:
                    raise RuntimeError(f"a stream was refused with {response.status}: {await response.text()}")
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        event = json.loads(line[6:])
                        if "error" in event:
                            break
                        self.counts["tokens"] += 1
                    finished = finished or line.startswith(b"data: [DONE]")
        except aiohttp.ClientConnectorError:
            if not opened:
                return False
        except (aiohttp.ClientError, TimeoutError) as error:
            print(f"stream {number} broke: {error!r}", flush=True)
        if not opened:
            self.counts["opened"] += 1
        self.counts["finished" if finished else "broken"] += 1
        return True
