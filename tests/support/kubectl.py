"""Running kubectl against the embedded API, and its output with this run's values replaced."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from pagefleet_localcluster.kubeconfig import Kubeconfig
from support.localapi import TOKEN

_PLACEHOLDERS = (
    (re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z"), "<time>"),
    (re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+ [+-]\d{4}"), "<time>"),
    (re.compile(r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun), \d\d \w{3} \d{4} \d\d:\d\d:\d\d \+0000"), "<time>"),
    (re.compile(r"\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"), "<uid>"),
    (re.compile(r'(Resource Version:\s+|resourceVersion: ")\d+'), r"\1<rv>"),
    (re.compile(r"\b(web)-[0-9a-z]{8,10}(-[0-9a-z]{5})?\b"), r"\1-<suffix>"),
    (re.compile(r"\b127(\.\d{1,3}){3}\b"), "<ip>"),
    (re.compile(r"\S*/(LIVE|MERGED)(-\d+)?/"), r"/\1/"),
    (re.compile(r"(?<=\s)\d+s(?= |$)"), "<age>"),
    (re.compile(r"<age> \(x\d+ over <age>\)"), "<age>"),
    (re.compile(r'"<rv>"|<rv>'), "<rv>"),
)


def kubectl_path() -> Path:
    """The kubectl that came with the development dependencies."""
    return Path(sys.executable).parent / "kubectl"


def normalised(text: str) -> list[str]:
    """Lines of an output that do not hang on this run; columns one space apart, as widths follow the values."""
    lines = []
    for line in text.splitlines():
        for pattern, placeholder in _PLACEHOLDERS:
            line = pattern.sub(placeholder, line)
        lines.append(" ".join(line.split()))
    while lines and not lines[-1]:
        lines.pop()
    return lines


@dataclass(frozen=True)
class Said:
    """What one command printed."""

    output: str
    code: int

    def lines(self) -> list[str]:
        """Normalised output and the exit code, as the recordings write it."""
        return [*normalised(self.output), f"(exit {self.code})"]


@dataclass(frozen=True)
class Kubectl:
    """kubectl with its own kubeconfig and cache."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, kubeconfig: Kubeconfig, folder: Path) -> "Kubectl":
        """One that reaches the embedded cluster: over plain HTTP the path carries the token."""
        config = Kubeconfig(f"{kubeconfig.server}/token/{TOKEN}")
        config.write(folder / "kubeconfig", name="local")
        return cls.at(folder / "kubeconfig", folder)

    @classmethod
    def at(cls, kubeconfig_path: Path, folder: Path) -> "Kubectl":
        """One with this kubeconfig, at home in `folder`."""
        own = {
            "KUBECONFIG": str(kubeconfig_path),
            "KUBECACHEDIR": str(folder / "cache"),
            "KUBE_EDITOR": "true",
            "HOME": str(folder),
            "TMPDIR": str(folder),
            "TZ": "UTC",
            "PATH": os.environ["PATH"],
        }
        return cls(folder, own)

    def __call__(self, *arguments: str, timeout_seconds: float = 90.0) -> Said:
        """Runs one command in the folder."""
        done = subprocess.run(
            [str(kubectl_path()), *arguments],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_seconds,
            check=False,
        )
        return Said(done.stdout, done.returncode)

    def ok(self, *arguments: str) -> str:
        """Output of a command that must succeed."""
        said = self(*arguments)
        assert said.code == 0, f"kubectl {' '.join(arguments)}: {said.output}"
        return said.output

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        """A command that runs on, such as `get -w`."""
        return subprocess.Popen(
            [str(kubectl_path()), *arguments],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
