"""Which requests of a step get guesses to check, and how many."""

from dataclasses import dataclass, field

from pagefleet_server.core.block_tables import BlockTables
from pagefleet_server.core.prompt_lookup import Drafter, SpeculationLimits
from pagefleet_server.core.request import Request
from pagefleet_server.core.step_plan import StepPlan


@dataclass(slots=True)
class SpeculationTotals:
    """Since start; all tokens."""

    num_drafts: int = 0
    """Times that a request got guesses in a step."""
    num_draft_tokens: int = 0
    accepted_by_place: list[int] = field(default_factory=list)
    """accepted_by_place[i]: how often the guess number i was right; their sum is the accepted ones."""


class Speculation:
    """Guesses are made when nobody computes or awaits a prompt and few sequences run; they take what the budgets and
    the open blocks leave, so that no request ever waits, loses its blocks or goes without a row for them."""

    def __init__(self, limits: SpeculationLimits | None, tables: BlockTables) -> None:
        self._limits = limits
        self._tables = tables
        num_places = 0 if limits is None else limits.num_tokens
        self.totals = SpeculationTotals(accepted_by_place=[0] * num_places)

    def applies(self, decodes: list[Request], *, num_running: int, num_waiting: int) -> bool:
        """Whether this step is one to guess in."""
        if self._limits is None or num_waiting:
            return False
        if any(request.siblings for request in decodes):
            return False  # the last of a prompt that others wait for, even if its own request was aborted
        return len(decodes) == num_running <= self._limits.max_num_seqs

    def draft(self, request: Request, plan: StepPlan, *, num_unplanned: int) -> tuple[int, ...]:
        """Guesses for a request that decodes. num_unplanned: decodes that have no row yet, this one among them; each
        may still need a token of the budget and a block."""
        if self._limits is None or request.num_pending:
            return ()
        known, size = request.num_computed + 1, self._tables.block_size
        num_blocks = self._tables.blocks_for(known) + max(0, self._tables.num_open - num_unplanned)
        room = min(
            request.sampling.max_tokens - request.num_generated - 1,  # the last token is drawn, never computed
            plan.budget - num_unplanned,
            plan.score_budget,
            num_blocks * size - known,
        )
        if room < 1:
            return ()
        if request.drafter is None:
            request.drafter = Drafter(self._limits)
        drafts = request.drafter.draft(request.token_ids, room)
        ends = request.sampling.stop_token_ids
        # Behind an end nothing is drawn; and before min_tokens an end is not drawn either.
        first_end = next((index for index, token in enumerate(drafts) if token in ends), len(drafts))
        return tuple(drafts[:first_end])

    def observe(self, request: Request, num_accepted: int) -> None:
        """What became of a request's guesses, before it takes in what was drawn."""
        if request.drafter is None or not request.num_drafted:
            return
        request.drafter.observe(request.num_drafted, num_accepted)
        self.totals.num_drafts += 1
        self.totals.num_draft_tokens += request.num_drafted
        for place in range(num_accepted):
            self.totals.accepted_by_place[place] += 1
