"""Steps that are run before anybody asks."""

from pagefleet_server.core.sampling_params import SamplingParams
from pagefleet_server.core.scheduler import MAX_SCORED_TOKENS
from pagefleet_server.core.step import ScheduledRequest, SchedulerOutput, TokenHistory
from pagefleet_server.settings import SchedulerSettings

DRAWN = SamplingParams(max_tokens=1, top_p=0.9, repetition_penalty=1.1, logprobs=20, prompt_logprobs=20)
"""Asks for all that takes memory. (Its random numbers do not matter.)"""
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


def one_row(*, position: int, block_size: int) -> SchedulerOutput:
    """A step of one token. Its whole context is one block, over and over: the work of a long one without its memory,
    whose first touch costs more than the step."""
    blocks = (1,) * (position // block_size + 1)
    request = ScheduledRequest("warm-up", (0,), position, blocks, True, GREEDY, pooled_rows=range(1))
    return SchedulerOutput(scheduled=(request,), num_decodes=1, num_tokens=1)


def largest_step(settings: SchedulerSettings, *, max_positions: int, block_size: int) -> tuple[SchedulerOutput, int]:
    """A step that takes as much memory as any will: all tokens, all sequences, each drawing, and as many scored tokens
    as a step may have. With it the blocks that it writes: 1 to that number."""
    num_decodes = settings.max_num_seqs - 1
    rest = max(1, min(settings.max_num_batched_tokens - num_decodes, max_positions - 1))
    num_scored = min(MAX_SCORED_TOKENS, rest - 1)
    num_blocks = num_decodes + -(-rest // block_size)
    history = TokenHistory((0,) * rest, rest)
    rows = [
        ScheduledRequest(str(index), (0,), 0, (1 + index,), True, DRAWN, history, pooled_rows=range(1))
        for index in range(num_decodes)
    ]
    rows.append(
        ScheduledRequest(
            "prompt",
            (0,) * rest,
            0,
            tuple(range(1 + num_decodes, 1 + num_blocks)),
            True,
            DRAWN,
            history,
            prompt_targets=(0,) * num_scored,
            pooled_rows=range(rest),
        )
    )
    return SchedulerOutput(tuple(rows), num_decodes + (rest == 1), num_decodes + rest), num_blocks
