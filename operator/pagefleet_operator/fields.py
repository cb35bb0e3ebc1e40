"""Bounds and defaults of the spec's fields, once, and the reader that checks a document against them.

Tests compare every constant here with the CRD's schema.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Number:
    """An integer field."""

    minimum: int
    maximum: int
    default: int | None = None

    @property
    def default_value(self) -> int:
        """The default of a field that has one."""
        if self.default is None:
            raise TypeError("this field has no default")
        return self.default


@dataclass(frozen=True, slots=True)
class Text:
    """A string field: length in characters, and a pattern or the allowed values."""

    max_length: int
    min_length: int = 0
    pattern: str | None = None
    choices: tuple[str, ...] = ()
    hint: str = ""
    """Added to the message when the pattern does not match."""


HUB_PART = "[A-Za-z0-9]([A-Za-z0-9._-]{0,94}[A-Za-z0-9])?"
MODEL_SOURCE = Text(
    512,
    8,
    r"^((file://|pvc://[a-z0-9]([-a-z0-9]*[a-z0-9])?)/[^$\x00-\x1f\x7f]+"
    rf"|hf://{HUB_PART}/{HUB_PART}(/[A-Za-z0-9_][A-Za-z0-9 ._/-]*\.gguf)?)$",
    hint="write file:///path or pvc://claim/path of a model folder or .gguf file, without $ and line breaks, or "
    "hf://org/name with /file.gguf for one file",
)
REVISION = Text(200, 1, r"^[A-Za-z0-9][A-Za-z0-9._/-]*$", hint="write a branch, a tag or a commit")
DTYPE = Text(16, choices=("auto", "bfloat16", "float16", "float32"))
OBJECT_NAME = Text(253, 1, r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", hint="write the name of an object")
CACHE_SIZE = Text(12, 2, r"^[1-9][0-9]{0,8}(Mi|Gi|Ti)$", hint="write a whole number of Mi, Gi or Ti, like 100Gi")
ACCESS_MODE = Text(16, choices=("ReadWriteOnce", "ReadWriteOncePod", "ReadWriteMany"))
NAMESPACE = Text(63, 1, r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", hint="write the name of a namespace")
POD_MONITOR = Text(16, choices=("Auto", "Disabled"))
NETWORK_POLICY = Text(16, choices=("Disabled", "Restricted"))
ACCELERATOR_RESOURCE = Text(128, 3, r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$")
SERVED_NAME = Text(128, 1, r"^[A-Za-z0-9]([A-Za-z0-9._:/-]*[A-Za-z0-9])?$")
ENGINE_IMAGE = Text(512, 1, r"^[^$\s]+$")
KV_CACHE_MEMORY = Text(8, 0, r"^[1-9][0-9]{0,5}(Mi|Gi)$", hint="write a whole number of Mi or Gi, like 8Gi")
ENGINE_ARG = Text(512)
ENV_NAME = Text(128, 0, r"^[A-Za-z_][A-Za-z0-9_]*$")
ENV_VALUE = Text(4096)
REFERENCE = Text(253, 1)
SELECT_POLICY = Text(16, choices=("Max", "Min", "Disabled"))
SERVICE_TYPE = Text(16, choices=("ClusterIP", "NodePort", "LoadBalancer"))
SCALING_MODE = Text(16, choices=("Managed", "DryRun"))
PLACEMENT = Text(16, choices=("Pod", "Sidecar"))
POLICY_TYPE = Text(16, choices=("Pods", "Percent"))

ACCELERATOR_COUNT = Number(1, 16, 1)
MAX_NUM_SEQS = Number(1, 4096)
MAX_NUM_BATCHED_TOKENS = Number(1, 1_000_000)
MAX_MODEL_LEN = Number(2, 10_000_000)
BLOCK_SIZE = Number(8, 256)
GPU_MEMORY_PERCENT = Number(1, 100)
MAX_QUEUE_LENGTH = Number(0, 100_000)
REPLICAS = Number(0, 1000, 1)
MIN_REPLICAS = Number(1, 1000, 1)
MAX_REPLICAS = Number(1, 1000)
KV_BLOCK_OCCUPANCY_PERCENT = Number(1, 100, 80)
QUEUED_REQUESTS_PER_REPLICA = Number(1, 1000, 5)
SCALING_PRIORITY = Number(-1000, 1000, 0)
UP_WINDOW_SECONDS = Number(0, 3600, 0)
DOWN_WINDOW_SECONDS = Number(0, 3600, 300)
POLICY_VALUE = Number(1, 100_000)
SLO_PERCENTILE = Number(50, 99, 95)
TTFT_MILLISECONDS = Number(1, 600_000)
ITL_MILLISECONDS = Number(1, 60_000)
POLICY_PERIOD_SECONDS = Number(1, 1800)
STARTUP_TIMEOUT_SECONDS = Number(10, 86_400, 1800)
DRAIN_DELAY_SECONDS = Number(0, 300, 10)
DRAIN_TIMEOUT_SECONDS = Number(0, 7200, 300)
SERVICE_PORT = Number(1, 65_535, 80)
MAX_SURGE = Number(0, 1000, 1)
MAX_UNAVAILABLE = Number(0, 1000, 0)
BUDGET_MAX_UNAVAILABLE = Number(0, 1000, 1)

MAX_ENGINE_ITEMS = 64
MAX_POLICIES = 8
MAX_ACCESS_MODES = 3
MAX_NAMESPACES = 16
QUANTITY_PATTERN = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$"


class Reader:
    """Reads the fields of one object and collects what is wrong with them; never raises on user input."""

    def __init__(self, value: Any, path: str, problems: list[str]) -> None:
        self.path = path
        self.problems = problems
        if value is not None and not isinstance(value, Mapping):
            problems.append(f"{path}: must be an object, not {type(value).__name__}")
            value = None
        self.value: Mapping[str, Any] = value or {}

    def problem(self, name: str, text: str) -> None:
        """Record that the field `name` of this object is wrong."""
        self.problems.append(f"{self.path}.{name}: {text}")

    def has(self, name: str) -> bool:
        """Whether the field is given."""
        return self.value.get(name) is not None

    def object(self, name: str) -> "Reader":
        """A nested object; empty when absent."""
        return Reader(self.value.get(name), f"{self.path}.{name}", self.problems)

    def objects(self, name: str, *, max_items: int) -> list["Reader"]:
        """A list of objects; empty when absent."""
        items = self._list(name, max_items)
        return [Reader(item, f"{self.path}.{name}[{index}]", self.problems) for index, item in enumerate(items)]

    def texts(self, name: str, rule: Text, *, max_items: int) -> tuple[str, ...]:
        """A list of strings; empty when absent."""
        items = self._list(name, max_items)
        return tuple(item for index, item in enumerate(items) if self._is_text(f"{name}[{index}]", item, rule))

    def text(self, name: str, rule: Text) -> str | None:
        """A string; None when absent or wrong."""
        value = self.value.get(name)
        return value if value is not None and self._is_text(name, value, rule) else None

    def optional_number(self, name: str, rule: Number) -> int | None:
        """An integer; None when absent or wrong."""
        value = self.value.get(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool):
            self.problem(name, f"{value!r} must be an integer")
            return None
        if not rule.minimum <= value <= rule.maximum:
            self.problem(name, f"{value} must be between {rule.minimum} and {rule.maximum}")
            return None
        return value

    def number(self, name: str, rule: Number) -> int:
        """An integer; its default when absent or wrong."""
        value = self.optional_number(name, rule)
        return rule.default_value if value is None else value

    def required_number(self, name: str, rule: Number) -> int:
        """An integer that must be given; its minimum when it is not."""
        if not self.has(name):
            self.problem(name, "is required")
        value = self.optional_number(name, rule)
        return rule.minimum if value is None else value

    def flag(self, name: str) -> bool | None:
        """A boolean; None when absent or wrong."""
        value = self.value.get(name)
        if value is None or isinstance(value, bool):
            return value
        self.problem(name, f"{value!r} must be true or false")
        return None

    def quantity(self, name: str) -> None:
        """Check an amount of a compute resource: an integer, or a string like 500m or 8Gi."""
        value = self.value.get(name)
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        if not is_count and not (isinstance(value, str) and re.fullmatch(QUANTITY_PATTERN, value)):
            self.problem(name, f"{value!r} must be a quantity, like 500m or 8Gi")

    def _list(self, name: str, max_items: int) -> list[Any]:
        value = self.value.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            self.problem(name, "must be a list")
            return []
        if len(value) > max_items:
            self.problem(name, f"has {len(value)} items, at most {max_items} are allowed")
        return value[:max_items]

    def _is_text(self, name: str, value: Any, rule: Text) -> bool:
        if not isinstance(value, str):
            self.problem(name, f"{value!r} must be a string")
        elif not rule.min_length <= len(value) <= rule.max_length:
            self.problem(name, f"has {len(value)} characters, {rule.min_length} to {rule.max_length} are allowed")
        elif rule.choices and value not in rule.choices:
            self.problem(name, f"{value!r} must be one of {', '.join(rule.choices)}")
        elif rule.pattern and re.fullmatch(rule.pattern, value) is None:
            self.problem(name, f"{value!r} must match {rule.pattern}" + (f"; {rule.hint}" if rule.hint else ""))
        else:
            return True
        return False
