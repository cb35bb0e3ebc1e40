"""Measures a running server and writes a profile for `pagefleet-sim --profile FILE`.

    python tools/calibrate.py http://127.0.0.1:8000 --name my-gpu --source "SmolLM2 on 2 cores of …" --out my-gpu.json

Prompts of several lengths, one at a time and each never seen before, tell what prompt tokens cost; streams side by
side, with short and long contexts, tell what decodes cost. Of repeated measurements the fastest counts: neighbours
only add. Run it while the server has nothing else to do. The limits that /metrics does not tell are given by flags.
"""

import argparse
import asyncio
import json
import math
import random
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from pagefleet_server.settings import HttpSettings, SchedulerSettings
from pagefleet_simulator.profile import Profile

SMALLEST_SECONDS = 1e-9
MIN_GAPS = 6
"""Gaps of each stream that a measurement of decodes needs."""
MAX_OUTPUT_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Prefill:
    """One prompt alone, with one token out."""

    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Decode:
    """Streams side by side."""

    rows: int
    context: float
    """Mean tokens of one stream."""
    seconds: float
    """Of a step."""


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Of the step time, as a Profile has them."""

    step_seconds: float
    prompt_token_seconds: float
    prompt_pair_seconds: float
    decode_token_seconds: float
    decode_pair_seconds: float


def fit(prefills: Sequence[Prefill], decodes: Sequence[Decode], max_batched_tokens: int) -> Coefficients:
    """Least squares over relative errors; no coefficient below zero.

    Raises ValueError when there are fewer than three measurements of either kind.
    """
    if len(prefills) < 3 or len(decodes) < 3:
        raise ValueError(f"{len(prefills)} prompts and {len(decodes)} decodes measured: at least 3 of each are needed")
    step, row, pair = _positive([(1.0, item.rows, item.rows * item.context) for item in decodes], decodes)
    steps = [math.ceil(item.tokens / max_batched_tokens) for item in prefills]
    rest = [
        Prefill(item.tokens, max(SMALLEST_SECONDS, item.seconds - step * count))
        for item, count in zip(prefills, steps, strict=True)
    ]
    token, prompt_pair = _positive([(item.tokens, item.tokens * (item.tokens + 1) / 2) for item in prefills], rest)
    return Coefficients(
        step_seconds=max(step, SMALLEST_SECONDS),
        prompt_token_seconds=max(token, SMALLEST_SECONDS),
        prompt_pair_seconds=prompt_pair,
        decode_token_seconds=max(row, SMALLEST_SECONDS),
        decode_pair_seconds=pair,
    )


def _positive(features: Sequence[tuple[float, ...]], measured: Sequence[Prefill | Decode]) -> list[float]:
    """Least squares with coefficients >= 0: those that come out below are left out, one at a time."""
    seconds = np.array([item.seconds for item in measured])
    matrix = np.array(features, dtype=float) / seconds[:, None]
    kept = list(range(matrix.shape[1]))
    while kept:
        found, *_ = np.linalg.lstsq(matrix[:, kept], np.ones(len(seconds)), rcond=None)
        if found.min() >= 0:
            break
        kept.pop(int(found.argmin()))
    result = [0.0] * matrix.shape[1]
    for index, value in zip(kept, found if kept else [], strict=True):
        result[index] = float(value)
    return result


class Server:
    """What is measured."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, seed: int) -> None:
        self._session, self._url, self._model = session, url, model
        self._random = random.Random(seed)

    def prompt(self, tokens: int) -> list[int]:
        """Token ids that no prefix cache knows."""
        return [self._random.randrange(1000, 20000) for _ in range(tokens)]

    async def prefill(self, tokens: int) -> float:
        """Seconds of one prompt and one token."""
        began = time.perf_counter()
        await self._ask({"prompt": self.prompt(tokens), "max_tokens": 1})
        return time.perf_counter() - began

    async def decode(self, rows: int, prompt_tokens: int) -> tuple[float, float]:
        """(seconds of a step, mean tokens of a stream) with `rows` streams that all decode: the median of the gaps.

        Raises RuntimeError when streams of MAX_OUTPUT_TOKENS never decode all at once.
        """
        output_tokens = 32
        while output_tokens <= MAX_OUTPUT_TOKENS:
            streams = await asyncio.gather(*(self._stream(prompt_tokens, output_tokens) for _ in range(rows)))
            begun, ended = max(times[0] for times in streams), min(times[-1] for times in streams)
            gaps = sorted(
                after - before
                for times in streams
                for before, after in pairwise(times)
                if begun <= before and after <= ended
            )
            if len(gaps) >= MIN_GAPS * rows:
                return gaps[len(gaps) // 2], prompt_tokens + output_tokens / 2
            output_tokens *= 2  # the first ones had ended before the last prompt was computed
        raise RuntimeError(f"{rows} streams of {MAX_OUTPUT_TOKENS} tokens never decoded all at once")

    async def _ask(self, body: dict[str, Any]) -> None:
        async with self._session.post(f"{self._url}/v1/completions", json=self._body(body)) as response:
            if response.status != 200:
                raise RuntimeError(f"{response.status}: {(await response.text())[:300]}")
            await response.read()

    async def _stream(self, prompt_tokens: int, output_tokens: int) -> list[float]:
        """When each token came."""
        body = self._body({"prompt": self.prompt(prompt_tokens), "max_tokens": output_tokens, "stream": True})
        times: list[float] = []
        async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
            if response.status != 200:
                raise RuntimeError(f"{response.status}: {(await response.text())[:300]}")
            async for line in response.content:
                if line.startswith(b"data: {"):
                    times.append(time.perf_counter())
        if not times:
            raise RuntimeError("a stream ended without a token")
        return times

    def _body(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"model": self._model, "temperature": 0, "ignore_eos": True, **body}


async def measure(options: argparse.Namespace) -> Profile:
    """Ask the server, fit, and put the profile together."""
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(
        headers=headers, timeout=timeout, connector=aiohttp.TCPConnector(limit=0)
    ) as session:
        model = (await _json(session, f"{options.url}/v1/models"))["data"][0]
        config = _cache_config(await _text(session, f"{options.url}/metrics"))
        longest = int(model.get("max_model_len") or 2048)
        server = Server(session, options.url, model["id"], options.seed)
        await server.prefill(16)
        prefills = []
        for tokens in [length for length in (16, 64, 128, 256, 512, 1024, 1536) if length < longest]:
            best = min([await server.prefill(tokens) for _ in range(options.repeats)])
            prefills.append(Prefill(tokens, best))
            print(f"prompt of {tokens} tokens: {best:.4f} s", file=sys.stderr)
        decodes = []
        for prompt_tokens in (32, min(1024, longest // 2)):
            for rows in (1, 2, 4, 8):
                seconds, context = min([await server.decode(rows, prompt_tokens) for _ in range(options.repeats)])
                decodes.append(Decode(rows, context, seconds))
                print(f"{rows} streams at {context:.0f} tokens: {seconds:.4f} s a step", file=sys.stderr)
    found = fit(prefills, decodes, options.max_num_batched_tokens)
    return Profile(
        name=options.name,
        source=options.source,
        num_blocks=config["num_gpu_blocks"],
        block_size=config["block_size"],
        max_model_len=longest,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_step_seconds=options.max_step_ms / 1000 or None,
        max_queue=options.max_queue,
        devices=options.devices,
        step_seconds=_digits(found.step_seconds),
        prompt_token_seconds=_digits(found.prompt_token_seconds),
        prompt_pair_seconds=_digits(found.prompt_pair_seconds),
        decode_token_seconds=_digits(found.decode_token_seconds),
        decode_pair_seconds=_digits(found.decode_pair_seconds),
    )


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


async def _json(session: aiohttp.ClientSession, url: str) -> Any:
    return json.loads(await _text(session, url))


async def _text(session: aiohttp.ClientSession, url: str) -> str:
    async with session.get(url) as response:
        if response.status != 200:
            raise RuntimeError(f"{url}: {response.status}")
        return await response.text()


def _cache_config(metrics: str) -> dict[str, int]:
    line = next((line for line in metrics.splitlines() if line.startswith("vllm:cache_config_info{")), "")
    found = {name: int(value) for name, value in re.findall(r'(block_size|num_gpu_blocks)="(\d+)"', line)}
    if len(found) != 2:
        raise RuntimeError("/metrics has no vllm:cache_config_info with block_size and num_gpu_blocks")
    return found


def main() -> int:
    """Exit code 1 when the server cannot be measured."""
    scheduler = SchedulerSettings()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="of the server, like http://127.0.0.1:8000")
    parser.add_argument("--name", required=True)
    parser.add_argument("--source", required=True, help="model, hardware and circumstances, in a sentence")
    parser.add_argument("--out", type=Path, help="file to write; else it is printed")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each kind; the fastest counts (3)")
    parser.add_argument("--max-num-seqs", type=int, default=scheduler.max_num_seqs, help="as the server was started")
    parser.add_argument("--max-num-batched-tokens", type=int, default=scheduler.max_num_batched_tokens)
    parser.add_argument("--max-step-ms", type=float, default=scheduler.max_step_ms)
    parser.add_argument("--max-queue", type=int, default=HttpSettings().max_queue)
    parser.add_argument("--devices", type=int, default=1, help="accelerators of one replica (1)")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.url = options.url.rstrip("/")
    try:
        text = asyncio.run(measure(options)).to_json()
    except (OSError, aiohttp.ClientError, RuntimeError, ValueError, KeyError, IndexError) as error:
        print(f"calibrate: {error!r}", file=sys.stderr)
        return 1
    if options.out is None:
        print(text, end="")
    else:
        options.out.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
