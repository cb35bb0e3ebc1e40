"""One step while it is being put together."""

from dataclasses import dataclass, field

from pagefleet_server.core.request import Request
from pagefleet_server.core.step import Fork, ScheduledRequest, SchedulerOutput
from pagefleet_server.core.step_time import StepWork


@dataclass(slots=True)
class StepPlan:
    """Rows in the order of their kind: decodes, then prompt chunks."""

    step_id: int
    budget: int
    """Tokens that may still be added."""
    score_budget: int
    """Rows of logits over the vocabulary that the step may have beyond one for each sequence: prompt tokens to score,
    guesses to check."""
    num_prompts: int = 0
    """Prompts that are being computed, or that wait and have a seat."""
    decodes: list[ScheduledRequest] = field(default_factory=list)
    chunks: list[ScheduledRequest] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    drawing: list[Request] = field(default_factory=list)
    """Requests that get a token, forks among them."""
    scoring: list[Request] = field(default_factory=list)
    """Requests of which this step scores or pools prompt tokens."""
    max_seconds: float | None = None
    """Bound of the predicted time; set before the first prompt chunk when decodes are in the step."""
    work: StepWork = field(default_factory=lambda: StepWork(0, 0))
    """What the rows so far cost."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return self.work.num_tokens

    @property
    def is_empty(self) -> bool:
        """True when nothing is to be computed."""
        return not self.num_tokens

    def add(
        self,
        request: Request,
        token_ids: tuple[int, ...],
        *,
        start: int,
        draws: bool,
        forks: list[Request],
        num_drafts: int = 0,
        scored_from: int = 0,
        prompt_targets: tuple[int, ...] = (),
        pooled_rows: range = range(0),
    ) -> None:
        """A row for the request, whose block table covers it; `forks` draw from the same logits. The last num_drafts of
        token_ids are guesses; each needs a row of logits, as a scored token does."""
        self.score_budget -= num_drafts
        if prompt_targets or pooled_rows:
            self.scoring.append(request)
            self.score_budget -= len(prompt_targets)
        if draws:
            self.drawing.append(request)
            self.drawing.extend(forks)
        row = ScheduledRequest(
            request_id=request.request_id,
            token_ids=token_ids,
            start=start,
            block_ids=tuple(request.block_ids),
            sample=draws,
            sampling=request.sampling,
            history=request.history() if draws else None,
            prompt_targets=prompt_targets,
            scored_from=scored_from,
            pooled_rows=pooled_rows,
            forks=tuple(Fork(fork.request_id, fork.sampling, fork.history()) for fork in forks),
            num_drafts=num_drafts,
        )
        count = len(token_ids)
        (self.decodes if draws and count == 1 else self.chunks).append(row)
        self.budget -= count
        self.work = self.work.with_chunk(start, count)

    def output(self) -> SchedulerOutput:
        """The finished step."""
        return SchedulerOutput(
            scheduled=(*self.decodes, *self.chunks),
            num_decodes=len(self.decodes),
            num_tokens=self.num_tokens,
            step_id=self.step_id,
            copies=tuple(self.copies),
        )
