"""Recorded exchanges with a real API server: replaying them, and saying where an answer differs.

Placeholders (`<uid-1>`, `<rv-2>`, `<time>`, `<suffix-1>`) stand for values that every run makes anew; the replay
learns a value where the recording has its placeholder, and puts it into later requests."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Json = dict[str, Any]
_PLACEHOLDER = re.compile(r"<(uid|rv-text|rv|suffix|time|text|continue-token|cluster-ip|age)(-\d+)?>")
_AGE = re.compile(r"\d+s")
_LEARNED = re.compile(r"<((uid|rv|suffix)-\d+|continue-token|cluster-ip)>")


@dataclass(frozen=True)
class Difference:
    """One place where an answer is not as recorded."""

    path: str
    want: Any
    got: Any

    def __str__(self) -> str:
        return f"{self.path}: recorded {_short(self.want)}, got {_short(self.got)}"


def _short(value: Any) -> str:
    return json.dumps(value)[:300]


@dataclass
class Recording:
    """One topic of recorded steps."""

    topic: str
    steps: list[Json]


def load(folder: Path, topic: str) -> Recording:
    """Reads one topic; names that a run makes anew become placeholders."""
    text = (folder / f"{topic}.json").read_text()
    hashes = re.findall(r'"pod-template-hash": "(\w+)"', text) + re.findall(r'ReplicaSet \\"\w+-(\w+)\\"', text)
    for number, name in enumerate(dict.fromkeys(hashes)):
        text = text.replace(name, f"<suffix-{100 + number}>")
    for number, name in enumerate(dict.fromkeys(re.findall(r"<suffix-\d+>-([a-z0-9]{5})\b", text))):
        text = text.replace(f">-{name}", f">-<suffix-{200 + number}>")
    for number, name in enumerate(dict.fromkeys(re.findall(r">\.([0-9a-f]{16})\b", text))):
        text = text.replace(name, f"<suffix-{300 + number}>")
    text = re.sub(r'"continue": "eyJ\w+"', '"continue": "<continue-token>"', text)
    return Recording(topic, json.loads(text)["steps"])


@dataclass
class Replay:
    """What a replay has learned: placeholder -> this run's value."""

    values: dict[str, str] = field(default_factory=dict)
    _seconds: int = 0

    def fill(self, value: Any) -> Any:
        """A recorded request with this run's values."""
        if isinstance(value, dict):
            return {self.fill(key): self.fill(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.fill(item) for item in value]
        if isinstance(value, str):
            return _PLACEHOLDER.sub(lambda m: self.values.get(m[0]) or self._made_up(m[0]), value)
        return value

    def _made_up(self, placeholder: str) -> str:
        """A value for what no answer has shown yet; times move on."""
        if placeholder == "<time>":
            self._seconds += 1
            return f"2026-01-01T00:00:{self._seconds % 60:02}.000000Z"
        return "00000000-0000-4000-8000-000000000000" if placeholder.startswith("<uid") else "1"

    def compare(self, want: Any, got: Any, path: str = "") -> Iterator[Difference]:
        """Differences of an answer from its recording; learns on the way."""
        if isinstance(want, dict) and isinstance(got, dict):
            got = self._rename_keys(want, got)
            for key in sorted({*want, *got}):
                where = f"{path}.{key}" if path else str(key)
                if key not in got or key not in want:
                    yield Difference(where, want.get(key, "(absent)"), got.get(key, "(absent)"))
                else:
                    yield from self.compare(want[key], got[key], where)
        elif isinstance(want, list) and isinstance(got, list):
            if len(want) != len(got):
                yield Difference(f"{path}[]", want, got)
            for index, (one, other) in enumerate(zip(want, got, strict=False)):
                yield from self.compare(one, other, f"{path}[{index}]")
        elif isinstance(want, str) and isinstance(got, str):
            if not self._same_text(want, got):
                yield Difference(path, want, got)
        elif want != got or type(want) is not type(got):
            yield Difference(path, want, got)

    def _rename_keys(self, want: Json, got: Json) -> Json:
        """Keys that hold a generated value (`k:{"uid":...}`) under their recorded spelling."""
        renamed = dict(got)
        for key in want:
            if key not in got and key.startswith('k:{"uid"'):
                other = next((k for k in got if k.startswith('k:{"uid"') and k not in want), None)
                if other is not None:
                    renamed[key] = renamed.pop(other)
        return renamed

    def _same_text(self, want: str, got: str) -> bool:
        if want == got or (_AGE.fullmatch(want) and _AGE.fullmatch(got)):
            return True
        if not _PLACEHOLDER.search(want):
            return False
        names: list[str] = []
        pattern, at = "", 0
        for match in _PLACEHOLDER.finditer(want):
            pattern += re.escape(want[at : match.start()])
            known = self.values.get(match[0])
            if known is not None and match[1] not in ("rv", "continue-token"):
                pattern += re.escape(known)
            else:
                pattern += "(.*)" if match[1] in ("text", "rv-text", "time") else "(.+?)"
                names.append(match[0])
            at = match.end()
        found = re.fullmatch(pattern + re.escape(want[at:]), got, re.DOTALL)
        if not found:
            return False
        for name, value in zip(names, found.groups(), strict=True):
            if _LEARNED.fullmatch(name):
                self.values[name] = value
        return True
