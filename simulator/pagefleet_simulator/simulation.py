"""The event loop: arrivals, scrapes, decisions and the lives of pods, in virtual time. One run is one function call."""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from pagefleet_operator.fleet import Fleet, PodState
from pagefleet_operator.victims import choose
from pagefleet_simulator.pod import SimulatedPod
from pagefleet_simulator.policies.policy import Policy
from pagefleet_simulator.replica import Replica, Served
from pagefleet_simulator.routing import router
from pagefleet_simulator.scenario import Scenario
from pagefleet_simulator.workload import Workload

RESTART_BACKOFF_SECONDS = 10.0
"""Before a crashed container starts again."""

POINT_SECONDS = 10.0
"""Spacing of the timeline."""


@dataclass(frozen=True, slots=True)
class Point:
    """The fleet at one moment."""

    time: float
    wanted: int
    ready: int
    used_percent: float
    waiting: int


@dataclass(slots=True)
class Outcome:
    """Everything that one run gave."""

    served: list[Served] = field(default_factory=list)
    """Requests in the order of arrival, failed ones included."""
    device_seconds: float = 0.0
    """Accelerators held, over the trace's length after the warm-up."""
    changes: list[tuple[float, int, int]] = field(default_factory=list)
    """(time, from, to) of every change of the wanted count."""
    timeline: list[Point] = field(default_factory=list)
    num_steps: int = 0


def simulate(
    workload: Workload,
    scenario: Scenario,
    policy: Policy,
    *,
    on_progress: Callable[[float], None] | None = None,
    skips: bool = True,
) -> Outcome:
    """Run the whole trace. `on_progress` hears the part that is done, 0..1; `skips` False makes every step singly."""
    return _Run(workload, scenario, policy, on_progress, skips).run()


class _Run:
    def __init__(
        self,
        workload: Workload,
        scenario: Scenario,
        policy: Policy,
        on_progress: Callable[[float], None] | None,
        skips: bool,
    ) -> None:
        self._workload, self._scenario, self._policy = workload, scenario, policy
        self._on_progress, self._skips = on_progress, skips
        self._random = random.Random(scenario.seed)
        self._outcome = Outcome()
        self._pods: list[SimulatedPod] = []
        self._pod_of: dict[int, SimulatedPod] = {}  # id(replica) -> pod
        self._endpoints: list[SimulatedPod] = []
        self._router = router(scenario, lambda: self._endpoints, random.Random(scenario.seed + 1))
        self._clients = random.Random(scenario.seed + 2)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._num_events = 0
        self._num_pods = 0
        self._wanted = scenario.initial_replicas
        self._end = workload.seconds

    def run(self) -> Outcome:
        for _ in range(self._wanted):
            pod = self._create(0.0)
            self._ready(pod, pod.incarnation, 0.0)
            pod.start_seconds = self._scenario.start_seconds  # seen before the trace began
        self._at(0.0, self._scrape)
        self._at(self._policy.period_seconds, self._decide)
        self._at(0.0, self._draw)
        for number, arrival in enumerate(self._workload.arrivals):
            self._run_events(arrival.time)
            self._arrive(Served(number, arrival, client=self._clients.randrange(self._scenario.clients)))
        self._run_events(self._end)
        self._finish()
        return self._outcome

    def _at(self, time: float, action: Callable[[float], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time, self._num_events, action))

    def _run_events(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            time, _, action = heapq.heappop(self._events)
            action(time)

    def _arrive(self, served: Served) -> None:
        now, outcome = served.arrival.time, self._outcome
        outcome.served.append(served)
        pod = self._router.route(served, now)
        if pod is None or pod.replica is None:
            served.failed, served.ended = True, now
        elif not pod.replica.add(served, now):
            served.failed, served.ended = True, now
            self._router.ended(served, pod)

    def _on_request_end(self, replica: Replica, served: Served) -> None:
        self._router.ended(served, self._pod_of[id(replica)])

    # The lives of pods.

    def _create(self, now: float) -> SimulatedPod:
        self._num_pods += 1
        pod = SimulatedPod(f"pod-{self._num_pods:04d}", now, PodState.UNSCHEDULABLE)
        self._pods.append(pod)
        self._place(now)
        return pod

    def _place(self, now: float) -> None:
        """Give devices to pods that wait for one."""
        devices = self._scenario.profile.devices
        for pod in self._pods:
            if pod.state is not PodState.UNSCHEDULABLE or pod.drains_since is not None:
                continue
            held = devices * sum(other.device_since is not None for other in self._pods)
            if self._scenario.devices is not None and held + devices > self._scenario.devices:
                return
            pod.device_since = now
            self._start(pod, now)

    def _start(self, pod: SimulatedPod, now: float) -> None:
        pod.state = PodState.STARTING
        spread = self._scenario.start_spread
        seconds = self._scenario.start_seconds * self._random.uniform(1 - spread, 1 + spread)
        incarnation = pod.incarnation
        self._at(now + seconds, lambda time: self._ready(pod, incarnation, time))

    def _ready(self, pod: SimulatedPod, incarnation: int, now: float) -> None:
        if pod.incarnation != incarnation or pod.state is not PodState.STARTING:
            return
        pod.incarnation += 1
        pod.state = PodState.READY
        if pod.start_seconds is None and now > pod.created:
            pod.start_seconds = now - pod.created
        pod.replica = Replica(self._scenario.profile, now, self._on_request_end, skips=self._skips)
        self._pod_of[id(pod.replica)] = pod
        self._endpoints.append(pod)
        mean_life = self._scenario.faults.crash_every_seconds
        if mean_life is not None:
            incarnation = pod.incarnation
            self._at(now + self._random.expovariate(1 / mean_life), lambda time: self._crash(pod, incarnation, time))

    def _crash(self, pod: SimulatedPod, incarnation: int, now: float) -> None:
        if pod.incarnation != incarnation or pod.replica is None:
            return
        self._lose(pod, now)
        pod.incarnation += 1
        if pod.state is PodState.DRAINING:
            self._remove(pod, now)
            return
        self._endpoints.remove(pod)
        pod.state, pod.sample = PodState.CRASHED, None
        again = pod.incarnation
        self._at(now + RESTART_BACKOFF_SECONDS, lambda time: self._restart(pod, again, time))

    def _restart(self, pod: SimulatedPod, incarnation: int, now: float) -> None:
        if pod.incarnation == incarnation and pod.state is PodState.CRASHED:
            self._start(pod, now)

    def _lose(self, pod: SimulatedPod, now: float) -> None:
        """The container is gone, and with it whatever it served."""
        if pod.replica is None:
            return
        pod.replica.advance(now)
        self._outcome.num_steps += pod.replica.num_steps
        for served in pod.replica.fail(now):
            self._router.ended(served, pod)
        del self._pod_of[id(pod.replica)]
        pod.replica = None

    def _drain(self, pod: SimulatedPod, now: float) -> None:
        pod.drains_since = now
        if pod.replica is None:
            self._remove(pod, now)
            return
        pod.state, pod.sample = PodState.DRAINING, None
        self._endpoints.remove(pod)
        self._at(now + self._scenario.drain_delay_seconds, lambda time: self._end_drain(pod, time))
        deadline = now + self._scenario.drain_delay_seconds + self._scenario.drain_timeout_seconds
        self._at(deadline, lambda time: self._remove(pod, time))

    def _end_drain(self, pod: SimulatedPod, now: float) -> None:
        if pod.replica is None:
            return
        pod.replica.advance(now)
        if pod.replica.num_serving == 0:
            self._remove(pod, now)
        else:
            self._at(now + 1.0, lambda time: self._end_drain(pod, time))

    def _remove(self, pod: SimulatedPod, now: float) -> None:
        if pod not in self._pods:
            return
        self._lose(pod, now)
        self._pay(pod, now)
        self._pods.remove(pod)
        pod.incarnation += 1
        self._place(now)

    def _pay(self, pod: SimulatedPod, now: float) -> None:
        if pod.device_since is not None:
            began = max(pod.device_since, self._scenario.warmup_seconds)
            held = max(0.0, min(now, self._end) - began)
            self._outcome.device_seconds += held * self._scenario.profile.devices
            pod.device_since = None

    # Watching and deciding.

    def _scrape(self, now: float) -> None:
        faults = self._scenario.faults
        is_dark = any(start <= now < end for start, end in faults.silence)
        for pod in self._pods:
            if pod.replica is None:
                continue
            pod.replica.advance(now)
            if pod.state is not PodState.READY:
                continue
            pod.is_silent = is_dark or (faults.silent_part > 0 and self._random.random() < faults.silent_part)
            if not pod.is_silent:
                pod.sample = pod.replica.sample(now)
        self._at(now + self._scenario.scrape_seconds, self._scrape)

    def _decide(self, now: float) -> None:
        scenario = self._scenario
        fleet = Fleet(self._wanted, tuple(pod.view(now, scenario.stale_seconds) for pod in self._pods))
        wanted = min(max(self._policy.decide(fleet, now), scenario.min_replicas), scenario.max_replicas)
        if wanted != self._wanted:
            self._outcome.changes.append((now, self._wanted, wanted))
            self._wanted = wanted
            self._resize(now)
        self._at(now + self._policy.period_seconds, self._decide)

    def _resize(self, now: float) -> None:
        living = [pod for pod in self._pods if pod.drains_since is None]
        for _ in range(self._wanted - len(living)):
            self._create(now)
        if self._wanted < len(living):
            samples = {pod.name: pod.sample for pod in living if pod.sample is not None}
            shrink = choose([pod.candidate() for pod in living], samples, wanted=self._wanted)
            for pod in living:
                if pod.name in shrink.victims:
                    self._drain(pod, now)

    def _draw(self, now: float) -> None:
        used = total = waiting = 0
        for pod in self._pods:
            if pod.replica is not None:
                counts = pod.replica.scheduler.counts()
                used, total, waiting = (
                    used + counts.blocks_used,
                    total + counts.blocks_total,
                    waiting + counts.num_waiting,
                )
        percent = 100 * used / total if total else 0.0
        self._outcome.timeline.append(Point(now, self._wanted, len(self._endpoints), percent, waiting))
        if self._on_progress is not None and self._end > 0:
            self._on_progress(min(1.0, now / self._end))
        self._at(now + POINT_SECONDS, self._draw)

    def _finish(self) -> None:
        """No more arrivals: what runs may end, the rest has failed."""
        deadline = self._end + self._scenario.tail_seconds
        for pod in list(self._pods):
            self._pay(pod, self._end)
            self._lose(pod, deadline)
