"""What the demo saw, and what must be true of it."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Sample:
    """One version of the LLMDeployment as `kubectl get -w` showed it."""

    seconds: float
    """Since the demo's start."""
    wanted: int
    ready: int
    replicas: int
    occupancy_percent: int | None
    """None while no server reports."""
    waiting: int
    phase: str

    @classmethod
    def parse(cls, line: str, *, seconds: float) -> "Sample":
        """From `wanted|ready|replicas|occupancy|waiting|phase`; fields not there yet are empty."""
        wanted, ready, replicas, occupancy, waiting, phase = line.split("|")
        return cls(
            seconds=round(seconds, 1),
            wanted=int(wanted or 0),
            ready=int(ready or 0),
            replicas=int(replicas or 0),
            occupancy_percent=int(occupancy.rstrip("%")) if occupancy else None,
            waiting=int(waiting or 0),
            phase=phase,
        )


@dataclass(slots=True)
class Report:
    """Filled as the demo goes."""

    question: str
    answer: str = ""
    samples: list[Sample] = field(default_factory=list)
    streams: dict[str, int] = field(default_factory=dict)
    finished_seconds: float | None = None

    def transitions(self) -> list[dict[str, float | int]]:
        """Changes of the wanted and the ready replicas, in order."""
        changes: list[dict[str, float | int]] = []
        before: tuple[int, int] | None = None
        for sample in self.samples:
            now = (sample.wanted, sample.ready)
            if now != before:
                changes.append({"seconds": sample.seconds, "wanted": sample.wanted, "ready": sample.ready})
                before = now
        return changes

    def to_json(self, failed: list[str]) -> dict[str, Any]:
        """The content of demo-report.json."""
        return {
            "passed": not failed,
            "problems": failed,
            "question": self.question,
            "answer": self.answer,
            "streams": self.streams,
            "seconds": self.finished_seconds,
            "replicas": self.transitions(),
            "kv_percent": [[s.seconds, s.occupancy_percent] for s in self.samples if s.occupancy_percent is not None],
            "samples": [asdict(sample) for sample in self.samples],
        }


def problems(report: Report) -> list[str]:
    """Why the demo did not show what it must; empty when it did."""
    found: list[str] = []
    occupancy = [s.occupancy_percent for s in report.samples if s.occupancy_percent is not None]
    if not occupancy or max(occupancy) < 50 or occupancy[-1] > 10:
        found.append(f"KV% did not rise above 50 and fall back to 10 or less: {occupancy}")
    ready = [s.ready for s in report.samples if s.ready > 0]
    if not ready or ready[0] != 1 or max(ready) < 2 or ready[-1] != 1:
        found.append(f"ready replicas did not go 1 -> 2 or more -> 1: {ready}")
    if not report.streams.get("opened") or report.streams.get("broken") != 0:
        found.append(f"streams broke or none was opened: {report.streams}")
    if "tokyo" not in report.answer.lower():
        found.append(f"the answer to {report.question!r} is wrong: {report.answer!r}")
    return found
