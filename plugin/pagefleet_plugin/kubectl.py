"""kubectl as the way to the cluster: the caller's context, login and proxies are its own."""

import asyncio
import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pagefleet_plugin.errors import PluginError

MAX_ERROR_CHARS = 500
TIMEOUT_SECONDS = 30.0
RESOURCE = "llmdeployments.pagefleet.dev"


KLOG = re.compile(r"[EWIF]\d{4} .*")
"""A line of the client library's log, which repeats what kubectl says last."""


def own_words(stderr: str) -> str:
    """What kubectl says of its failure, at most MAX_ERROR_CHARS of it."""
    lines = [line for line in stderr.splitlines() if not KLOG.match(line)]
    return "\n".join(lines).strip().removeprefix("error: ")[:MAX_ERROR_CHARS]


@dataclass(frozen=True, slots=True)
class Kubectl:
    """How kubectl is called."""

    executable: str
    """Path of kubectl."""
    options: tuple[str, ...] = ()
    """Given before every command: --context, --kubeconfig, --namespace."""

    @classmethod
    def find(cls, options: Sequence[str]) -> "Kubectl":
        """kubectl of PATH. Raises PluginError without one."""
        found = shutil.which(os.environ.get("KUBECTL", "kubectl"))
        if found is None:
            raise PluginError("no kubectl in PATH: install it, or name it in the environment variable KUBECTL")
        return cls(found, tuple(options))

    def command(self, *arguments: str) -> list[str]:
        """The whole command line."""
        return [self.executable, *self.options, *arguments]

    async def run(self, *arguments: str) -> str:
        """Standard output. Raises PluginError with kubectl's own words when it fails or takes over 30 s."""
        process = await asyncio.create_subprocess_exec(
            *self.command(*arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(), TIMEOUT_SECONDS)
        except TimeoutError:
            raise PluginError(f"kubectl {arguments[0]} gave no answer within {TIMEOUT_SECONDS:.0f} s") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode != 0:
            raise PluginError(own_words(err.decode(errors="replace")) or f"kubectl {arguments[0]} failed")
        return out.decode(errors="replace")

    async def get_json(self, *arguments: str) -> dict[str, Any]:
        """`kubectl get ARGUMENTS -o json`, parsed."""
        text = await self.run("get", *arguments, "-o", "json")
        try:
            body = json.loads(text)
        except json.JSONDecodeError as error:
            raise PluginError(f"kubectl get {' '.join(arguments)} did not print JSON: {error}") from error
        if not isinstance(body, dict):
            raise PluginError(f"kubectl get {' '.join(arguments)} printed {type(body).__name__} instead of an object")
        return body
