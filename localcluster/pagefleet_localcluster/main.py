"""`pagefleet-local`: starts, stops and describes a local cluster."""

import argparse
import asyncio
import json
import logging
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from pagefleet_localcluster.kubeconfig import Kubeconfig, KubeconfigError
from pagefleet_localcluster.node.images import ImageTable
from pagefleet_localcluster.node.process import end_stale, start_time
from pagefleet_localcluster.node.settings import NodeSettings

if TYPE_CHECKING:
    from pagefleet_localcluster.launcher import ClusterSettings

DEFAULT_FOLDER = Path(".pagefleet-local")
READY_SECONDS = 30.0
STOP_SECONDS = 30.0


def main(argv: Sequence[str] | None = None) -> None:
    """The console script. Exits with 1 and a reason when the command cannot be carried out."""
    options = _parser().parse_args(argv)
    options.dir = options.dir.absolute()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname).1s %(name)s %(message)s")
    try:
        if not start_time(os.getpid()):
            raise ValueError("this needs Linux: there is no /proc here")
        code = options.run(options)
    except (OSError, ValueError, KubeconfigError) as error:
        sys.exit(f"pagefleet-local: {error}")
    sys.exit(code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pagefleet-local", description="A Kubernetes cluster of local processes.")
    parser.add_argument("--version", action="version", version=version("pagefleet"))
    commands = parser.add_subparsers(dest="command", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--dir", type=Path, default=DEFAULT_FOLDER, help="the cluster's folder (%(default)s)")

    up = commands.add_parser("up", parents=[common], help="start a cluster and run it until Ctrl-C or `down`")
    up.add_argument("--nodes", type=int, default=1, help="process nodes, 0 to 32 (%(default)s)")
    up.add_argument("--gpus-per-node", type=int, default=0, help="nvidia.com/gpu slots of each node (%(default)s)")
    up.add_argument("--port", type=int, default=0, help="port of the API server; 0 takes a free one (%(default)s)")
    up.add_argument("--images", type=Path, help="YAML file with image rules, before the default ones")
    up.add_argument("--detach", action="store_true", help="return when it is ready; stop it with `down`")
    up.add_argument("--data-dir", type=Path, help="keep objects here over a restart (default: in memory)")
    up.set_defaults(run=_up)

    commands.add_parser("down", parents=[common], help="stop the cluster").set_defaults(run=_down)
    commands.add_parser("status", parents=[common], help="say whether it runs").set_defaults(run=_status)
    commands.add_parser("kubeconfig", parents=[common], help="print its path").set_defaults(run=_kubeconfig)

    node = commands.add_parser("node", parents=[common], help="run one process node against any cluster")
    node.add_argument("--kubeconfig", type=Path, required=True)
    node.add_argument("--name", required=True)
    node.add_argument("--index", type=int, default=31, help="which 127.(64+INDEX).0.0/16 its pods use (%(default)s)")
    node.add_argument("--gpus", type=int, default=0, help="nvidia.com/gpu slots (%(default)s)")
    node.add_argument("--lease-seconds", type=float, default=10.0, help="period of heartbeats (%(default)s)")
    node.set_defaults(run=_node)
    return parser


def _up(options: argparse.Namespace) -> int:
    from pagefleet_localcluster.launcher import ClusterSettings  # slow to import: other commands answer at once

    node_options = {"images": ImageTable.load(options.images)} if options.images is not None else {}
    settings = ClusterSettings(
        options.dir,
        options.nodes,
        options.gpus_per_node,
        options.port,
        options.data_dir and options.data_dir.absolute(),
        node_options=node_options,
    )
    if (pid := _running(options.dir)) is not None:
        raise ValueError(
            f"a cluster already runs in {options.dir} (pid {pid}); stop it with `{_down_command(options.dir)}`"
        )
    options.dir.mkdir(parents=True, exist_ok=True)
    if options.detach:
        return _detach(options)
    return asyncio.run(_serve(settings))


async def _serve(settings: "ClusterSettings") -> int:
    from pagefleet_localcluster.launcher import LocalCluster

    began = time.monotonic()
    stop = _stop_on_signals()
    state = _state_file(settings.directory)
    try:
        async with LocalCluster(settings) as cluster:
            seconds = time.monotonic() - began
            state.write_text(json.dumps({"pid": os.getpid(), "started": start_time(os.getpid()), "url": cluster.url}))
            print(f"cluster ready in {seconds:.2f} s at {cluster.url}: {settings.nodes} node(s)", flush=True)
            print(f"export KUBECONFIG={cluster.kubeconfig_path}", flush=True)
            failed = asyncio.create_task(cluster.wait())
            stopped = asyncio.create_task(stop.wait())
            await asyncio.wait({failed, stopped}, return_when=asyncio.FIRST_COMPLETED)
            print("stopping", flush=True)
            stopped.cancel()
            if failed.done():
                failed.result()
            failed.cancel()
    finally:
        state.unlink(missing_ok=True)
    print("stopped", flush=True)
    return 0


def _detach(options: argparse.Namespace) -> int:
    """Start the same command in the background and wait until it is ready."""
    command = [sys.executable, "-m", "pagefleet_localcluster.main", "up", "--dir", str(options.dir)]
    command += ["--nodes", str(options.nodes), "--gpus-per-node", str(options.gpus_per_node)]
    command += ["--port", str(options.port)]
    if options.images is not None:
        command += ["--images", str(options.images.absolute())]
    if options.data_dir is not None:
        command += ["--data-dir", str(options.data_dir.absolute())]
    log = options.dir / "cluster.log"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    deadline = time.monotonic() + READY_SECONDS
    while _running(options.dir) != process.pid:
        if process.poll() is not None or time.monotonic() > deadline:
            process.terminate()
            process.wait()
            raise ValueError(f"the cluster did not start:\n{log.read_text()[-2000:]}")
        time.sleep(0.02)
    process.returncode = 0  # it goes on without us
    print(log.read_text(), end="")
    print(f"running in the background (pid {process.pid}), log in {log}; stop it with `{_down_command(options.dir)}`")
    return 0


def _down_command(folder: Path) -> str:
    named = "" if folder == DEFAULT_FOLDER.absolute() else f" --dir {shlex.quote(str(folder))}"
    return f"pagefleet-local down{named}"


def _down(options: argparse.Namespace) -> int:
    pid = _running(options.dir)
    if pid is None:
        left = end_stale(options.dir / "nodes")
        print(f"no cluster runs in {options.dir}" + (f"; ended {len(left)} processes of a killed one" if left else ""))
        return 0
    started = start_time(pid)
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS
    while start_time(pid) == started:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            print(f"cluster {pid} did not stop within {STOP_SECONDS:g} s and was killed, its pods with it")
            return 1
        time.sleep(0.02)
    print("stopped")
    return 0


def _status(options: argparse.Namespace) -> int:
    pid = _running(options.dir)
    if pid is None:
        print(f"no cluster runs in {options.dir}")
        return 1
    print(f"running (pid {pid}) at {json.loads(_state_file(options.dir).read_text())['url']}")
    print(f"export KUBECONFIG={options.dir / 'kubeconfig'}")
    return 0


def _kubeconfig(options: argparse.Namespace) -> int:
    if _running(options.dir) is None:
        raise ValueError(f"no cluster runs in {options.dir}; start one with `pagefleet-local up`")
    print(options.dir / "kubeconfig")
    return 0


def _node(options: argparse.Namespace) -> int:
    settings = NodeSettings(
        options.name,
        options.dir / "nodes" / options.name,
        options.dir / "shared",
        index=options.index,
        gpus=options.gpus,
        lease_seconds=options.lease_seconds,
    )
    asyncio.run(_serve_node(settings, Kubeconfig.load(options.kubeconfig)))
    return 0


async def _serve_node(settings: NodeSettings, kubeconfig: Kubeconfig) -> None:
    from pagefleet_localcluster.client import Client
    from pagefleet_localcluster.node.node import Node

    stop = _stop_on_signals()
    async with Client(kubeconfig) as client:
        node = Node(settings, client, rng=random.Random())
        running = asyncio.create_task(node.run())
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait({running, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await node.close()


def _stop_on_signals() -> asyncio.Event:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


def _state_file(folder: Path) -> Path:
    return folder / "cluster.json"


def _running(folder: Path) -> int | None:
    """The pid of the cluster that runs in `folder`."""
    try:
        state = json.loads(_state_file(folder).read_text())
    except (OSError, ValueError):
        return None
    alive = start_time(state["pid"]) == state["started"]
    return int(state["pid"]) if alive and state["started"] else None


if __name__ == "__main__":
    main()
