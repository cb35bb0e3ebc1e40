"""Runs the stages of a Dockerfile without a container engine: in a folder, with only the files that it copies.

Absolute paths of the image (/opt, /src, /locks, /wheels, /var/cache) become paths below the stage's own folder. Steps
that install Debian packages are left out: what they install must be on this machine. One folder stands for all stages,
so `COPY --from` only checks that what it copies is there.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_PATHS = re.compile(r"(?<![\w.])/(opt|src|locks|wheels|var/cache)(?=[/:\s\"']|$)")
STEP_SECONDS = 900


@dataclass(frozen=True)
class Step:
    """One instruction."""

    word: str
    rest: str


@dataclass
class Stage:
    """FROM to the next FROM."""

    name: str
    base: str
    steps: list[Step] = field(default_factory=list)


def stages(path: Path) -> dict[str, Stage]:
    """By name. Continued lines are joined; comments are dropped."""
    found: dict[str, Stage] = {}
    current: Stage | None = None
    for step in _steps(path.read_text()):
        if step.word == "FROM":
            base, _, name = step.rest.partition(" AS ")
            current = found[name] = Stage(name, base)
        elif current is not None:
            current.steps.append(step)
    return found


def _steps(text: str) -> Iterator[Step]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        word, _, rest = line.strip().partition(" ")
        if word:
            yield Step(word, rest.strip())


class Builder:
    """Builds stages of one Dockerfile into one folder."""

    def __init__(self, context: Path, dockerfile: Path, root: Path) -> None:
        self.context, self.root = context, root
        self._stages = stages(dockerfile)
        self._built: set[str] = set()
        self.environment = {"HOME": str(root / "home"), "LANG": "C.UTF-8"}
        for name in ("PIP_FIND_LINKS", "PIP_CERT", "PIP_CONFIG_FILE", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
            if name in os.environ:
                self.environment[name] = os.environ[name]
        self.environment["PATH"] = f"{Path(sys.base_prefix) / 'bin'}:/usr/bin:/bin"

    def build(self, name: str) -> None:
        """A stage and what it stands on, once."""
        if name in self._built or name not in self._stages:
            return
        self._built.add(name)
        stage = self._stages[name]
        self.build(stage.base)
        folder = self.root
        for step in stage.steps:
            if step.word == "WORKDIR":
                folder = self._path(step.rest)
                folder.mkdir(parents=True, exist_ok=True)
            elif step.word == "ENV":
                for pair in shlex.split(step.rest):
                    key, _, value = pair.partition("=")
                    known = {key: str(value) for key, value in self.environment.items()}
                    self.environment[key] = self._moved(value.replace("$PATH", known["PATH"]))
            elif step.word == "COPY":
                self._copy(step.rest, folder)
            elif step.word == "RUN":
                self._run(step.rest, folder)

    def entrypoint(self, name: str) -> list[str]:
        (step,) = [step for step in self._stages[name].steps if step.word == "ENTRYPOINT"]
        words = step.rest.strip("[]").replace(",", " ")
        return shlex.split(words)

    def user(self, name: str) -> str:
        (step,) = [step for step in self._stages[name].steps if step.word == "USER"]
        return step.rest

    def _path(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def _moved(self, text: str) -> str:
        return _PATHS.sub(lambda found: f"{self.root}/{found[1]}", text)

    def _copy(self, rest: str, folder: Path) -> None:
        words = rest.split()
        if words[0].startswith("--from="):
            self.build(words[0].removeprefix("--from="))
            assert self._path(words[1]).exists(), f"COPY {rest}: nothing there"
            return
        *sources, target = words
        for source in sources:
            goal = self._path(target) if target.startswith("/") else folder / target
            if target.endswith("/"):
                goal = goal / Path(source).name
            goal.parent.mkdir(parents=True, exist_ok=True)
            origin = self.context / source
            if origin.is_dir():
                shutil.copytree(origin, goal, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
            else:
                shutil.copyfile(origin, goal)

    def _run(self, command: str, folder: Path) -> None:
        if "apt-get" in command or command.startswith("install -d"):
            return
        done = subprocess.run(
            ["bash", "-euc", self._moved(command)],
            cwd=folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=STEP_SECONDS,
        )
        assert done.returncode == 0, f"RUN {command}\n{done.stdout[-4000:]}"
