"""What an image name means without containers: an argv prefix, a PATH and an environment."""

import fnmatch
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


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


def search_path(rule: ImageRule) -> str:
    """The PATH of a container under `rule`."""
    return os.pathsep.join((*rule.path, "/usr/local/bin", "/usr/bin", "/bin"))
