"""What a policy is, and what several of them share."""

from collections import deque
from typing import Protocol

from pagefleet_operator.fleet import Fleet, PodState


class Policy(Protocol):
    """Remembers what it must between decisions; one object serves one run."""

    @property
    def name(self) -> str:
        """Short, for tables."""

    @property
    def period_seconds(self) -> float:
        """Time between two decisions."""

    def decide(self, fleet: Fleet, now: float) -> int:
        """The wanted replicas; the simulation bounds them by minimum and maximum."""


class Window:
    """The values of the last seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._items: deque[tuple[float, float]] = deque()

    def add(self, now: float, value: float) -> None:
        """Remember a value, forget the old ones."""
        self._items.append((now, value))
        while self._items and self._items[0][0] <= now - self._seconds:
            self._items.popleft()

    @property
    def mean(self) -> float:
        """Of what is there; there must be something."""
        return sum(value for _, value in self._items) / len(self._items)

    @property
    def maximum(self) -> float:
        """Of what is there; there must be something."""
        return max(value for _, value in self._items)

    def __len__(self) -> int:
        return len(self._items)


def num_ready(fleet: Fleet) -> int:
    """Pods that serve, whether they answer scrapes or not."""
    return sum(pod.state in (PodState.READY, PodState.UNREACHABLE) for pod in fleet.pods)


def num_pending(fleet: Fleet) -> int:
    """Wanted replicas that do not serve yet."""
    return max(0, fleet.replicas - num_ready(fleet))
