"""How long a step will take, learned from the steps before it.

    seconds = a + b * tokens + c * pairs        pairs: (query token, context token) that attention visits

The coefficients follow by recursive least squares with forgetting (Haykin, Adaptive Filter Theory, ch. 10), so a model
that gets slower (a busy neighbour) is noticed within some hundred steps. Plain Python: three numbers.
"""

from dataclasses import dataclass
from math import sqrt

FORGETTING = 0.995
"""Weight of the past, per step: the memory is about 200 steps long."""
MIN_STEPS = 8
"""Steps to learn from before a prediction is given."""
OUTLIER_FACTOR = 4.0
"""A step that takes longer than so many times its prediction teaches no more than that: it was disturbed."""
_MAX_UNCERTAINTY = 1e6
"""Directions that steps do not vary in are not forgotten beyond this."""
_SCALES = (1.0, 1 / 64, 1 / 65536)
"""Brings typical features near 1, for the numerics."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step does, as far as its time depends on it."""

    num_tokens: int
    num_pairs: int

    def with_chunk(self, start: int, count: int) -> "StepWork":
        """With `count` more query tokens at positions from `start` on."""
        return StepWork(self.num_tokens + count, self.num_pairs + count * start + count * (count + 1) // 2)


class StepTimeModel:
    """observe() each step, then ask predict() and largest_chunk(). O(1)."""

    def __init__(self) -> None:
        self._weights = [0.0, 0.0, 0.0]
        self._covariance = [[1e4 if row == column else 0.0 for column in range(3)] for row in range(3)]
        self._num_steps = 0

    def observe(self, work: StepWork, seconds: float) -> None:
        """A step took so long."""
        x = (_SCALES[0], work.num_tokens * _SCALES[1], work.num_pairs * _SCALES[2])
        predicted = sum(weight * value for weight, value in zip(self._weights, x, strict=True))
        if self._num_steps >= MIN_STEPS and predicted > 0.0:
            seconds = min(seconds, predicted * OUTLIER_FACTOR)
        self._num_steps += 1
        projected = [sum(entry * value for entry, value in zip(row, x, strict=True)) for row in self._covariance]
        scale = FORGETTING + sum(value * entry for value, entry in zip(x, projected, strict=True))
        gain = [entry / scale for entry in projected]
        error = seconds - predicted
        self._weights = [weight + factor * error for weight, factor in zip(self._weights, gain, strict=True)]
        shrunk = [
            [entry - factor * other for entry, other in zip(row, projected, strict=True)]
            for row, factor in zip(self._covariance, gain, strict=True)
        ]
        growth = 1 / FORGETTING if sum(shrunk[i][i] for i in range(3)) < _MAX_UNCERTAINTY else 1.0
        # Symmetric again after each step: rounding must not tilt it.
        self._covariance = [[growth * (shrunk[i][j] + shrunk[j][i]) / 2 for j in range(3)] for i in range(3)]

    def predict(self, work: StepWork) -> float | None:
        """Seconds, or None when too little has been seen. Negative coefficients count as zero."""
        if self._num_steps < MIN_STEPS:
            return None
        fixed, per_token, per_pair = self._coefficients()
        return fixed + per_token * work.num_tokens + per_pair * work.num_pairs

    def largest_chunk(self, work: StepWork, start: int, max_seconds: float) -> int | None:
        """Query tokens from position `start` on that fit beside `work` into max_seconds, >= 0; None: no limit known."""
        already = self.predict(work)
        if already is None:
            return None
        _, per_token, per_pair = self._coefficients()
        slack = max_seconds - already
        linear = per_token + per_pair * (start + 0.5)
        if slack <= 0.0:
            return 0
        # slack = linear * count + per_pair / 2 * count^2, solved without the cancellation of the textbook formula
        divisor = linear + sqrt(linear * linear + 2 * per_pair * slack)
        return int(2 * slack / divisor) if divisor > 0.0 else None

    def _coefficients(self) -> tuple[float, float, float]:
        fixed, per_token, per_pair = (
            max(0.0, weight) * scale for weight, scale in zip(self._weights, _SCALES, strict=True)
        )
        return fixed, per_token, per_pair
