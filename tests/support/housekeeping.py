"""Garbage collection and the end of namespaces, as a client: for a real API server without a controller manager.

The embedded API does both itself. This one looks at everything again and again, which only tests can afford."""

import asyncio
import contextlib
import logging

from pagefleet_localcluster.client import (
    CLAIMS,
    CONFIG_MAPS,
    DEPLOYMENTS,
    DISRUPTION_BUDGETS,
    ENDPOINT_SLICES,
    EVENTS,
    LEASES,
    PODS,
    REPLICA_SETS,
    RESOURCE_QUOTAS,
    SECRETS,
    SERVICES,
    UNREACHABLE,
    ApiError,
    Client,
    Resource,
)
from pagefleet_localcluster.objects import Object, is_deleted, name_of

logger = logging.getLogger(__name__)

PERIOD_SECONDS = 0.1
FOREGROUND, ORPHAN = "foregroundDeletion", "orphan"
NAMESPACES = Resource("v1", "namespaces", "Namespace", namespaced=False)
SERVICE_ACCOUNTS = Resource("v1", "serviceaccounts", "ServiceAccount")
LLMDS = Resource("pagefleet.dev/v1alpha1", "llmdeployments", "LLMDeployment")
COLLECTED = (
    CONFIG_MAPS, SECRETS, SERVICE_ACCOUNTS, SERVICES, PODS, CLAIMS, RESOURCE_QUOTAS, EVENTS, DEPLOYMENTS, REPLICA_SETS,
    ENDPOINT_SLICES, DISRUPTION_BUDGETS, LEASES, LLMDS,
)  # fmt: skip
Found = list[tuple[Resource, Object]]


async def keep_house(client: Client) -> None:
    """Collect garbage and finish namespaces until cancelled."""
    while True:
        try:
            await _round(client)
        except (ApiError, *UNREACHABLE) as error:
            logger.warning("housekeeping: %s", error)
        await asyncio.sleep(PERIOD_SECONDS)


async def _round(client: Client) -> None:
    found: Found = []
    for resource in COLLECTED:
        try:
            found += [(resource, item) for item in (await client.list(resource))["items"]]
        except ApiError as error:
            if error.code not in (404, 429):  # our CRD may not be there yet, or not be ready
                raise
    alive = {item["metadata"]["uid"] for _, item in found}
    for resource, item in found:
        with contextlib.suppress(ApiError):  # it changed meanwhile: the next round sees it
            if is_deleted(item):
                await _end(client, resource, item, found)
            elif owners := item["metadata"].get("ownerReferences"):
                await _check_owners(client, resource, item, [o for o in owners if o["uid"] in alive], len(owners))
    for namespace in (await client.list(NAMESPACES))["items"]:
        if is_deleted(namespace):
            with contextlib.suppress(ApiError):
                await _empty(client, namespace, found)


async def _check_owners(client: Client, resource: Resource, item: Object, alive: list[Object], count: int) -> None:
    if not alive:
        await client.delete(resource, name_of(item), item["metadata"]["namespace"], uid=item["metadata"]["uid"])
    elif len(alive) < count:
        await _set(client, resource, item, {"ownerReferences": alive})


async def _end(client: Client, resource: Resource, owner: Object, found: Found) -> None:
    """Keep the promise of a foreground or orphan deletion."""
    held = owner["metadata"].get("finalizers") or []
    uid = owner["metadata"]["uid"]
    children = [(r, c, o) for r, c in found for o in c["metadata"].get("ownerReferences") or () if o["uid"] == uid]
    if ORPHAN in held:
        for kind, child, _ in children:
            others = [o for o in child["metadata"]["ownerReferences"] if o["uid"] != uid]
            await _set(client, kind, child, {"ownerReferences": others or None})
        await _set(client, resource, owner, {"finalizers": [name for name in held if name != ORPHAN]})
    elif FOREGROUND in held:
        for kind, child, _ in children:
            if not is_deleted(child):
                await client.delete(kind, name_of(child), child["metadata"]["namespace"], uid=child["metadata"]["uid"])
        if not any(reference.get("blockOwnerDeletion") for _, _, reference in children):
            await _set(client, resource, owner, {"finalizers": [name for name in held if name != FOREGROUND]})


async def _set(client: Client, resource: Resource, item: Object, metadata: Object) -> None:
    meta = item["metadata"]
    body = {"metadata": {**metadata, "resourceVersion": meta["resourceVersion"]}}
    await client.patch(resource, meta["name"], body, meta["namespace"])


async def _empty(client: Client, namespace: Object, found: Found) -> None:
    name = name_of(namespace)
    inside = [(resource, item) for resource, item in found if item["metadata"]["namespace"] == name]
    for resource, item in inside:
        if not is_deleted(item):
            await client.delete(resource, name_of(item), name)
    if not inside:
        await client.replace(NAMESPACES, {**namespace, "spec": {"finalizers": []}}, "finalize")
