"""Specs as parsed last: statuses change all the time, specs hardly ever."""

from collections.abc import Mapping
from typing import Any

from pagefleet_operator.model import LLMDeployment, LLMDeploymentSpec
from pagefleet_operator.names import ObjectKey
from pagefleet_operator.parsing import parse


class Specs:
    """`parse` that remembers the last spec of each object. One per operator."""

    def __init__(self) -> None:
        self._known: dict[ObjectKey, tuple[Any, LLMDeploymentSpec]] = {}

    def parse(self, body: Mapping[str, Any]) -> LLMDeployment:
        """Like parsing.parse. Raises SpecError."""
        key = ObjectKey(body["metadata"]["namespace"], body["metadata"]["name"])
        raw, spec = self._known.get(key, (None, None))
        llmd = parse(body, spec=spec if spec is not None and raw == body.get("spec") else None)
        self._known[key] = (body.get("spec"), llmd.spec)
        return llmd

    def forget(self, key: ObjectKey) -> None:
        """The object is gone."""
        self._known.pop(key, None)
