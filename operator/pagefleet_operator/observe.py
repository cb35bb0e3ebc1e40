"""Puts together what the store and the scraper know of one LLMDeployment."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagefleet_operator.client import Api, Listed
from pagefleet_operator.fleet import PodState
from pagefleet_operator.names import ObjectKey
from pagefleet_operator.plan import Observed
from pagefleet_operator.pods import parse_pod
from pagefleet_operator.resources import CHILDREN, LLMDEPLOYMENTS, PODS, REPLICA_SETS
from pagefleet_operator.scrape import Scraper, Target
from pagefleet_operator.store import CHILD_KINDS, LLMDEPLOYMENT, POD, REPLICA_SET, Store


def observe(store: Store, scraper: Scraper, key: ObjectKey, now: float, found: Mapping[str, Any]) -> Observed:
    """`found` holds children that a direct read found and our watch does not show: they lack our labels."""
    pods = tuple(parse_pod(body) for body in store.owned(POD, key))
    serving = [pod for pod in pods if pod.state is PodState.READY]
    samples = {pod.name: sample for pod in serving if (sample := scraper.fresh(pod.uid, now)) is not None}
    silent = {
        pod.name: scraper.failures[pod.uid]
        for pod in serving
        if pod.name not in samples and pod.uid in scraper.failures
    }
    children = dict(found)
    for kind in CHILD_KINDS:
        body = store.get(kind, key)
        if body is not None:
            children[kind] = body
    replica_sets = tuple(store.owned(REPLICA_SET, key))
    return Observed(children=children, replica_sets=replica_sets, pods=pods, samples=samples, silent=silent)


async def find_children(api: Api, store: Store, key: ObjectKey) -> dict[str, Any]:
    """Objects of our name that the label-filtered watch cannot show, read one by one: absent ones are left out."""
    absent = [kind for kind in CHILD_KINDS if store.get(kind, key) is None]
    bodies = await asyncio.gather(*(api.get(CHILDREN[kind], key.namespace, key.name) for kind in absent))
    return {kind: body for kind, body in zip(absent, bodies, strict=True) if body is not None}


def targets(store: Store) -> list[Target]:
    """Every ready pod of ours."""
    pods = [parse_pod(body) for key in store.keys(POD) if (body := store.get(POD, key)) is not None]
    return [Target(pod.uid, pod.ip) for pod in pods if pod.ip is not None and pod.state is PodState.READY]


@dataclass(frozen=True, slots=True)
class Listing:
    """Everything of one namespace (None: of all) as just listed."""

    namespace: str | None
    kinds: Mapping[str, Listed]

    def is_before(self, version: int) -> bool:
        """Whether this shows a state older than `version`."""
        return any(
            listed.resource_version.isdigit() and int(listed.resource_version) < version
            for listed in self.kinds.values()
        )

    def behind(self, store: Store) -> int:
        """How many objects the store shows in an older state than this."""
        return sum(
            len(store.behind(kind, listed.items, self.namespace, listed.resource_version))
            for kind, listed in self.kinds.items()
        )

    def put(self, store: Store) -> None:
        """Make the store show this, apart from what it knows of later."""
        for kind, listed in self.kinds.items():
            store.replace(kind, listed.items, self.namespace, listed.resource_version)


async def list_everything(api: Api, namespace: str | None, selector: str) -> Listing:
    """List all kinds that are watched, children filtered by `selector`. Raises ApiError."""
    kinds = {LLMDEPLOYMENT: await api.list(LLMDEPLOYMENTS, namespace)}
    for kind, resource in {POD: PODS, REPLICA_SET: REPLICA_SETS, **CHILDREN}.items():
        kinds[kind] = await api.list(resource, namespace, labels=selector)
    return Listing(namespace, kinds)
