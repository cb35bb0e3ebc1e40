"""What was said to an API server, with this run's values replaced by placeholders, whole and in short."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Json = dict[str, Any]
_UID = re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b")
_NAME = re.compile(r"\bcontract-[0-9a-f]{8}\b")
_CASE = re.compile(r"\[(?:real|embedded)-?")
_CHANGING = re.compile(
    r"(?<=continue=)\w+|(?<=current: )\d+|(?<=does not match the ResourceVersion in record )\(\d+\)"
    r"|(?<=invalid character ').*(?=' looking)"  # Go's versions quote differently
)
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


def case_name(test_name: str) -> str:
    """The name of a case without the server that it ran on."""
    return _CASE.sub("[", test_name).removesuffix("[]")


def in_short(transcript: Json) -> list[str]:
    """A normalised transcript's requests and what became of them: status, and a failure's reason, message and causes.

    Of equal requests in a row (a case that waits) only the last counts."""
    lines: list[str] = []
    before: Json = {}
    for step in transcript["steps"]:
        asked, answer = step["request"], step["response"]
        query = "&".join(f"{key}={value}" for key, value in sorted(asked["query"].items()))
        line = f"{asked['method']} {asked['path']}{'?' + query if query else ''} -> {answer['status']}"
        body = answer["body"]
        if isinstance(body, dict) and body.get("status") == "Failure":
            line += f" {body.get('reason', '')}: {body['message']}"
            causes = (body.get("details") or {}).get("causes") or ()
            line += "".join(f" [{cause.get('reason')} {cause.get('field')}]" for cause in causes)
        if asked == before:
            lines.pop()
        lines.append(_CHANGING.sub("<...>", line))
        before = asked
    return lines


def write_cases(path: Path, cases: dict[str, list[str]]) -> None:
    """Add cases to a file of short transcripts."""
    known = json.loads(path.read_text()) if path.exists() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dict(sorted((known | cases).items())), indent=1, ensure_ascii=False) + "\n")
