"""What the plugin knows of an LLMDeployment: read leniently, since a status may be young, old or damaged."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pagefleet_plugin.terminal import harmless


@dataclass(frozen=True, slots=True)
class Pod:
    """One replica, as status.pods has it."""

    name: str
    state: str
    occupancy: float | None
    """Blocks in use, 0..1; None without a fresh sample."""
    waiting: int
    """Requests that wait in it."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One change of the wanted replicas."""

    time: datetime | None
    before: int
    after: int
    reason: str
    inputs: str


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition."""

    kind: str
    status: str
    reason: str
    message: str
    since: datetime | None


@dataclass(frozen=True, slots=True)
class Blocks:
    """KV-cache blocks of the fleet."""

    used: int
    cached: int
    waiting: int
    total: int

    @property
    def occupancy(self) -> float | None:
        """used / total; None when nothing is known."""
        return self.used / self.total if self.total > 0 else None


@dataclass(frozen=True, slots=True)
class Deployment:
    """One LLMDeployment."""

    namespace: str
    name: str
    model: str
    phase: str
    wanted: int | None
    ready: int
    replicas: int
    limits: tuple[int, int] | None
    """minReplicas and maxReplicas; None without autoscaling."""
    mode: str
    """Managed, DryRun, or Off without autoscaling."""
    desired: int | None
    """What the autoscaler's last decision wants."""
    blocks: Blocks
    running: int
    waiting: int
    first_token_ms: int | None
    inter_token_ms: int | None
    attainment: str | None
    pods: tuple[Pod, ...]
    decisions: tuple[Decision, ...]
    """Oldest first."""
    conditions: tuple[Condition, ...]
    failed_rollout: str | None

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> "Deployment":
        """From the object's JSON; what is missing or of a wrong type becomes nothing."""
        metadata, spec, status = (_mapping(body.get(key)) for key in ("metadata", "spec", "status"))
        scaling, wish = _mapping(status.get("autoscaling")), _mapping(spec.get("autoscaling"))
        blocks, requests = _mapping(status.get("kvBlocks")), _mapping(status.get("requests"))
        slo = _mapping(status.get("slo"))
        model = status.get("model") or _mapping(spec.get("model")).get("servedName") or metadata.get("name", "")
        return cls(
            namespace=_text(metadata.get("namespace", "")),
            name=_text(metadata.get("name", "")),
            model=_text(model),
            phase=_text(status.get("phase", "Unknown")),
            wanted=_whole(spec.get("replicas")),
            ready=_whole(status.get("readyReplicas")) or 0,
            replicas=_whole(status.get("replicas")) or 0,
            limits=(_whole(wish.get("minReplicas")) or 1, _whole(wish.get("maxReplicas")) or 1) if wish else None,
            mode=_text(wish.get("mode", "Managed")) if wish else "Off",
            desired=_whole(scaling.get("desiredReplicas")),
            blocks=Blocks(*(_whole(blocks.get(key)) or 0 for key in ("used", "cached", "waiting", "total"))),
            running=_whole(requests.get("running")) or 0,
            waiting=_whole(requests.get("waiting")) or 0,
            first_token_ms=_whole(slo.get("timeToFirstTokenMilliseconds")),
            inter_token_ms=_whole(slo.get("interTokenLatencyMilliseconds")),
            attainment=_text(slo["attainment"]) if slo.get("attainment") else None,
            pods=tuple(_pod(row) for row in _rows(status.get("pods"))),
            decisions=tuple(_decision(row) for row in _rows(scaling.get("decisions"))),
            conditions=tuple(_condition(row) for row in _rows(status.get("conditions"))),
            failed_rollout=_text(failed) if (failed := _mapping(status.get("rollout")).get("message")) else None,
        )

    def condition(self, kind: str) -> Condition | None:
        """The condition of that type, if it is there."""
        return next((found for found in self.conditions if found.kind == kind), None)


def _pod(row: Mapping[str, Any]) -> Pod:
    share = _text(row.get("occupancy", "")).removesuffix("%")
    return Pod(
        name=_text(row.get("name", "")),
        state=_text(row.get("state", "Unknown")),
        occupancy=int(share) / 100 if share.isdigit() else None,
        waiting=_whole(row.get("waiting")) or 0,
    )


def _decision(row: Mapping[str, Any]) -> Decision:
    return Decision(
        time=_time(row.get("time")),
        before=_whole(row.get("from")) or 0,
        after=_whole(row.get("to")) or 0,
        reason=_text(row.get("reason", "")),
        inputs=_text(row.get("inputs", "")),
    )


def _condition(row: Mapping[str, Any]) -> Condition:
    return Condition(
        kind=_text(row.get("type", "")),
        status=_text(row.get("status", "Unknown")),
        reason=_text(row.get("reason", "")),
        message=_text(row.get("message", "")),
        since=_time(row.get("lastTransitionTime")),
    )


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _rows(value: object) -> list[Mapping[str, Any]]:
    return [row for row in value if isinstance(row, Mapping)] if isinstance(value, list) else []


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(value: object) -> str:
    return harmless(str(value))


def _time(value: object) -> datetime | None:
    try:
        found = datetime.fromisoformat(str(value))
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)
