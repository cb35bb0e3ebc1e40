"""How much of a prompt a step computes."""

from pagefleet_server.core.request import Request
from pagefleet_server.core.step_plan import StepPlan
from pagefleet_server.core.step_time import StepTimeModel, StepWork

MIN_CHUNK_TOKENS = 16
"""Of the first prompt in a step, whatever the step-time model says: prompts must get in."""
PROMPT_WEIGHT = 4.0
"""Streams that one prompt outweighs: a first token is waited for longest, and a small chunk pays for the rows of all
streams again."""
MAX_STRETCH = 6.0
"""Of the bound on a step's time."""


class ChunkPolicy:
    """By the token budget; by the rows of logits that scoring a prompt needs; and, beside decodes, by time.

    The bound is for the streams: a longer step holds up each of them a little, while larger chunks compute prompts in
    less time altogether, so that everybody who waits for a first token gets it sooner. With PROMPT_WEIGHT streams to
    one prompt, or more, the bound holds as it is; with fewer it stretches by as much, up to MAX_STRETCH.
    """

    def __init__(self, max_step_seconds: float | None) -> None:
        self._max_step_seconds = max_step_seconds
        self._step_time = StepTimeModel()

    def observe(self, work: StepWork, seconds: float) -> None:
        """A step took so long."""
        self._step_time.observe(work, seconds)

    def size(self, request: Request, plan: StepPlan) -> int:
        """Tokens of the request for this step; 0: none. Decodes in the step bound its time, though MIN_CHUNK_TOKENS of
        one prompt always get in."""
        count = min(request.num_remaining, plan.budget)
        if request.num_to_score:
            count = min(count, max(0, request.num_scored - request.num_computed) + plan.score_budget)
        if self._max_step_seconds is None or not plan.decodes:
            return count
        if plan.max_seconds is None:
            decodes_only = self._step_time.predict(plan.work)
            if decodes_only is None:
                return count
            stretch = min(MAX_STRETCH, max(1.0, PROMPT_WEIGHT * plan.num_prompts / len(plan.decodes)))
            plan.max_seconds = max(self._max_step_seconds * stretch, 2 * decodes_only)
        fitting = self._step_time.largest_chunk(plan.work, request.num_computed, plan.max_seconds)
        if fitting is None:
            return count
        return min(count, fitting if plan.chunks else max(fitting, MIN_CHUNK_TOKENS))
