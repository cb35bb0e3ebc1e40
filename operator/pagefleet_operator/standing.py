"""How many replicas must stand ready, learnt from what load has done before. Pure.

A load that jumps meets the replicas that are there; what is ordered then is ready one start-up time later. How many
must be there follows from how load rose before, from how long a start-up takes, and from the part of the requests that
may be late. So the past is replayed while it happens: for each count that could stand ready, a shadow fleet follows the
demand. It never has fewer replicas than that count; it orders what the demand asks for, has it one start-up time later,
and gives it back after the scale-down window. Demand beyond what it has is its backlog, and demand that comes while the
backlog is longer than the objective allows is late. The smallest count whose shadow kept the objective is what must
stand ready. Shadows carry a part of what replicas carry, because the next burst may be higher than the last; but where
the fleet as it is (count 0) kept the objective, nothing needs to stand ready: a day's curve is no jump.

Load that is steady, or that rises no faster than replicas start, needs nothing beyond the minimum. A burst that came
before is met by what it needed then: the slower the start-up, the more of it. What was seen long ago is forgotten, and
what came after some quiet is awaited for twice as long: then it comes too seldom, or it was the only one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

STEP_SECONDS = 10.0
"""Demand is replayed in steps of so long."""
MAX_SILENT_SECONDS = 60.0
"""After a longer silence the replay begins anew; what it has learnt stays."""
MAX_STEPS = 720
"""Steps of orders that are remembered: start-up and scale-down window together count up to two hours."""
HALF_LIFE_SECONDS = 86400.0
"""What was seen so long ago counts half."""
PRIOR_SEEN = 60.0
"""Demand that counts as seen in time from the start, one replica for ten minutes: a few requests prove nothing."""
CARRIED = 0.8
"""Of its target, what a replica of a shadow carries: the next burst may be higher than the last."""
ALLOWED_PART = 0.5
"""Of what the objective lets be late, the part that jumps of the load may take: the rest is for bad luck."""
LOWER_PART = 0.8
"""A lower count must do so much better, or the count would change with every request."""
LATE_SECONDS = 3.0
"""What waits longer is late where the objective does not say it."""
AWAITED_SECONDS = 3600.0
"""After a jump another one is awaited for so long at least."""
AWAITED_QUIETS = 2
"""And so many times as long as it had been quiet before one."""
COUNTS = (*range(1, 9), *(base << shift for shift in range(8) for base in (10, 12, 14, 16)))
"""Replicas of the shadow fleets: up to 2048, no step above a fourth."""


@dataclass(frozen=True, slots=True)
class Shadow:
    """A fleet that never has fewer than so many replicas."""

    replicas: int
    """0: none stand ready, and a replica carries its whole target."""
    late: float = 0.0
    """Demand that came too late; replicas times steps, old ones less."""
    backlog: float = 0.0
    """Demand that waits; replicas times steps."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What the load has done, as far as it tells how many replicas must stand ready."""

    replicas: int = 1
    """How many that is."""
    seen: float = 0.0
    """All demand; replicas times steps, old ones less."""
    shadows: tuple[Shadow, ...] = ()
    """By count, ascending."""
    orders: tuple[float, ...] = ()
    """Demand of each step when what it orders would be ready, in replicas, oldest first."""
    quiet: float = 0.0
    """Steps since demand was last late in shadow 0, or since the beginning."""
    longest_quiet: float = 0.0
    """The most that this had come to when demand was late again; old ones less."""
    step_start: float | None = None
    step_sum: float = 0.0
    """Demand of the rounds of the step that runs."""
    step_rounds: int = 0
    step_order: float = 0.0
    """The most that a round of it expected."""

    def observed(
        self,
        demand: float,
        coming: float,
        *,
        now: float,
        start_seconds: float,
        window_seconds: float,
        late_seconds: float,
        allowed: float,
        most: int,
    ) -> "Standing":
        """Learn from one round.

        `demand`: in replicas at target, >= 0. `coming`: what it will be after a start-up. `window_seconds`: how long
        replicas are kept after they were needed. `late_seconds`: what waits longer is late. `allowed`: the part of the
        demand that may be late, 0..1. `most`: replicas that there can be.
        """
        if self.step_start is None or not 0 <= now - self.step_start < MAX_SILENT_SECONDS:
            calm = tuple(replace(shadow, backlog=0.0) for shadow in self.shadows)
            return replace(self, shadows=calm, orders=()).begun(demand, coming, now)
        if now - self.step_start < STEP_SECONDS:
            return replace(
                self,
                step_sum=self.step_sum + demand,
                step_rounds=self.step_rounds + 1,
                step_order=max(self.step_order, coming),
            )
        closed = self._closed(self.step_sum / self.step_rounds, start_seconds, window_seconds, late_seconds, most)
        return replace(closed, replicas=closed.needed(allowed)).begun(demand, coming, now)

    def begun(self, demand: float, coming: float, now: float) -> "Standing":
        """A new step with its first round."""
        return replace(self, step_start=now, step_sum=demand, step_rounds=1, step_order=coming)

    def _closed(
        self, demand: float, start_seconds: float, window_seconds: float, late_seconds: float, most: int
    ) -> "Standing":
        start = min(MAX_STEPS // 2, math.ceil(start_seconds / STEP_SECONDS))
        window = math.ceil(window_seconds / STEP_SECONDS)
        orders = (*self.orders, self.step_order)[-min(MAX_STEPS, start + window + 1) :]
        if len(orders) <= start:  # what was ordered before is not known: nothing can be said of being in time
            return replace(self, orders=orders)
        ready = ordered_in_time(orders, start, window)
        kept = 0.5 ** (STEP_SECONDS / HALF_LIFE_SECONDS)
        known = {shadow.replicas: shadow for shadow in self.shadows}
        shadows, jumped = [], False
        for count in (0, *_counts(most)):
            carried = 1.0 if count == 0 else CARRIED
            has = max(1, count, min(most, math.ceil(ready / carried)))
            shadow = known.get(count, Shadow(count))
            backlog = max(0.0, shadow.backlog + demand / carried - has)
            is_late = backlog * STEP_SECONDS > late_seconds * has
            shadows.append(Shadow(count, kept * shadow.late + (demand if is_late else 0.0), backlog))
            jumped = jumped or (is_late and count == 0)
        return replace(
            self,
            seen=kept * self.seen + demand,
            shadows=tuple(shadows),
            orders=orders,
            quiet=0.0 if jumped else self.quiet + 1,
            longest_quiet=max(kept * self.longest_quiet, self.quiet if jumped else 0.0),
        )

    @property
    def awaits(self) -> bool:
        """Whether another jump is to be expected still."""
        return self.quiet <= max(AWAITED_SECONDS / STEP_SECONDS, AWAITED_QUIETS * self.longest_quiet)

    def needed(self, allowed: float) -> int:
        """The smallest count that was in time often enough, or that no larger one would have bettered."""
        if not self.awaits:
            return 1
        limit = ALLOWED_PART * allowed * (self.seen + PRIOR_SEEN)
        hopeless = self.shadows[-1].late if self.shadows else 0.0
        for shadow in self.shadows:
            count = max(1, shadow.replicas)
            part = LOWER_PART if count < self.replicas else 1.0
            if shadow.late <= max(part * limit, hopeless):
                return count
        return 1


def ordered_in_time(orders: Sequence[float], start: int, window: int) -> float:
    """Replicas, not rounded up, that a fleet without a standing count has ready at the last of more than `start` steps.

    Those that it wanted all through the last `start` steps, each for `window` steps after it was last asked for.
    """
    last = len(orders) - 1
    return min(max(orders[max(0, step - window) : step + 1]) for step in range(last - start, last + 1))


def _counts(most: int) -> list[int]:
    """The counts up to `most`, and `most` itself."""
    return sorted({*(count for count in COUNTS if count < most), most})
