"""A whole local cluster in one process: API server, controllers, service proxy, nodes."""

import asyncio
import contextlib
import logging
import os
import random
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pagefleet_localcluster.api.server import ApiServer
from pagefleet_localcluster.client import NODES, UNREACHABLE, ApiError, Client
from pagefleet_localcluster.controllers.manager import ControllerManager
from pagefleet_localcluster.kubeconfig import Kubeconfig
from pagefleet_localcluster.node.node import Node
from pagefleet_localcluster.node.settings import NodeSettings
from pagefleet_localcluster.objects import condition_of

logger = logging.getLogger(__name__)

START_SECONDS = 20.0
HOST = "127.0.0.1"


@dataclass(frozen=True)
class ClusterSettings:
    """One local cluster."""

    directory: Path
    """Holds everything: kubeconfig, logs, pods' folders. Created when absent."""
    nodes: int = 1
    """Process nodes, 0..32."""
    gpus_per_node: int = 0
    """`nvidia.com/gpu` slots that each node offers, whether the machine has them or not."""
    port: int = 0
    """Of the API server on 127.0.0.1; 0 takes a free one."""
    data_directory: Path | None = None
    """Where objects and the administrator's token survive a restart; None keeps them in memory."""
    node_grace_seconds: float = 40.0
    """After this time without a heartbeat a node counts as dead."""
    node_options: dict[str, Any] = field(default_factory=dict)
    """Further fields of every node's NodeSettings."""

    def __post_init__(self) -> None:
        if not 0 <= self.nodes <= 32:
            raise ValueError(f"nodes {self.nodes} is outside 0..32")
        if not 0 <= self.gpus_per_node <= 64:
            raise ValueError(f"gpus per node {self.gpus_per_node} is outside 0..64")
        if not 0 <= self.port < 65536:
            raise ValueError(f"port {self.port} is outside 0..65535")

    def node(self, index: int) -> NodeSettings:
        """The settings of one node."""
        name = f"local-{index}"
        return NodeSettings(
            name=name,
            directory=self.directory / "nodes" / name,
            shared_directory=self.directory / "shared",
            index=index,
            gpus=self.gpus_per_node,
            kubeconfig=self.directory / "kubeconfig",
            **self.node_options,
        )


class LocalCluster:
    """`async with LocalCluster(ClusterSettings(directory)) as cluster:` runs a cluster until the block ends."""

    def __init__(self, settings: ClusterSettings) -> None:
        self.settings = settings
        self.kubeconfig_path = settings.directory / "kubeconfig"
        self.nodes: dict[str, Node] = {}
        self._api = ApiServer(HOST, settings.port, _token(settings.data_directory), settings.data_directory)
        self._client: Client | None = None
        self._kubeconfig = Kubeconfig("")
        self._open = contextlib.AsyncExitStack()
        self._manager_task: asyncio.Task[None] | None = None
        self._node_tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def url(self) -> str:
        """The API server's address."""
        return self._api.url

    @property
    def client(self) -> Client:
        """An administrator's client, open while the cluster runs."""
        if self._client is None:
            raise RuntimeError("the cluster is not running")
        return self._client

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def _start(self) -> None:
        self.settings.directory.mkdir(parents=True, exist_ok=True)
        await self._api.start()
        self._kubeconfig = Kubeconfig(self._api.kubeconfig_url)
        self._kubeconfig.write(self.kubeconfig_path, name="pagefleet-local")
        self._client = await self._connect("pagefleet-local")
        manager = ControllerManager(
            await self._connect("kube-controller-manager"),
            scheduler_client=await self._connect("kube-scheduler"),
            claims_directory=self.settings.directory / "shared" / "claims",
            rng=random.Random(),
            node_grace_seconds=self.settings.node_grace_seconds,
        )
        self._manager_task = asyncio.create_task(manager.run())
        for index in range(self.settings.nodes):
            await self.start_node(index)
        async with asyncio.timeout(START_SECONDS):
            await asyncio.gather(*(self._node_ready(name) for name in self.nodes))

    async def start_node(self, index: int) -> Node:
        """Start the process node `local-INDEX`."""
        node = Node(self.settings.node(index), await self._connect("kubelet"), rng=random.Random())
        self.nodes[node.settings.name] = node
        self._node_tasks[node.settings.name] = asyncio.create_task(node.run())
        return node

    async def _connect(self, component: str) -> Client:
        """A client under the name that managedFields show for this component of a real cluster."""
        return await self._open.enter_async_context(Client(self._kubeconfig, user_agent=component))

    async def wait(self) -> None:
        """Return when a part of the cluster has failed (its exception is raised)."""
        tasks = [task for task in (self._manager_task, *self._node_tasks.values()) if task is not None]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def stop(self) -> None:
        """End in order: controllers (nothing is started any more), pods, API server."""
        if self._manager_task is not None:
            await _cancel(self._manager_task)
        await asyncio.gather(*(self.stop_node(name) for name in list(self.nodes)))
        self._client = None
        await self._open.aclose()
        await self._api.stop()
        self.kubeconfig_path.unlink(missing_ok=True)

    async def stop_node(self, name: str) -> None:
        """Shut one node down, its pods' processes with it; its objects stay."""
        node = self.nodes.pop(name)
        await _cancel(self._node_tasks.pop(name))
        await node.close()

    async def _node_ready(self, name: str) -> None:
        while True:
            if self._node_tasks[name].done():
                self._node_tasks[name].result()
            try:
                condition = condition_of(await self.client.get(NODES, name), "Ready")
                if condition is not None and condition["status"] == "True":
                    return
            except (ApiError, *UNREACHABLE) as error:
                logger.debug("waiting for node %s: %s", name, error)
            await asyncio.sleep(0.02)


def _token(folder: Path | None) -> str:
    """The administrator's token: kept with the objects, so that clients survive a restart with them."""
    if folder is None:
        return secrets.token_hex(16)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "token"
    if not path.exists():
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            file.write(secrets.token_hex(16))
    return path.read_text()


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
