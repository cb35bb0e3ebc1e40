"""What an image name means without containers: an argv prefix, a PATH and an environment."""

import fnmatch
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import yaml


def repository_of(image: str) -> str:
    """The image without tag and digest: `registry:5000/team/server:v1@sha256:...` -> `registry:5000/team/server`."""
    name = image.split("@", 1)[0]
    head, _, last = name.rpartition("/")
    last = last.split(":", 1)[0]
    return f"{head}/{last}" if head else last


@dataclass(frozen=True)
class ImageRule:
    """How containers of some images run."""

    patterns: tuple[str, ...]
    """Shell patterns for the repository's last part or the whole repository; the first rule that matches counts."""
    argv_prefix: tuple[str, ...] = ()
    """Put before the container's command and args."""
    entrypoint: tuple[str, ...] = ()
    """The command of a container that gives none; empty refuses such a container."""
    path: tuple[str, ...] = ()
    """Folders for PATH, before the system's."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the container's own `env` may override."""

    def matches(self, image: str) -> bool:
        """Whether the rule is for this image."""
        repository = repository_of(image)
        names = (repository, repository.rpartition("/")[2])
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.patterns for name in names)


INTERPRETER_BIN = str(Path(sys.executable).parent)

DEFAULT_RULES = (
    ImageRule(("server", "pagefleet-server"), entrypoint=("pagefleet-server",), path=(INTERPRETER_BIN,)),
    ImageRule(("operator", "pagefleet-operator"), entrypoint=("pagefleet-operator",), path=(INTERPRETER_BIN,)),
    ImageRule(("*",), path=(INTERPRETER_BIN,)),
)
"""Our images are the running interpreter's installation; any other image is this machine, if it gives a command."""


@dataclass(frozen=True)
class ImageTable:
    """Rules in order."""

    rules: tuple[ImageRule, ...] = DEFAULT_RULES

    def find(self, image: str) -> ImageRule | None:
        """The rule for an image; None when the node does not have it."""
        return next((rule for rule in self.rules if rule.matches(image)), None)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Rules from a YAML file, before the default ones. Raises ValueError that names the place.

        `images: [{patterns: [...], argvPrefix: [...], entrypoint: [...], path: [...], environment: {...}}]`"""
        try:
            document = yaml.safe_load(path.read_text())
        except (OSError, yaml.YAMLError) as error:
            raise ValueError(f"cannot read image table {path}: {error}") from error
        entries = document.get("images") if isinstance(document, dict) else None
        if not isinstance(entries, list):
            raise ValueError(f"image table {path}: expected a mapping with the list `images`")
        return cls(
            (*(_rule(entry, f"image table {path}: images[{i}]") for i, entry in enumerate(entries)), *DEFAULT_RULES)
        )


def _rule(entry: Any, where: str) -> ImageRule:
    names = {"patterns": "patterns", "argvPrefix": "argv_prefix", "entrypoint": "entrypoint", "path": "path"}
    if not isinstance(entry, dict) or "patterns" not in entry:
        raise ValueError(f"{where}: no `patterns`")
    fields: dict[str, Any] = {}
    for key, value in entry.items():
        if key == "environment" and isinstance(value, dict):
            fields["environment"] = {str(name): str(text) for name, text in value.items()}
        elif key not in names:
            raise ValueError(f"{where}: unknown field {key!r}; known: {', '.join([*names, 'environment'])}")
        elif not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise ValueError(f"{where}.{key}: expected a list of strings")
        else:
            fields[names[key]] = tuple(value)
    return ImageRule(**fields)


def search_path(rule: ImageRule) -> str:
    """The PATH of a container under `rule`."""
    return os.pathsep.join((*rule.path, "/usr/local/bin", "/usr/bin", "/bin"))
