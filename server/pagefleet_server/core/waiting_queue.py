"""Requests that wait for blocks, in the order in which they get in."""

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator

from pagefleet_server.core.request import Request


def by_order(request: Request) -> int:
    """Sort key: the most important first."""
    return request.order


class WaitingQueue:
    """Preempted requests first, by their order; then the others as they came. O(1) but for preempted ones."""

    def __init__(self) -> None:
        self._preempted: list[Request] = []
        self._fresh: OrderedDict[str, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._preempted) + len(self._fresh)

    def __iter__(self) -> Iterator[Request]:
        yield from self._preempted
        yield from self._fresh.values()

    def add(self, request: Request) -> None:
        """A new request goes to the end."""
        self._fresh[request.request_id] = request

    def put_back(self, request: Request) -> None:
        """A preempted request goes before all new ones."""
        insort(self._preempted, request, key=by_order)

    def first(self) -> Request | None:
        """Who gets in next; stays in the queue."""
        if self._preempted:
            return self._preempted[0]
        return next(iter(self._fresh.values()), None)

    def remove(self, request: Request) -> None:
        """Take it out, wherever it is. Raises KeyError when it is not here."""
        if self._fresh.pop(request.request_id, None) is not None:
            return
        for index, waiting in enumerate(self._preempted):
            if waiting is request:
                del self._preempted[index]
                return
        raise KeyError(request.request_id)
