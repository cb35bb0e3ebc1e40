"""Guesses the next tokens of a sequence: those that followed its last ones when they stood there before.

Prompt lookup decoding (A. Saxena, 2023); also "n-gram" speculation. Right for texts that repeat themselves or their
prompt: code, summaries, extraction, answers about a document.
"""

from collections.abc import Sequence
from dataclasses import dataclass

MAX_GENERATION = 32768
"""N-grams of one generation of the index; two are kept, so the last so many are findable at least."""
MAX_PAUSE = 15
"""Steps without a draft after drafts that were all wrong, at most."""


@dataclass(frozen=True, slots=True)
class SpeculationLimits:
    """When and how far to guess. Raises ValueError on values that could never work."""

    num_tokens: int
    """Draft tokens of one request in one step at most, >= 1."""
    min_ngram: int = 2
    """Last tokens that must have stood there before, at least, >= 1."""
    max_ngram: int = 4
    """Last tokens to look for first, >= min_ngram: longer matches are better guesses."""
    max_num_seqs: int = 4
    """Only while at most so many sequences run, >= 1: a full batch has no idle arithmetic to spend on guesses."""

    def __post_init__(self) -> None:
        for name in ("num_tokens", "min_ngram", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_ngram < self.min_ngram:
            raise ValueError(f"max_ngram is {self.max_ngram}, below min_ngram {self.min_ngram}; raise it")


class NgramIndex:
    """Where each n-gram of a growing sequence stood last. O(sizes) per token, in time and, up to 2 * MAX_GENERATION
    n-grams, in memory."""

    def __init__(self, sizes: range, *, max_generation: int = MAX_GENERATION) -> None:
        self._sizes = sizes
        self._max_generation = max_generation
        self._young: dict[tuple[int, ...], int] = {}
        self._old: dict[tuple[int, ...], int] = {}
        self._next = sizes.start  # the first position that is not indexed as a follower

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take in what is new of the sequence, which only ever grows."""
        for position in range(self._next, len(token_ids)):
            for size in self._sizes:
                if size <= position:
                    self._young[tuple(token_ids[position - size : position])] = position
            if len(self._young) >= self._max_generation:
                self._old, self._young = self._young, {}
        self._next = max(self._next, len(token_ids))

    def find(self, token_ids: Sequence[int]) -> int | None:
        """The latest position behind the sequence's longest known ending; None when no ending stood there before."""
        for size in reversed(self._sizes):
            if size < len(token_ids):
                ending = tuple(token_ids[-size:])
                position = self._young.get(ending, self._old.get(ending))
                if position is not None:
                    return position
        return None


class Drafter:
    """One request's guesses: as many as have lately been right."""

    def __init__(self, limits: SpeculationLimits) -> None:
        self._index = NgramIndex(range(limits.min_ngram, limits.max_ngram + 1))
        self._limit = limits.num_tokens
        self._wanted = limits.num_tokens
        self._num_misses = 0  # drafts in a row that were wrong from their first token on
        self._pause = 0  # steps to sit out
        self.num_drafted = 0
        """Tokens, so far."""
        self.num_accepted = 0
        """Of these, tokens that were right."""

    def draft(self, token_ids: Sequence[int], room: int) -> list[int]:
        """At most `room` tokens; often none. One that would follow the draft itself is read from it: loops go on."""
        if self._pause:
            self._pause -= 1
            return []
        self._index.extend(token_ids)
        found = self._index.find(token_ids)
        if found is None:
            return []
        known, guesses = len(token_ids), list[int]()
        for position in range(found, found + min(self._wanted, room)):
            guesses.append(token_ids[position] if position < known else guesses[position - known])
        return guesses

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """What became of a draft: all right doubles the next one, otherwise it is one longer than what was right; none
        right makes a pause, twice as long each time."""
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        if num_accepted == num_drafted:
            self._wanted = min(self._limit, 2 * max(self._wanted, 1))
        else:
            self._wanted = min(self._limit, num_accepted + 1)
        self._num_misses = 0 if num_accepted else self._num_misses + 1
        self._pause = min(MAX_PAUSE, 2**self._num_misses - 1)
