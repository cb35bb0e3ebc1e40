"""Workloads A to E: what is asked, how many at a time. Pure: the same seed gives the same requests."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class Request:
    """One request: greedy, ignoring the model's own end, so that every server computes the same amount."""

    prompt: str
    num_prompt: int
    """Tokens of it."""
    num_output: int
    """Tokens to generate, exactly."""
    at: float | None = None
    """Seconds after the start at which it is sent; None: as soon as the concurrency allows."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order of sending."""

    name: str
    requests: tuple[Request, ...]
    concurrency: int
    """Requests open at once; those with a time of their own are not held back by it."""
    num_shared: int = 0
    """Tokens that all prompts begin with."""

    @property
    def num_output(self) -> int:
        """Tokens that all answers together must have."""
        return sum(request.num_output for request in self.requests)


Words = Sequence[str]
WHAT = {
    "A": "decode: 64 prompts of 64 tokens, 128 out, 16 at a time",
    "B": "prefill: 32 prompts of 1,000 tokens, 16 out, 8 at a time",
    "C": "shared prefix: 64 requests, the same 800 tokens and 30 own, 32 out, 16 at a time",
    "D": "single stream: 5 requests of 64 tokens, 128 out, one at a time",
    "E": "open: Poisson arrivals, 2 requests/s for 60 s, prompts of 215 and outputs of 62 tokens in the mean",
}


def one_token_words(tokenizer: Tokenizer, count: int = 4000) -> list[str]:
    """Lower-case words that are one token each behind a space, so that a prompt of n words has n tokens."""
    found = []
    for token in sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__):
        word = token[1:]
        if token.startswith("Ġ") and len(word) > 2 and word.isascii() and word.islower() and word.isalpha():
            if len(tokenizer.encode(" " + word, add_special_tokens=False).ids) == 1:
                found.append(word)
            if len(found) == count:
                break
    if len(found) < 100:
        raise ValueError(f"the tokenizer has only {len(found)} words of one token; prompts of exact length need 100")
    return found


def build(name: str, words: Words, seed: int) -> Workload:
    """The workload of that name. Other seeds have other words, so that no cache helps from round to round."""
    if name not in WHAT:
        raise ValueError(f"workload {name!r}: expected one of {', '.join(WHAT)}")
    rng = random.Random(f"{name}{seed}")

    def text(length: int) -> str:
        return "".join(" " + rng.choice(words) for _ in range(length))

    makers: dict[str, Callable[[], Workload]] = {
        "A": lambda: Workload("A", tuple(Request(text(64), 64, 128) for _ in range(64)), 16),
        "B": lambda: Workload("B", tuple(Request(text(1000), 1000, 16) for _ in range(32)), 8),
        "C": lambda: _shared_prefix(text),
        "D": lambda: Workload("D", tuple(Request(text(64), 64, 128) for _ in range(5)), 1),
        "E": lambda: _open_arrivals(rng, text),
    }
    return makers[name]()


def shortened(workload: Workload, parts: int = 4) -> Workload:
    """The first of so many parts: as many requests as are open at once, at least; of those with a time of their own
    the ones that come in that part of it."""
    requests = workload.requests
    count = max(workload.concurrency, len(requests) // parts)
    last = requests[-1].at
    if last is not None:
        count = max(1, sum((request.at or 0.0) <= last / parts for request in requests))
    return replace(workload, requests=requests[:count])


def _shared_prefix(text: Callable[[int], str]) -> Workload:
    prefix = text(800)
    return Workload("C", tuple(Request(prefix + text(30), 830, 32) for _ in range(64)), 16, 800)


def _open_arrivals(rng: random.Random, text: Callable[[int], str]) -> Workload:
    requests, now = [], rng.expovariate(2.0)
    while now < 60.0:
        num_prompt = _length(rng, 215, 0.8, 16, 1000)
        requests.append(Request(text(num_prompt), num_prompt, _length(rng, 62, 0.7, 8, 256), now))
        now += rng.expovariate(2.0)
    return Workload("E", tuple(requests), len(requests))


def _length(rng: random.Random, mean: float, sigma: float, low: int, high: int) -> int:
    """Log-normal, cut to bounds."""
    return max(low, min(high, round(rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma))))
