"""What was said to an API server, with this run's values replaced by placeholders."""

import re
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]
_UID = re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b")
_NAME = re.compile(r"\bcontract-[0-9a-f]{8}\b")
_TIME = re.compile(r"\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")


@dataclass
class Transcript:
    """Exchanges in order."""

    steps: list[Json] = field(default_factory=list)

    def add(self, request: Json, status: int, body: Any) -> None:
        """One exchange."""
        name = f"{len(self.steps) + 1} {request['method']} {request['path'].rpartition('/')[2]}"
        self.steps.append({"name": name, "request": request, "response": {"status": status, "body": body}})

    def clear(self) -> None:
        """Forgets what came before the case."""
        self.steps.clear()

    def normalised(self, topic: str) -> Json:
        """The steps in the form of the recordings: `<uid-1>`, `<rv-2>`, `<time>`."""
        names: dict[str, str] = {}

        def placeholder(kind: str, value: str) -> str:
            key = f"{kind} {value}"
            if key not in names:
                names[key] = f"<{kind}-{sum(name.startswith(kind + ' ') for name in names) + 1}>"
            return names[key]

        def walk(value: Any, key: str = "") -> Any:
            if isinstance(value, dict):
                return {name: walk(item, name) for name, item in value.items()}
            if isinstance(value, list):
                return [walk(item) for item in value]
            if not isinstance(value, str):
                return value
            if key == "resourceVersion" and value.isdecimal():
                return placeholder("rv", value)
            value = _NAME.sub(lambda match: placeholder("name", match[0]), value)
            return _TIME.sub("<time>", _UID.sub(lambda match: placeholder("uid", match[0]), value))

        return {"topic": topic, "steps": [walk(step) for step in self.steps]}
