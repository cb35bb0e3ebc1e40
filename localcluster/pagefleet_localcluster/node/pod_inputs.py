"""What a pod needs before its containers can start: configuration, volumes; and their commands."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pagefleet_localcluster.client import CONFIG_MAPS, SECRETS, SERVICES, UNREACHABLE, ApiError, Client
from pagefleet_localcluster.node.environment import ConfigProblem, PodFacts, service_variables
from pagefleet_localcluster.node.launch import ContainerFolder, build_command
from pagefleet_localcluster.node.process import Command
from pagefleet_localcluster.node.settings import NodeSettings
from pagefleet_localcluster.node.volumes import VolumeProblem, config_references, decode_config, prepare_volumes
from pagefleet_localcluster.objects import Object

HOST_ADDRESS = "127.0.0.1"
_CONFIG = {"ConfigMap": CONFIG_MAPS, "Secret": SECRETS}


class PodInputs:
    """Fetched once at the start, and again when something was missing."""

    def __init__(
        self,
        pod: Object,
        client: Client,
        settings: NodeSettings,
        *,
        address: str,
        allocatable: Mapping[str, str],
        folder: Path,
    ) -> None:
        self._client = client
        self._settings = settings
        self._folder = folder
        self._facts = PodFacts(pod, address, HOST_ADDRESS, allocatable, {}, {})
        self._volumes: dict[str, Path] = {}

    def update(self, pod: Object) -> None:
        """Take a newer version of the object."""
        self._facts = replace(self._facts, pod=pod)

    async def prepare(self) -> None:
        """Fetch configuration and create the volumes. Raises VolumeProblem with what is missing."""
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._settings.shared_directory / "cache").mkdir(parents=True, exist_ok=True)
        try:
            await self._fetch()
            self._volumes = prepare_volumes(self._facts, self._folder, self._settings.shared_directory)
        except (ConfigProblem, OSError, ApiError, *UNREACHABLE) as error:
            raise VolumeProblem(str(error)) from error

    async def command(self, container: Object, folder: ContainerFolder, gpu_ids: Sequence[int]) -> Command:
        """The command of a container; what is missing is looked for once more. Raises ConfigProblem, StartProblem."""

        def build() -> Command:
            return build_command(
                container,
                self._facts,
                settings=self._settings,
                folder=folder,
                volumes=self._volumes,
                gpu_ids=gpu_ids,
            )

        try:
            return build()
        except ConfigProblem as problem:
            try:
                await self._fetch()
            except (ApiError, *UNREACHABLE):
                raise problem from None
            return build()

    async def _fetch(self) -> None:
        pod = self._facts.pod
        namespace = pod["metadata"]["namespace"]
        config: dict[tuple[str, str], dict[str, str] | None] = {}
        for kind, name in sorted(config_references(pod)):
            try:
                config[kind, name] = decode_config(kind, await self._client.get(_CONFIG[kind], name, namespace))
            except ApiError as error:
                if error.code != 404:
                    raise
                config[kind, name] = None
        services: dict[str, str] = {}
        if pod["spec"].get("enableServiceLinks", True):
            services = service_variables((await self._client.list(SERVICES, namespace))["items"])
        self._facts = replace(self._facts, config=config, services=services)
