"""From a container's spec to the command that runs it here. Pure but for looking up the executable."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pagefleet_localcluster.node.environment import ConfigProblem, PodFacts, argv_of, environment_of, expand
from pagefleet_localcluster.node.images import search_path
from pagefleet_localcluster.node.process import Command
from pagefleet_localcluster.node.settings import NodeSettings
from pagefleet_localcluster.node.volumes import mounts_of, path_rewriter
from pagefleet_localcluster.objects import Object


class StartProblem(Exception):
    """The command cannot be executed: the container ends at once with code 128 and this message."""


@dataclass(frozen=True)
class ContainerFolder:
    """Where one container keeps its files."""

    path: Path

    @property
    def work(self) -> Path:
        """Working directory and HOME."""
        return self.path / "work"

    @property
    def termination_log(self) -> Path:
        """What the container may say about its end."""
        return self.path / "termination-log"

    @property
    def pid_file(self) -> Path:
        """The running process."""
        return self.path / "container.pid"

    def log(self, restart: int) -> Path:
        """stdout and stderr of one run."""
        return self.path / f"{restart}.log"


def build_command(
    container: Object,
    facts: PodFacts,
    *,
    settings: NodeSettings,
    folder: ContainerFolder,
    volumes: Mapping[str, Path],
    gpu_ids: Sequence[int],
) -> Command:
    """The command of `container` with its environment. Raises ConfigProblem, StartProblem."""
    rule = settings.images.find(container["image"])
    if rule is None:
        raise ConfigProblem(f"image {container['image']!r} is not in this node's image table")
    metadata = facts.pod["metadata"]
    base = {
        "PATH": search_path(rule),
        "HOME": str(folder.work),
        "TMPDIR": str(folder.work),
        "HOSTNAME": metadata["name"],
        "LANG": "C.UTF-8",
        "XDG_CACHE_HOME": str(settings.shared_directory / "cache"),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpu_ids)),
        "PAGEFLEET_HOST": facts.address,
        **rule.environment,
    }
    if settings.kubeconfig is not None and facts.pod["spec"].get("automountServiceAccountToken", True):
        base["KUBECONFIG"] = str(settings.kubeconfig)
    names = {**base, "POD_NAME": metadata["name"], "POD_IP": facts.address}
    mounts = mounts_of(container, volumes, lambda text: expand(text, names))
    message_path = container.get("terminationMessagePath") or "/dev/termination-log"
    rewrite = path_rewriter([*mounts, (message_path, folder.termination_log)])
    environment = environment_of(container, facts, base, rewrite)
    argv = argv_of(container, environment, rewrite)
    if not container.get("command"):
        if not rule.entrypoint:
            raise ConfigProblem(
                f"container {container['name']!r} gives no command and image {container['image']!r} has none here"
            )
        argv = [*rule.entrypoint, *argv]
    argv = [*rule.argv_prefix, *argv]
    work = Path(rewrite(container["workingDir"])) if container.get("workingDir") else folder.work
    if not work.is_dir():
        raise StartProblem(f"workingDir {container.get('workingDir')!r} does not exist on this node")
    program = shutil.which(str(work / argv[0]) if "/" in argv[0] else argv[0], path=environment["PATH"])
    if program is None:
        raise StartProblem(f'exec: "{argv[0]}": executable file not found in $PATH')
    return Command(program, argv, environment, work)
