"""Puts together what the store and the scraper know of one LLMDeployment."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pagefleet_operator.client import Api, Listed
from pagefleet_operator.fleet import PodState
from pagefleet_operator.model import HUB, LLMDeployment
from pagefleet_operator.names import ObjectKey
from pagefleet_operator.plan import Observed
from pagefleet_operator.pods import parse_pod
from pagefleet_operator.resources import CHILDREN, EVERY_CHILD, LLMDEPLOYMENTS, PODS, REPLICA_SETS
from pagefleet_operator.scrape import Scraper, Target
from pagefleet_operator.store import LLMDEPLOYMENT, POD, REPLICA_SET, Store, owner_of

CACHE_CLAIM = "the claim of model.cache.claimName"


def observe(store: Store, scraper: Scraper, key: ObjectKey, now: float, found: Mapping[str, Any]) -> Observed:
    """`found` holds children that a direct read found and our watch does not show: they lack our labels."""
    pods = tuple(parse_pod(body) for body in store.owned(POD, key) if is_replica(store, body, key))
    serving = [pod for pod in pods if pod.state is PodState.READY]
    samples = {pod.name: sample for pod in serving if (sample := scraper.fresh(pod.uid, now)) is not None}
    silent = {
        pod.name: scraper.failures[pod.uid]
        for pod in serving
        if pod.name not in samples and pod.uid in scraper.failures
    }
    children = {kind: body for kind, body in found.items() if kind != CACHE_CLAIM}
    for kind in EVERY_CHILD:
        body = store.get(kind, key)
        if body is not None:
            children[kind] = body
    replica_sets = tuple(body for body in store.owned(REPLICA_SET, key) if _belongs(body, key))
    starting = {pod.name: scraper.progress.get(pod.uid) for pod in pods if pod.state is PodState.STARTING}
    return Observed(
        children=children,
        replica_sets=replica_sets,
        pods=pods,
        samples=samples,
        silent=silent,
        progress={name: percent for name, percent in starting.items() if percent is not None},
        has_pod_monitors=store.has_pod_monitors,
        cache_claim=found.get(CACHE_CLAIM),
    )


def is_replica(store: Store, pod: Mapping[str, Any], key: ObjectKey) -> bool:
    """Whether the pod is one of the child Deployment's: copies of it or of the Deployment carry the same labels."""
    reference = _controller(pod)
    if reference is None or reference.get("kind") != REPLICA_SET:
        return False
    body = store.get(REPLICA_SET, ObjectKey(key.namespace, str(reference.get("name"))))
    return body is not None and body["metadata"].get("uid") == reference.get("uid") and _belongs(body, key)


def _belongs(replica_set: Mapping[str, Any], key: ObjectKey) -> bool:
    """One without a controller will be adopted."""
    reference = _controller(replica_set)
    return reference is None or (reference.get("kind"), reference.get("name")) == ("Deployment", key.name)


def _controller(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    references = body["metadata"].get("ownerReferences") or []
    return next((reference for reference in references if reference.get("controller")), None)


async def find_children(api: Api, store: Store, llmd: LLMDeployment, kinds: Iterable[str]) -> dict[str, Any]:
    """What the label-filtered watch cannot show, read one by one: objects of our name of these kinds, and the claim of
    model.cache.claimName as CACHE_CLAIM. Absent ones are left out."""
    key = llmd.key
    wanted = {kind: (EVERY_CHILD[kind], key.name) for kind in kinds if store.get(kind, key) is None}
    if llmd.spec.cache is not None and llmd.spec.cache.claim is not None:
        wanted[CACHE_CLAIM] = (EVERY_CHILD["PersistentVolumeClaim"], llmd.spec.cache.claim)
    bodies = await asyncio.gather(*(api.get(resource, key.namespace, name) for resource, name in wanted.values()))
    return {kind: body for kind, body in zip(wanted, bodies, strict=True) if body is not None}


def targets(store: Store) -> list[Target]:
    """Every ready pod of ours, and those that may be downloading their model."""
    found: list[Target] = []
    for body in store.bodies(POD):
        pod, owner = parse_pod(body), owner_of(body)
        if pod.ip is None or owner is None or not is_replica(store, body, owner):
            continue
        if pod.state is PodState.READY or (pod.state is PodState.STARTING and _is_of_hub(store, owner)):
            found.append(Target(pod.uid, pod.ip, is_ready=pod.state is PodState.READY))
    return found


def _is_of_hub(store: Store, key: ObjectKey) -> bool:
    body = store.get(LLMDEPLOYMENT, key)
    source = ((body or {}).get("spec") or {}).get("model", {}).get("source")
    return isinstance(source, str) and source.startswith(HUB)


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


async def list_everything(api: Api, namespace: str | None, selector: str, *, pod_monitors: bool = False) -> Listing:
    """List all kinds that are watched, children filtered by `selector`; and PodMonitors if so told. Raises ApiError."""
    kinds = {LLMDEPLOYMENT: await api.list(LLMDEPLOYMENTS, namespace)}
    children = EVERY_CHILD if pod_monitors else CHILDREN
    for kind, resource in {POD: PODS, REPLICA_SET: REPLICA_SETS, **children}.items():
        kinds[kind] = await api.list(resource, namespace, labels=selector)
    return Listing(namespace, kinds)
