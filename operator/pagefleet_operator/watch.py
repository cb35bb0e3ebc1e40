"""kopf: watches what matters and hands every event over. Nothing else happens in kopf.

Only event handlers, startup, cleanup and login: kopf then writes neither finalizers nor annotations, and deleting an
LLMDeployment needs no operator.
"""

from collections.abc import Iterable
from typing import Any

import kopf

from pagefleet_operator import names
from pagefleet_operator.client import Access, load_access
from pagefleet_operator.manager import MANAGED_BY_SELECTOR, Manager
from pagefleet_operator.resources import CHILDREN, PODS, REPLICA_SETS
from pagefleet_operator.store import LLMDEPLOYMENT, POD, REPLICA_SET

WATCHED_CHILDREN = {POD: PODS, REPLICA_SET: REPLICA_SETS, **CHILDREN}
"""What is watched beside LLMDeployments, filtered by our label."""


class NoDiffs(kopf.DiffBaseStorage):
    """No state to compare with: we judge whole objects. kopf's own storages copy the body of every event several times,
    which was more than half of the work of an operator under many events."""

    def build(self, *, body: kopf.Body, extra_fields: Iterable[kopf.FieldSpec] | None = None) -> kopf.BodyEssence:
        """Of every object the same: nothing."""
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        """Nothing was stored."""
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        """Nothing is stored."""


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
    settings.persistence.diffbase_storage = NoDiffs()
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
        async def on_event(event: kopf.RawEvent, **_: Any) -> None:
            manager.watched(kind, event["type"], event["object"])  # as it was decoded: nobody else keeps it

        return on_event

    kopf.on.event(names.GROUP, names.VERSION, names.PLURAL, registry=registry, id="llmdeployment")(
        handler(LLMDEPLOYMENT)
    )
    for kind, resource in WATCHED_CHILDREN.items():
        kopf.on.event(resource.group, resource.version, resource.plural, registry=registry, id=resource.plural)(
            handler(kind)
        )
    return registry
