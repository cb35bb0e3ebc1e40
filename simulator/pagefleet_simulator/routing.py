"""Which pod a request goes to."""

import random
from bisect import insort
from collections.abc import Callable, Sequence
from typing import Protocol

from pagefleet_simulator.pod import SimulatedPod
from pagefleet_simulator.replica import Served
from pagefleet_simulator.scenario import Scenario

Endpoints = Callable[[], Sequence[SimulatedPod]]


class Router(Protocol):
    """Told of every request's way."""

    def route(self, served: Served, now: float) -> SimulatedPod | None:
        """The pod for a request; None when no pod takes it."""

    def ended(self, served: Served, pod: SimulatedPod) -> None:
        """The request has got its answer."""


class ConnectionRouter:
    """What ships: a Service picks a random pod for each new connection, and clients keep connections alive.

    Each client has its own pool and takes the oldest idle connection. A pod that is leaving or has a queue closes
    each connection after its answer, as the server does.
    """

    def __init__(self, scenario: Scenario, endpoints: Endpoints, random_: random.Random) -> None:
        self._endpoints, self._random = endpoints, random_
        self._keep_alive = scenario.keep_alive_seconds
        self._drain_delay = scenario.drain_delay_seconds
        self._idle: list[list[tuple[int, float, SimulatedPod]]] = [[] for _ in range(scenario.clients)]
        self._busy: list[dict[int, SimulatedPod]] = [{} for _ in range(scenario.clients)]
        self._num_connections = 0

    def route(self, served: Served, now: float) -> SimulatedPod | None:
        """An idle connection's pod, or a random one."""
        for pod in {pod.name: pod for pod in self._busy[served.client].values()}.values():
            if pod.replica is not None:
                pod.replica.advance(now)
        idle = self._idle[served.client]
        idle[:] = [item for item in idle if now - item[1] < self._keep_alive and self._is_open(item[2], now)]
        if idle:
            served.connection, _, pod = idle.pop(0)
        else:
            endpoints = self._endpoints()
            if not endpoints:
                return None
            pod = self._random.choice(endpoints)
            self._num_connections += 1
            served.connection = self._num_connections
        self._busy[served.client][served.connection] = pod
        return pod

    def ended(self, served: Served, pod: SimulatedPod) -> None:
        """The connection is idle again, or closed."""
        self._busy[served.client].pop(served.connection, None)
        replica = pod.replica
        if served.failed or replica is None or not pod.takes_new_connections or replica.num_waiting > 0:
            return
        ended = 0.0 if served.ended is None else served.ended
        insort(self._idle[served.client], (served.connection, ended, pod), key=lambda item: item[0])

    def _is_open(self, pod: SimulatedPod, now: float) -> bool:
        if pod.replica is None:
            return False
        return pod.drains_since is None or now - pod.drains_since < self._drain_delay


class RoundRobinRouter:
    """Each request to the next pod."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints
        self._next = 0

    def route(self, served: Served, now: float) -> SimulatedPod | None:
        """The next in turn."""
        endpoints = self._endpoints()
        if not endpoints:
            return None
        self._next += 1
        return endpoints[self._next % len(endpoints)]

    def ended(self, served: Served, pod: SimulatedPod) -> None:
        """Nothing to remember."""


class LeastLoadedRouter:
    """Each request to the pod that serves the fewest at that moment."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints

    def route(self, served: Served, now: float) -> SimulatedPod | None:
        """The least loaded; the first among equals."""
        best: tuple[int, SimulatedPod] | None = None
        for pod in self._endpoints():
            if pod.replica is None:
                continue
            pod.replica.advance(now)
            if best is None or pod.replica.num_serving < best[0]:
                best = (pod.replica.num_serving, pod)
        return None if best is None else best[1]

    def ended(self, served: Served, pod: SimulatedPod) -> None:
        """Nothing to remember."""


ROUTINGS = ("connection", "round-robin", "least-loaded")


def router(scenario: Scenario, endpoints: Endpoints, random_: random.Random) -> Router:
    """By name. Raises ValueError on another one."""
    if scenario.routing == "connection":
        return ConnectionRouter(scenario, endpoints, random_)
    if scenario.routing == "round-robin":
        return RoundRobinRouter(endpoints)
    if scenario.routing == "least-loaded":
        return LeastLoadedRouter(endpoints)
    raise ValueError(f"routing {scenario.routing!r} is none of {', '.join(ROUTINGS)}")
