"""A runner without a model: it keeps real KV slots (one token id each) and draws by hashing what it reads back.

So any fault in block tables, prefix sharing, preemption or fences changes the tokens, and the oracle `expected_tokens`
knows what they must be from the prompt alone.
"""

import zlib
from array import array
from collections.abc import Sequence

from pagefleet_server.core.request import PLACEHOLDER_TOKEN_ID
from pagefleet_server.core.step import DrawnToken, ScheduledRequest, SchedulerOutput, StepResult, TokenLogprobs

VOCAB_SIZE = 50
POISON_TOKEN_ID = 49
"""With poison=True the model fails on every context that holds it."""


def next_token(context: Sequence[int], seed: int = 0, *, loops: bool = False) -> int:
    """The token that this "model" draws after a context. One that loops goes round in a circle of three tokens, but for
    one token in eight: what has been said before is a good guess, and each token still depends on all before it."""
    drawn = zlib.crc32(array("q", [seed, *context]).tobytes())
    if loops and (drawn >> 8) % 8:
        return (context[-1] // 3 * 3 + (context[-1] + 1) % 3) % VOCAB_SIZE
    return drawn % VOCAB_SIZE


def score(context: Sequence[int], token: int) -> TokenLogprobs:
    """How likely this "model" finds a token after a context."""
    return TokenLogprobs(-float(next_token([*context, token])), 1, ())


def told(row: ScheduledRequest, token: int) -> TokenLogprobs | None:
    """What this "model" says of a token it has drawn, when it is asked: all tokens are as likely."""
    count = row.sampling.logprobs
    return None if count is None else TokenLogprobs(-1.0, 1, tuple((other, -1.0) for other in range(count)))


def expected_scores(prompt: Sequence[int]) -> list[TokenLogprobs]:
    """What a prompt's tokens after the first must get."""
    return [score(prompt[:index], prompt[index]) for index in range(1, len(prompt))]


def expected_tokens(prompt: Sequence[int], count: int, seed: int = 0, *, loops: bool = False) -> list[int]:
    """What a request with this prompt must get."""
    context = list(prompt)
    for _ in range(count):
        context.append(next_token(context, seed, loops=loops))
    return context[len(prompt) :]


class KvMemoryRunner:
    """Executes steps in order; writes all rows before it reads any, as every layer of a model does."""

    def __init__(self, *, num_blocks: int, block_size: int, poison: bool = False, loops: bool = False) -> None:
        self.block_size = block_size
        self._loops = loops
        self._poison = poison
        self.slots: list[int | None] = [None] * ((num_blocks + 1) * block_size)
        self.num_rows_computed = 0
        self._last_drawn: dict[str, int] = {}

    def execute(self, output: SchedulerOutput) -> StepResult:
        sources, destinations = [a for a, _ in output.copies], [b for _, b in output.copies]
        assert len(set(destinations)) == len(destinations)
        assert not set(destinations) & set(sources)
        for source, destination in output.copies:
            for offset in range(self.block_size):
                self.slots[destination * self.block_size + offset] = self.slots[source * self.block_size + offset]
        inputs: list[list[int]] = []
        for row in output.scheduled:
            tokens = [self._last_drawn[row.request_id] if t == PLACEHOLDER_TOKEN_ID else t for t in row.token_ids]
            inputs.append(tokens)
            for offset, token in enumerate(tokens):
                self.slots[self._slot(row.block_ids, row.start + offset)] = token
                self.num_rows_computed += 1
        sampled: dict[str, int] = {}
        scores: dict[str, list[TokenLogprobs]] = {}
        failed: dict[str, str] = {}
        logprobs: dict[str, TokenLogprobs] = {}
        further: dict[str, list[DrawnToken]] = {}
        for row, tokens in zip(output.scheduled, inputs, strict=True):
            context: list[int] = []
            for position in range(row.start + len(tokens)):
                token_at = self.slots[self._slot(row.block_ids, position)]
                assert token_at is not None, f"{row.request_id} reads position {position}, which nobody wrote"
                context.append(token_at)
            assert context[row.start :] == tokens, f"{row.request_id}: another row wrote over its KV"
            if self._poison and POISON_TOKEN_ID in context and (row.sample or row.prompt_targets):
                failed |= dict.fromkeys((row.request_id, *(fork.request_id for fork in row.forks)), "poisoned")
                continue
            if row.prompt_targets:
                scores[row.request_id] = [
                    score(context[: row.start + row.scored_from + index + 1], target)
                    for index, target in enumerate(row.prompt_targets)
                ]
            if row.sample:
                first, *others = self._draw(context, row)
                sampled[row.request_id] = first
                further[row.request_id] = [DrawnToken(token, told(row, token)) for token in others]
                if (first_told := told(row, first)) is not None:
                    logprobs[row.request_id] = first_told
            for fork in row.forks:
                assert row.sample and not row.num_drafts
                sampled[fork.request_id] = token = next_token(context, fork.sampling.seed, loops=self._loops)
                if (fork_told := told(row, token)) is not None:
                    logprobs[fork.request_id] = fork_told
        self._last_drawn = sampled | dict.fromkeys(failed, POISON_TOKEN_ID)
        return StepResult(sampled, logprobs=logprobs, prompt_logprobs=scores, failed=failed, further=further)

    def _draw(self, context: Sequence[int], row: ScheduledRequest) -> list[int]:
        """One token, and one more behind each guess that was right."""
        known = len(context) - row.num_drafts
        drawn: list[int] = []
        for guess in (*context[known:], None):
            drawn.append(next_token(context[: known + len(drawn)], row.sampling.seed, loops=self._loops))
            if drawn[-1] != guess:
                break
        return drawn

    def _slot(self, block_ids: Sequence[int], position: int) -> int:
        block_id = block_ids[position // self.block_size]
        assert block_id != 0, "the null block is in use"
        return block_id * self.block_size + position % self.block_size
