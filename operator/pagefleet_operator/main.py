"""`pagefleet-operator`: kopf watches, everything else is ours.

Only event handlers, startup, cleanup and login: kopf then writes neither finalizers nor annotations, and deleting an
LLMDeployment needs no operator.
"""

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import kopf

from pagefleet_operator import names
from pagefleet_operator.client import Access, Api, load_access
from pagefleet_operator.clock import steady_clock
from pagefleet_operator.errors import ApiError, OperatorError
from pagefleet_operator.events import EventRecorder
from pagefleet_operator.manager import MANAGED_BY_SELECTOR, Manager
from pagefleet_operator.reconcile import Context
from pagefleet_operator.resources import CHILDREN, LLMDEPLOYMENTS, PODS
from pagefleet_operator.scrape import Scraper
from pagefleet_operator.settings import ChildSettings, OperatorSettings
from pagefleet_operator.store import LLMDEPLOYMENT, POD, Store

logger = logging.getLogger("pagefleet_operator")

OLDEST_KUBERNETES = (1, 30)
CRD_POLL_SECONDS = 2.0
EXIT_FAILED = 1

WATCHED_CHILDREN = {POD: PODS, **CHILDREN}
"""What is watched beside LLMDeployments, filtered by our label."""


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Command line; every default is in settings.py."""
    parser = argparse.ArgumentParser(
        prog="pagefleet-operator",
        allow_abbrev=False,
        description="Runs LLMDeployments: Deployment, Service, replicas and status.",
        epilog="Environment: KUBECONFIG (else the pod's service account); PAGEFLEET_SERVER_IMAGE, the image of servers "
        f"whose spec names none (default {ChildSettings().server_image}).",
    )
    scope = parser.add_mutually_exclusive_group()
    scope.add_argument(
        "--namespace",
        action="append",
        metavar="NS",
        help="serve this namespace; may be repeated (default: the context's)",
    )
    scope.add_argument("--all-namespaces", action="store_true", help="serve every namespace")
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    return parser.parse_args(argv)


def operator_settings(
    arguments: argparse.Namespace, environ: Mapping[str, str], default_namespace: str
) -> OperatorSettings:
    """Flags and environment -> settings."""
    namespaces = () if arguments.all_namespaces else tuple(arguments.namespace or [default_namespace])
    children = ChildSettings()
    image = environ.get("PAGEFLEET_SERVER_IMAGE")
    if image:
        children = replace(children, server_image=image)
    return OperatorSettings(namespaces=namespaces, children=children)


def configure_kopf(settings: kopf.OperatorSettings) -> None:
    """Settings for production: bounded requests, watches that notice when they are dead, no Events of kopf's own."""
    settings.networking.request_timeout = 20
    settings.networking.connect_timeout = 5
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 330
    settings.watching.inactivity_timeout = 70
    settings.queueing.worker_limit = 32
    settings.queueing.idle_timeout = 1
    settings.queueing.exit_timeout = 0.2  # handlers only hand over: there is nothing to wait for
    settings.execution.default_backoff = 5
    settings.process.ultimate_exiting_timeout = 30
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = True
    # Nothing of these is ever written; if it were, it would carry our own names.
    settings.persistence.finalizer = f"{names.GROUP}/kopf-finalizer"
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=names.GROUP)
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=names.GROUP)
    for resource in WATCHED_CHILDREN.values():
        settings.watching.label_selectors[resource.group, resource.plural] = MANAGED_BY_SELECTOR


async def connection_info(access: Access) -> kopf.ConnectionInfo:
    """The same access for kopf's watches; asked again when a token has expired."""
    configuration = access.configuration
    bearer = (await configuration.auth_settings()).get("BearerToken")
    scheme, _, token = str(bearer["value"]).partition(" ") if bearer and bearer["value"] else ("", "", "")
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        insecure=not configuration.verify_ssl,
        scheme=scheme or None,
        token=token or None,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
        proxy_url=configuration.proxy,
        default_namespace=access.default_namespace,
    )


def build_registry(manager: Manager) -> kopf.OperatorRegistry:
    """Handlers: every event goes to the manager, nothing else happens in kopf."""
    registry = kopf.OperatorRegistry()

    @kopf.on.startup(registry=registry)
    async def on_startup(settings: kopf.OperatorSettings, **_: Any) -> None:
        configure_kopf(settings)

    @kopf.on.cleanup(registry=registry)
    async def on_cleanup(**_: Any) -> None:
        await manager.stop()  # else kopf waits for our loops as if they were its own

    @kopf.on.login(registry=registry)
    async def on_login(**_: Any) -> kopf.ConnectionInfo:
        return await connection_info(await load_access())

    def handler(kind: str) -> Any:
        async def on_event(type: str | None, body: kopf.Body, **_: Any) -> None:
            manager.watched(kind, type, _plain(body))

        return on_event

    kopf.on.event(names.GROUP, names.VERSION, names.PLURAL, registry=registry, id="llmdeployment")(
        handler(LLMDEPLOYMENT)
    )
    for kind, resource in WATCHED_CHILDREN.items():
        kopf.on.event(resource.group, resource.version, resource.plural, registry=registry, id=resource.plural)(
            handler(kind)
        )
    return registry


def _plain(value: Any) -> Any:
    """kopf's read-only views -> plain JSON."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


async def wait_for_api(api: Api) -> None:
    """Returns once the API server answers, is new enough and serves the CRD."""
    said = ""
    while True:
        try:
            version = await api.version()
            if version < OLDEST_KUBERNETES:
                needed = ".".join(map(str, OLDEST_KUBERNETES))
                raise OperatorError(f"Kubernetes {version[0]}.{version[1]} is too old: {needed} or newer is needed")
            if await api.is_served(LLMDEPLOYMENTS):
                return
            text = "LLMDeployment is not known to the API server: apply crds/llmdeployment.yaml"
        except ApiError as error:
            text = str(error)
        if text != said:
            logger.warning("%s; waiting", text)
            said = text
        await asyncio.sleep(CRD_POLL_SECONDS)


async def _watch_until_failure(manager: Manager, settings: OperatorSettings) -> None:
    """Runs kopf until a signal ends it or a background task of ours died."""
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
        await asyncio.wait({failed, watching}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        failed.cancel()
        watching.cancel()
    try:
        await watching
    except asyncio.CancelledError:
        logger.info("stopped")


async def run(arguments: argparse.Namespace) -> int:
    """The whole life of the process. Returns the exit code."""
    access = await load_access()
    settings = operator_settings(arguments, os.environ, access.default_namespace)
    clock = steady_clock()
    async with Api(access, settings.api) as api:
        await wait_for_api(api)
        context = Context(
            api=api,
            store=Store(),
            scraper=Scraper(settings.scrape, clock=clock),
            recorder=EventRecorder(api, clock),
            settings=settings,
            clock=clock,
        )
        manager = Manager(context)
        manager.start()
        logger.info("serving %s", ", ".join(settings.namespaces) or "all namespaces")
        try:
            await _watch_until_failure(manager, settings)
        finally:
            await manager.stop()
    return EXIT_FAILED if manager.failed_event.is_set() else 0


def main() -> None:
    """Entry point."""
    arguments = parse_arguments(sys.argv[1:])
    logging.basicConfig(
        level=arguments.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    logging.getLogger("kopf").setLevel(max(logging.WARNING, logging.getLogger().level))
    try:
        code = asyncio.run(run(arguments))
    except OperatorError as error:
        sys.exit(f"pagefleet-operator: {error}")
    except (KeyboardInterrupt, asyncio.CancelledError):
        code = 0
    sys.exit(code)
