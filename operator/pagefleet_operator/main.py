"""`pagefleet-operator`: the life of the process. Health, lease, loops, watches; and back."""

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version

import kopf

from pagefleet_operator.client import Access, Api, load_access, pod_namespace
from pagefleet_operator.clock import steady_clock
from pagefleet_operator.errors import ApiError, OperatorError, TooOldError
from pagefleet_operator.events import EventRecorder
from pagefleet_operator.health import Health
from pagefleet_operator.lease import LeaseHolder
from pagefleet_operator.manager import Manager
from pagefleet_operator.pacing import Pace
from pagefleet_operator.reconcile import Context
from pagefleet_operator.resources import LLMDEPLOYMENTS
from pagefleet_operator.scrape import Scraper
from pagefleet_operator.settings import ChildSettings, LeaseSettings, OperatorSettings
from pagefleet_operator.sharing import Shares
from pagefleet_operator.specs import Specs
from pagefleet_operator.store import LLMDEPLOYMENT, Store
from pagefleet_operator.telemetry import Telemetry
from pagefleet_operator.watch import build_registry
from pagefleet_operator.write_budget import WriteBudget

logger = logging.getLogger("pagefleet_operator")

OLDEST_KUBERNETES = (1, 30)
CRD_POLL_SECONDS = 2.0
EXIT_FAILED = 1
EXIT_LEASE_LOST = 2
EXIT_TOO_OLD = 3
"""The API server is older than OLDEST_KUBERNETES: starting again does not help."""


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Command line; every default is in settings.py."""
    parser = argparse.ArgumentParser(
        prog="pagefleet-operator",
        allow_abbrev=False,
        description="Runs LLMDeployments: Deployment, Service, replicas and status.",
        epilog="Environment: KUBECONFIG (else the pod's service account); PAGEFLEET_SERVER_IMAGE, the image of servers "
        f"whose spec names none (default {ChildSettings().server_image}).",
    )
    parser.add_argument("--version", action="version", version=version("pagefleet"))
    scope = parser.add_mutually_exclusive_group()
    scope.add_argument(
        "--namespace",
        action="append",
        metavar="NS",
        help="serve this namespace; may be repeated (default: the context's)",
    )
    scope.add_argument("--all-namespaces", action="store_true", help="serve every namespace")
    parser.add_argument(
        "--listen",
        type=_address,
        metavar="HOST:PORT",
        help="serve /livez, /readyz and /metrics here; port 0 picks a free one and logs it (default: nowhere)",
    )
    parser.add_argument(
        "--lease-seconds",
        type=_lease_seconds,
        default=LeaseSettings().duration_seconds,
        metavar="N",
        help="a standby takes over this long after the leader fell silent, 3..300 (default: %(default)s)",
    )
    parser.add_argument(
        "--allowed-template-fields",
        type=_template_fields,
        metavar="PATHS",
        help="what users may set in spec.template: paths with commas between, like spec.nodeSelector,metadata.labels; "
        "empty allows nothing (default: everything)",
    )
    parser.add_argument(
        "--monitoring-namespace",
        default=ChildSettings().monitoring_namespace,
        metavar="NS",
        help="a NetworkPolicy of an LLMDeployment admits this namespace (default: %(default)s)",
    )
    parser.add_argument(
        "--device-budget",
        type=_device_budget,
        action="append",
        default=[],
        metavar="NS=N",
        help="the autoscaler uses at most N accelerators in this namespace, by priority; may be repeated "
        "(default: no bound)",
    )
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    return parser.parse_args(argv)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 <= int(port) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no HOST:PORT with a port of 0..65535")
    return host.strip("[]"), int(port)


def _lease_seconds(text: str) -> int:
    if not text.isdigit() or not 3 <= int(text) <= 300:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of seconds between 3 and 300")
    return int(text)


def _device_budget(text: str) -> tuple[str, int]:
    namespace, equals, number = text.partition("=")
    if not namespace or not equals or not number.isascii() or not number.isdigit() or int(number) > 1_000_000:
        raise argparse.ArgumentTypeError(f"{text!r} is no NAMESPACE=NUMBER with a number of 0..1000000")
    return namespace, int(number)


def _template_fields(text: str) -> tuple[str, ...]:
    paths = tuple(path.strip() for path in text.split(",") if path.strip())
    for path in paths:
        if path.split(".", 1)[0] not in ("metadata", "spec") or not all(path.split(".")):
            raise argparse.ArgumentTypeError(f"{path!r} is no path of a template, like spec.nodeSelector")
    return paths


def operator_settings(
    arguments: argparse.Namespace, environ: Mapping[str, str], default_namespace: str
) -> OperatorSettings:
    """Flags and environment -> settings."""
    namespaces = () if arguments.all_namespaces else tuple(dict.fromkeys(arguments.namespace or [default_namespace]))
    children = ChildSettings(
        allowed_template_fields=arguments.allowed_template_fields,
        monitoring_namespace=arguments.monitoring_namespace,
        operator_namespace=pod_namespace(),
    )
    image = environ.get("PAGEFLEET_SERVER_IMAGE")
    if image:
        children = replace(children, server_image=image)
    lease = LeaseSettings(duration_seconds=arguments.lease_seconds)
    return OperatorSettings(
        namespaces=namespaces, children=children, lease=lease, device_budgets=dict(arguments.device_budget)
    )


async def wait_for_api(api: Api) -> None:
    """Returns once the API server answers, is new enough and serves the CRD."""
    said = ""
    while True:
        try:
            version = await api.version()
            if version < OLDEST_KUBERNETES:
                needed = ".".join(map(str, OLDEST_KUBERNETES))
                raise TooOldError(f"Kubernetes {version[0]}.{version[1]} is too old: {needed} or newer is needed")
            if await api.is_served(LLMDEPLOYMENTS):
                return
            text = "LLMDeployment is not known to the API server: apply crds/llmdeployment.yaml"
        except ApiError as error:
            text = str(error)
        if text != said:
            logger.warning("%s; waiting", text)
            said = text
        await asyncio.sleep(CRD_POLL_SECONDS)


async def run(arguments: argparse.Namespace) -> int:
    """The whole life of the process. Returns the exit code."""
    this = asyncio.current_task()
    if this is not None:  # until kopf takes the signals over
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, this.cancel)
    access = await load_access()
    settings = operator_settings(arguments, os.environ, access.default_namespace)
    telemetry = Telemetry()
    health = Health(telemetry)
    try:
        if arguments.listen is not None:
            port = await health.start(*arguments.listen)
            logger.info("health and metrics on port %d", port)
        return await _live(access, settings, telemetry, health)
    finally:
        await health.stop()


async def _live(access: Access, settings: OperatorSettings, telemetry: Telemetry, health: Health) -> int:
    async with Api(access, settings.api) as api:
        api.observe_request = lambda method, _path, status: telemetry.api_requests.labels(method, str(status)).inc()
        await wait_for_api(api)
        identity = f"{socket.gethostname()}_{uuid.uuid4().hex[:8]}"
        leases = [
            LeaseHolder(api, namespace, identity, settings.lease)
            for namespace in sorted(settings.namespaces or (access.default_namespace,))
        ]
        api.may_write = lambda: False
        health.role = "standby"
        holding: list[asyncio.Task[str]] = []
        try:
            served = await _acquire(leases, holding)
            api.may_write = lambda: all(lease.is_held for lease in served)
            if settings.namespaces:
                settings = replace(settings, namespaces=tuple(lease.namespace for lease in served))
            return await _lead(api, settings, telemetry, health, holding)
        finally:
            for task in holding:
                task.cancel()
            await asyncio.gather(*holding, return_exceptions=True)
            for lease in leases:
                await lease.release()


async def _acquire(leases: Sequence[LeaseHolder], holding: list[asyncio.Task[str]]) -> list[LeaseHolder]:
    """Returns those that are ours; a namespace that is gone must not keep the others from being served.

    `holding` gets a task for each: it ends when what is served has to change.
    """
    while True:
        served: list[LeaseHolder] = []
        skipped: list[LeaseHolder] = []
        for lease in leases:
            if await lease.acquire(may_skip=len(leases) > 1):
                served.append(lease)
                holding.append(asyncio.create_task(lease.hold(), name=f"lease {lease.namespace}"))
            else:
                skipped.append(lease)
        if served:
            holding += [asyncio.create_task(lease.come_back(), name=f"lease {lease.namespace}") for lease in skipped]
            return served
        await asyncio.sleep(CRD_POLL_SECONDS)


async def _lead(
    api: Api, settings: OperatorSettings, telemetry: Telemetry, health: Health, holding: list[asyncio.Task[str]]
) -> int:
    clock = steady_clock()
    store = Store()
    specs = Specs()
    budget = WriteBudget(settings.reconcile.writes_per_second)
    api.before_write = lambda: budget.sent(clock())
    telemetry.writes_waiting.set_function(lambda: budget.waiting)
    telemetry.writes_busiest_second.set_function(lambda: budget.busiest)
    context = Context(
        api=api,
        store=store,
        scraper=Scraper(settings.scrape, clock=clock, telemetry=telemetry),
        recorder=EventRecorder(api, clock),
        settings=settings,
        clock=clock,
        telemetry=telemetry,
        shares=Shares(settings.device_budgets, store, specs),
        pace=Pace(settings.reconcile.status_writes_per_second),
        budget=budget,
        specs=specs,
    )
    manager = Manager(context)
    health.checks |= {"watch": manager.watch_problem, "reconcile": manager.reconcile_problem}
    health.role = "leader"
    telemetry.leader.set(1)
    telemetry.fleet.bodies = lambda: context.store.bodies(LLMDEPLOYMENT)
    await manager.start()
    logger.info("serving %s", ", ".join(settings.namespaces) or "all namespaces")
    try:
        return await _watch_until_the_end(manager, settings, holding)
    finally:
        await manager.stop()
        telemetry.leader.set(0)
        telemetry.fleet.bodies = tuple


async def _watch_until_the_end(manager: Manager, settings: OperatorSettings, holding: list[asyncio.Task[str]]) -> int:
    """Runs kopf until a signal ends it, a background task of ours died, or a lease is lost."""
    failed = asyncio.create_task(manager.failed_event.wait(), name="failure")
    watching = asyncio.create_task(
        kopf.operator(
            registry=build_registry(manager),
            standalone=True,
            clusterwide=not settings.namespaces,
            namespaces=settings.namespaces,
        ),
        name="kopf",
    )
    try:
        await asyncio.wait({failed, watching, *holding}, return_when=asyncio.FIRST_COMPLETED)
        lost = [task.result() for task in holding if task.done()]
        if lost:
            logger.error("no longer leading: %s", lost[0])
            return EXIT_LEASE_LOST
        if failed.done():
            return EXIT_FAILED
        await watching
        logger.info("stopped")
        return 0
    finally:
        failed.cancel()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def main() -> None:
    """Entry point."""
    arguments = parse_arguments(sys.argv[1:])
    logging.basicConfig(
        level=arguments.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    logging.getLogger("kopf").setLevel(max(logging.WARNING, logging.getLogger().level))
    try:
        code = asyncio.run(run(arguments))
    except TooOldError as error:
        sys.stderr.write(f"pagefleet-operator: {error}\n")
        code = EXIT_TOO_OLD
    except (OperatorError, OSError) as error:
        sys.exit(f"pagefleet-operator: {error}")
    except (KeyboardInterrupt, asyncio.CancelledError):
        code = 0
    sys.exit(code)
