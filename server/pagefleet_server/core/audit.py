"""The scheduler's conservation laws, beyond those of its block tables."""

from collections.abc import Iterable, Sequence

from pagefleet_server.core.block_tables import BlockTables
from pagefleet_server.core.request import Request, RequestState


class AuditError(Exception):
    """A law does not hold: a fault of the program."""


def check_requests(
    known: Iterable[str], running: Sequence[Request], waiting: Sequence[Request], tables: BlockTables, *, max_seats: int
) -> None:
    """Raise AuditError unless every known request is in exactly one place with what its state allows."""
    ranks = [request.rank for request in running]
    if ranks != sorted(set(ranks)):
        raise AuditError(f"running requests out of order: {ranks}")
    if sum(request.num_seats for request in running) > max_seats:
        raise AuditError(f"more than {max_seats} sequences run")
    present: list[str] = []
    for request in (*running, *waiting):
        present += [request.request_id] * (not request.is_muted)
        present += [sibling.request_id for sibling in request.siblings]
        if not request.num_seats:
            raise AuditError(f"request {request.request_id} computes for nobody")
    if sorted(present) != sorted(known):
        raise AuditError(f"requests lost or in two places: {sorted(present)} against {sorted(known)}")
    for request in running:
        held, wanted = len(request.block_ids), tables.blocks_for(request.num_computed + request.num_drafted)
        if request.state is not RequestState.RUNNING or held != wanted:
            raise AuditError(f"request {request.request_id}: {held} blocks for {request.num_computed} tokens")
        if not 0 <= request.num_pending <= 2 or request.num_remaining < 0:
            raise AuditError(f"request {request.request_id}: {request.num_pending} tokens pending")
        if request.num_drafted and (request.num_pending != 1 or request.num_computed != request.num_tokens):
            raise AuditError(f"request {request.request_id}: guesses that no draw checks")
        if request.num_registered * tables.block_size > request.num_computed:
            raise AuditError(f"request {request.request_id}: the cache knows blocks of tokens that are not computed")
    for request in (*waiting, *(sibling for leader in (*running, *waiting) for sibling in leader.siblings)):
        if request.block_ids or request.promised_blocks or request.state not in _QUEUED:
            raise AuditError(f"waiting request {request.request_id} holds blocks or is {request.state.value}")


_QUEUED = (RequestState.WAITING, RequestState.PREEMPTED)
