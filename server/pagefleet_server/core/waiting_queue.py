"""Requests that wait for blocks, in the order in which they get in.

By priority first (the smaller number is the more important). Within a priority: preempted requests by their rank,
then the tenant that was served least, and of one tenant first come, first served. "Served" is start-time fair queueing
over tokens (Goyal, Vin, Cheng 1996; per tenant as in Sheng et al., "Fairness in Serving Large Language Models", 2024):
a tenant that comes back from idleness starts level with the one being served, neither with a debt forgiven while it
had requests, nor with credit for having been away.
"""

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator

from pagefleet_server.core.request import Request, RequestState

MAX_IDLE_TENANTS = 4096
"""Tenants without waiting requests whose account is kept."""


def by_rank(request: Request) -> tuple[int, int]:
    """Sort key: the most important first."""
    return request.rank


class _Level:
    """The requests of one priority."""

    def __init__(self) -> None:
        self.preempted: list[Request] = []
        self.tenants: dict[str, OrderedDict[str, Request]] = {}

    def __bool__(self) -> bool:
        return bool(self.preempted or self.tenants)

    def __iter__(self) -> Iterator[Request]:
        yield from self.preempted
        for queue in self.tenants.values():
            yield from queue.values()

    def heads(self) -> Iterator[Request]:
        """The first of each tenant's new requests."""
        return (next(iter(queue.values())) for queue in self.tenants.values())


class WaitingQueue:
    """first() is O(tenants), the rest O(1) but for preempted requests."""

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}
        self._count = 0
        self._served: dict[str, float] = {}
        self._queued: dict[str, int] = {}  # tenant -> its fresh requests in all levels
        self._level_now = 0.0  # what the tenant being served had when its last request got in

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Request]:
        for level in self._levels.values():
            yield from level

    @property
    def num_accounts(self) -> int:
        """Tenants whose served tokens are remembered."""
        return len(self._served)

    def add(self, request: Request) -> None:
        """A new request goes behind its tenant's others."""
        tenant = request.tenant
        if tenant not in self._queued:
            self._queued[tenant] = 0
            self._served[tenant] = max(self._served.get(tenant, 0.0), self._level_now)
        self._queued[tenant] += 1
        level = self._levels.setdefault(request.priority, _Level())
        level.tenants.setdefault(tenant, OrderedDict())[request.request_id] = request
        self._count += 1

    def put_back(self, request: Request) -> None:
        """A preempted request goes before all new ones of its priority."""
        insort(self._levels.setdefault(request.priority, _Level()).preempted, request, key=by_rank)
        self._count += 1

    def first(self) -> Request | None:
        """Who gets in next; stays in the queue."""
        if not self._levels:
            return None
        level = self._levels[min(self._levels)]
        if level.preempted:
            return level.preempted[0]
        return min(level.heads(), key=lambda head: (self._served[head.tenant], head.number))

    def oldest_since(self) -> float | None:
        """Since when the longest waiting one waits; None when nobody does. O(tenants + preempted): of one tenant's new
        requests the first has come first."""
        first = (head for level in self._levels.values() for head in (*level.preempted, *level.heads()))
        return min((request.waiting_since for request in first), default=None)

    def remove(self, request: Request) -> None:
        """Take it out, wherever it is. Raises KeyError when it is not here."""
        level = self._levels[request.priority]
        if request.state is RequestState.PREEMPTED:
            position = next((i for i, waiting in enumerate(level.preempted) if waiting is request), None)
            if position is None:
                raise KeyError(request.request_id)
            del level.preempted[position]
        else:
            queue = level.tenants[request.tenant]
            del queue[request.request_id]
            if not queue:
                del level.tenants[request.tenant]
            self._queued[request.tenant] -= 1
            if not self._queued[request.tenant]:
                del self._queued[request.tenant]
                self._forget_idle_tenants()
        if not level:
            del self._levels[request.priority]
        self._count -= 1

    def admit(self, request: Request) -> None:
        """Take out the request that gets in: its tenant is the one being served now."""
        self.remove(request)
        self._level_now = max(self._level_now, self._served.get(request.tenant, 0.0))

    def charge(self, tenant: str, num_tokens: int) -> None:
        """The tenant got so many tokens computed."""
        self._served[tenant] = self._served.get(tenant, self._level_now) + num_tokens

    def _forget_idle_tenants(self) -> None:
        """An account at or below the level of the one being served says nothing; a flood of tenants is cut off."""
        if len(self._served) - len(self._queued) <= MAX_IDLE_TENANTS:
            return
        self._served = {tenant: served for tenant, served in self._served.items() if tenant in self._queued}
