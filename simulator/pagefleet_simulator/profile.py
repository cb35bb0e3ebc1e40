"""What one replica can do: its memory, its limits and how long a step takes, measured or from published figures."""

import json
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from pagefleet_server.core.limits import SchedulerLimits

PROFILES = files("pagefleet_simulator") / "profiles"


class ProfileError(ValueError):
    """A profile that cannot be used; the message has the file, the field and the bound."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Step: seconds = step + prompt_token * tokens + prompt_pair * pairs + decode_token * rows + decode_pair * context.

    A pair is a query token that attends to a context token. Raises ProfileError on values that cannot be.
    """

    name: str
    source: str
    """Where the figures are from, in a sentence or more."""
    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_step_seconds: float | None
    """As the server's --max-step-ms; None: off."""
    max_queue: int
    """Requests that may wait; beyond it a request is refused, as the server's --max-queue."""
    devices: int
    """Accelerators of one replica, for device-hours; CPU replicas count as 1."""
    step_seconds: float
    """Of a step with nothing in it: reading the weights, launching, host work."""
    prompt_token_seconds: float
    prompt_pair_seconds: float
    decode_token_seconds: float
    decode_pair_seconds: float

    def __post_init__(self) -> None:
        for name in ("step_seconds", "prompt_token_seconds", "decode_token_seconds"):
            if not getattr(self, name) > 0:
                raise ProfileError(f"{self.name}: {name} is {getattr(self, name)}; it must be above 0")
        for name in ("prompt_pair_seconds", "decode_pair_seconds"):
            if getattr(self, name) < 0:
                raise ProfileError(f"{self.name}: {name} is {getattr(self, name)}; it must not be below 0")
        if self.devices < 1 or self.max_queue < 0:
            raise ProfileError(f"{self.name}: devices is {self.devices}, max_queue {self.max_queue}; at least 1 and 0")
        try:
            self.limits()
        except ValueError as error:
            raise ProfileError(f"{self.name}: {error}") from error

    def limits(self) -> SchedulerLimits:
        """For the scheduler of one replica."""
        return SchedulerLimits(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_step_seconds=self.max_step_seconds,
        )

    def to_json(self) -> str:
        """The file's content."""
        return json.dumps(asdict(self), indent=2) + "\n"


def load_profile(name: str) -> Profile:
    """A shipped profile by name, or a file by path. Raises ProfileError."""
    shipped = PROFILES / f"{name}.json"
    path = shipped if shipped.is_file() else Path(name)
    if not path.is_file():
        raise ProfileError(f"no profile {name!r}: give a file, or one of {', '.join(shipped_profiles())}")
    try:
        fields: Any = json.loads(path.read_text())
        return Profile(**fields)
    except (ValueError, TypeError) as error:
        if isinstance(error, ProfileError):
            raise
        raise ProfileError(f"profile {name}: {error}") from error


def shipped_profiles() -> list[str]:
    """Names, sorted."""
    return sorted(item.name.removesuffix(".json") for item in PROFILES.iterdir() if item.name.endswith(".json"))
