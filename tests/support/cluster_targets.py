"""The API servers that the contract suite runs on, each as a kubeconfig.

`embedded` always. `real` when KUBEBUILDER_ASSETS (or envtest's default folder) holds kube-apiserver and etcd, or when
PAGEFLEET_CONTRACT_KUBECONFIG names a kubeconfig: the suite makes and deletes namespaces and a CRD there, so it never
takes KUBECONFIG by itself. Beside the two binaries run the local controllers, and for garbage and namespaces
kube-controller-manager if it is there too, else a stand-in."""

import asyncio
import contextlib
import os
import random
import socket
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from ssl import CERT_NONE, create_default_context
from typing import TypeVar

import yaml

from pagefleet_localcluster.api.rbac import User
from pagefleet_localcluster.api.server import ApiServer
from pagefleet_localcluster.client import Client
from pagefleet_localcluster.controllers.manager import ControllerManager
from pagefleet_localcluster.kubeconfig import Kubeconfig
from pagefleet_localcluster.launcher import ClusterSettings, LocalCluster
from support.housekeeping import keep_house
from support.localapi import TOKEN, VIEWER_TOKEN

ENVTEST_FOLDER = Path("/usr/local/kubebuilder/bin")
_START_SECONDS = 60.0
T = TypeVar("T")


def real_binaries() -> Path | None:
    """The folder with kube-apiserver and etcd, if the user has one."""
    folder = Path(os.environ.get("KUBEBUILDER_ASSETS") or ENVTEST_FOLDER)
    return folder if (folder / "kube-apiserver").exists() and (folder / "etcd").exists() else None


def is_foreign() -> bool:
    """Whether the real server is one that we did not start."""
    return bool(os.environ.get("PAGEFLEET_CONTRACT_KUBECONFIG"))


def target_names() -> list[str]:
    """The targets of this run."""
    return ["embedded", "real"] if is_foreign() or real_binaries() else ["embedded"]


@contextlib.contextmanager
def target(name: str, folder: Path) -> Iterator[Kubeconfig]:
    """Starts a target and tells how to reach it."""
    if name == "embedded":
        with embedded_cluster() as found:
            yield found
    elif is_foreign():
        yield Kubeconfig.load(os.environ["PAGEFLEET_CONTRACT_KUBECONFIG"])
    else:
        binaries = real_binaries()
        assert binaries is not None
        with _real_cluster(binaries, folder) as path:
            kubeconfig = Kubeconfig.load(path)
            with _in_thread(lambda: _control_plane(kubeconfig, house=not has_own_collector(binaries))):
                yield kubeconfig


def has_own_collector(binaries: Path) -> bool:
    """Whether Kubernetes' controller manager is there, to collect garbage and to end namespaces."""
    return (binaries / "kube-controller-manager").exists()


@contextlib.contextmanager
def embedded_cluster(*, controllers: bool = True, clock: Callable[[], float] = time.time) -> Iterator[Kubeconfig]:
    """The embedded API and the local controllers, in a thread of their own. `clock`: the API's, Unix seconds."""

    @contextlib.asynccontextmanager
    async def serve() -> AsyncIterator[Kubeconfig]:
        server = ApiServer("127.0.0.1", 0, TOKEN, users={VIEWER_TOKEN: User("viewer")}, clock=clock)
        await server.start()
        kubeconfig = Kubeconfig(server.url, TOKEN)
        try:
            async with contextlib.AsyncExitStack() as stack:
                if controllers:
                    await stack.enter_async_context(_control_plane(kubeconfig))
                yield kubeconfig
        finally:
            await server.stop()

    with _in_thread(serve) as found:
        yield found


@contextlib.contextmanager
def whole_cluster(folder: Path) -> Iterator[Path]:
    """A whole local cluster with one process node, in a thread of its own; yields its kubeconfig."""
    with _in_thread(lambda: LocalCluster(ClusterSettings(folder))):
        yield folder / "kubeconfig"


@contextlib.asynccontextmanager
async def _control_plane(kubeconfig: Kubeconfig, *, house: bool = False) -> AsyncIterator[None]:
    """The local controllers on any API server; `house`: also what an API server alone does not do."""
    async with (
        Client(kubeconfig, user_agent="kube-controller-manager") as client,
        Client(kubeconfig, user_agent="kube-scheduler") as scheduler,
    ):
        with tempfile.TemporaryDirectory() as claims:
            manager = ControllerManager(
                client, rng=random.Random(1), claims_directory=Path(claims), scheduler_client=scheduler
            )
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(manager.run())]
                if house:
                    tasks.append(group.create_task(keep_house(client)))
                yield
                for task in tasks:
                    task.cancel()


@contextlib.contextmanager
def _in_thread(context: Callable[[], contextlib.AbstractAsyncContextManager[T]]) -> Iterator[T]:
    """Holds an async context open on an event loop in a thread of its own."""
    started: list[T] = []
    failures: list[BaseException] = []
    ready, stop = threading.Event(), threading.Event()

    async def hold() -> None:
        async with context() as value:
            started.append(value)
            ready.set()
            await asyncio.to_thread(stop.wait)

    def run() -> None:
        try:
            asyncio.run(hold())
        except BaseException as error:
            failures.append(error)
            raise
        finally:
            ready.set()

    thread = threading.Thread(target=run, name="cluster")
    thread.start()
    try:
        ready.wait()
        if not started:
            raise RuntimeError(f"the cluster did not start: {failures}")
        yield started[0]
    finally:
        stop.set()
        thread.join()


@contextlib.contextmanager
def _real_cluster(binaries: Path, folder: Path) -> Iterator[Path]:
    """etcd and kube-apiserver on loopback ports, as envtest starts them."""
    etcd_port, peer_port, port = (_free_port() for _ in range(3))
    key, public, tokens = folder / "sa.key", folder / "sa.pub", folder / "tokens.csv"
    subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
    subprocess.run(["openssl", "rsa", "-in", str(key), "-pubout", "-out", str(public)], check=True, capture_output=True)
    tokens.write_text(f'{TOKEN},admin,1,"system:masters"\n{VIEWER_TOKEN},viewer,2\n')
    etcd_url, peer_url = f"http://127.0.0.1:{etcd_port}", f"http://127.0.0.1:{peer_port}"
    commands = [
        [
            str(binaries / "etcd"),
            f"--data-dir={folder / 'etcd'}",
            f"--listen-client-urls={etcd_url}",
            f"--advertise-client-urls={etcd_url}",
            f"--listen-peer-urls={peer_url}",
            f"--initial-advertise-peer-urls={peer_url}",
            f"--initial-cluster=default={peer_url}",
        ],
        [
            str(binaries / "kube-apiserver"),
            f"--etcd-servers={etcd_url}",
            f"--cert-dir={folder}",
            f"--secure-port={port}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            "--endpoint-reconciler-type=none",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={public}",
            f"--service-account-signing-key-file={key}",
            f"--token-auth-file={tokens}",
            "--authorization-mode=RBAC",
            "--disable-admission-plugins=ServiceAccount",
            "--enable-priority-and-fairness=false",
        ],
    ]
    processes: list[subprocess.Popen[bytes]] = []

    def start(*command: str) -> None:
        with (folder / f"{Path(command[0]).name}.log").open("wb") as log:
            processes.append(subprocess.Popen(command, stdout=log, stderr=log))

    try:
        for command in commands:
            start(*command)
        _wait_ready(f"https://127.0.0.1:{port}/readyz", processes)
        kubeconfig = _write_kubeconfig(folder, port)
        if has_own_collector(binaries):
            chosen = "garbage-collector-controller,namespace-controller"
            manager = str(binaries / "kube-controller-manager")
            start(manager, f"--kubeconfig={kubeconfig}", f"--controllers={chosen}", "--leader-elect=false",
                  "--secure-port=0", "--use-service-account-credentials=false")  # fmt: skip
        yield kubeconfig
    finally:
        for process in reversed(processes):
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _write_kubeconfig(folder: Path, port: int) -> Path:
    cluster = {"server": f"https://127.0.0.1:{port}", "insecure-skip-tls-verify": True}
    path = folder / "kubeconfig"
    document = {
        "clusters": [{"name": "real", "cluster": cluster}],
        "users": [{"name": "real", "user": {"token": TOKEN}}],
        "contexts": [{"name": "real", "context": {"cluster": "real", "user": "real"}}],
        "current-context": "real",
    }
    path.write_text(yaml.safe_dump(document))
    return path


def _wait_ready(url: str, processes: list[subprocess.Popen[bytes]]) -> None:
    context = create_default_context()
    context.check_hostname, context.verify_mode = False, CERT_NONE
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end:
        if any(process.poll() is not None for process in processes):
            raise RuntimeError(f"kube-apiserver or etcd ended at once: {[p.args for p in processes]}")
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            urllib.request.urlopen(url, context=context, timeout=1).close()
            return
        time.sleep(0.2)
    raise TimeoutError(f"{url} did not answer within {_START_SECONDS} s")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
