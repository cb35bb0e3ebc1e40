"""What a run measured, and what follows from it. Pure."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Answer:
    """One request as the client saw it; seconds on the client's clock."""

    sent: float
    token_times: tuple[float, ...]
    """Arrival of every event that carried text. A server may put several tokens into one."""
    num_prompt: int
    """As the server counted; 0 where it does not say."""
    num_output: int
    error: str = ""
    """Empty: all tokens came."""


@dataclass(frozen=True, slots=True)
class Run:
    """One workload on one server, once."""

    workload: str
    peer: str
    round: int
    out_tokens_per_s: float
    total_tokens_per_s: float
    requests_per_s: float
    ttft_ms: tuple[float, float]
    """50th and 95th percentile."""
    itl_ms: tuple[float, float]
    """Between events of one answer: 50th and 95th percentile."""
    num_failed: int
    other_cores: float
    """Cores that neither the server nor the client took, in the mean over the run."""
    server_cores: float
    client_cores: float
    first_error: str = ""

    @property
    def clean(self) -> bool:
        """Whether the figure may be believed: nothing failed and nobody else took more than a tenth of a core."""
        return self.num_failed == 0 and self.other_cores <= QUIET_CORES


QUIET_CORES = 0.1
"""Two spinning threads on two cores stall at every barrier: half a core taken has halved a server's figure."""


@dataclass(frozen=True, slots=True)
class Start:
    """What starting a server took."""

    peer: str
    seconds: float
    """From its start to the first answer of one token."""
    version: str = ""


@dataclass(slots=True)
class Record:
    """All that one call of the benchmark measured."""

    facts: dict[str, object]
    runs: list[Run] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    peak_mib: dict[str, float] = field(default_factory=dict)
    """Peer -> high-water of resident memory, summed over its processes."""
    floors: dict[str, float] = field(default_factory=dict)
    """Workload -> what the machine allows at most in bfloat16, in the unit of its table."""
    cross_checks: list[str] = field(default_factory=list)
    """What another client measured, in words."""


def percentile(values: Sequence[float], rank: int) -> float:
    """Rank 1..99; 0.0 when there is nothing."""
    if len(values) < 2:
        return values[0] if values else 0.0
    return statistics.quantiles(values, n=100, method="inclusive")[rank - 1]


def summarise(
    workload: str, peer: str, round_index: int, answers: Sequence[Answer], cores: tuple[float, float, float]
) -> Run:
    """A run from its answers. `cores`: taken by others, by the server, by the client."""
    good = [answer for answer in answers if not answer.error]
    seconds = max((a.token_times[-1] for a in good), default=0.0) - min((a.sent for a in answers), default=0.0)
    seconds = max(seconds, 1e-9)
    first = [1e3 * (answer.token_times[0] - answer.sent) for answer in good]
    gaps = [1e3 * (b - a) for x in good for a, b in zip(x.token_times, x.token_times[1:], strict=False)]
    errors = [answer.error for answer in answers if answer.error]
    num_output = sum(answer.num_output for answer in good)
    return Run(
        workload=workload,
        peer=peer,
        round=round_index,
        out_tokens_per_s=num_output / seconds,
        total_tokens_per_s=(num_output + sum(answer.num_prompt for answer in good)) / seconds,
        requests_per_s=len(good) / seconds,
        ttft_ms=(percentile(first, 50), percentile(first, 95)),
        itl_ms=(percentile(gaps, 50), percentile(gaps, 95)),
        num_failed=len(errors),
        other_cores=cores[0],
        server_cores=cores[1],
        client_cores=cores[2],
        first_error=errors[0] if errors else "",
    )
