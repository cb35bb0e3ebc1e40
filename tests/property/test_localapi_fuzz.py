"""Objects with anything anywhere: no request is answered with an internal error, and every list still works."""

import copy
import random
from typing import Any

import pytest

from support.localapi import (
    CRDS,
    DEPLOYMENTS,
    LLMDS,
    PODS,
    STRATEGIC,
    TABLE,
    VIEWER_TOKEN,
    Answer,
    Api,
    Json,
    deployment,
    draft_crd,
    llmd,
    pod,
    running_api,
)

_VALUES: tuple[Any, ...] = (
    None, 0, -1, 1.5, "", "x", [], [None], [1], {}, {"a": 1}, True, "é", [[]], {"": {}}, 10**30, "2026-01-01T00:00:00Z",
)  # fmt: skip
_SCALES: tuple[Any, ...] = (1, 0, -1, "x", None, [])
_RBAC = "/apis/rbac.authorization.k8s.io/v1/namespaces/default"


def _crd() -> Json:
    crd = draft_crd()
    crd["metadata"]["name"] = "things.fuzz.dev"
    crd["spec"] |= {"group": "fuzz.dev", "names": {"plural": "things", "kind": "Thing"}}
    return crd


def _pod() -> Json:
    body = pod("p")
    body["spec"]["containers"][0] |= {
        "ports": [{"containerPort": 80}],
        "env": [{"name": "a", "value": "b"}],
        "resources": {"limits": {"cpu": "1"}},
        "volumeMounts": [{"name": "v", "mountPath": "/v"}],
    }
    body["spec"]["volumes"] = [{"name": "v", "emptyDir": {}}]
    return body


def _bodies() -> list[tuple[str, Json]]:
    core = "/api/v1/namespaces/default"
    owner = {"apiVersion": "v1", "kind": "X", "name": "n", "uid": "u"}
    service_meta = {"name": "s", "labels": {"a": "b"}, "ownerReferences": [owner], "finalizers": ["a/b"]}
    service_spec = {"type": "ClusterIP", "selector": {"a": "b"}, "ports": [{"name": "h", "port": 80}]}
    match = {"matchLabels": {"a": "b"}, "matchExpressions": [{"key": "a", "operator": "In", "values": ["b"]}]}
    autoscaling = {"minReplicas": 1, "maxReplicas": 2, "targets": {}}
    custom = llmd("o", engine={"blockSize": 16, "args": ["a"]}, autoscaling=autoscaling, template={"a": [1]})
    about = {"kind": "Pod", "name": "p", "namespace": "default"}
    series = {"count": 1, "lastObservedTime": "2026-01-01T00:00:00Z"}
    event = {"metadata": {"name": "e"}, "involvedObject": about, "reason": "r", "message": "m", "series": series}
    role = {"metadata": {"name": "r"}, "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]}]}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "r"}
    binding = {"metadata": {"name": "b"}, "roleRef": reference, "subjects": [{"kind": "User", "name": "viewer"}]}
    quota = {"metadata": {"name": "q"}, "spec": {"hard": {"requests.cpu": "1", "pods": "3"}}}
    budget = {"metadata": {"name": "b"}, "spec": {"maxUnavailable": 1, "selector": match}}
    return [
        (f"{core}/services", {"metadata": service_meta, "spec": service_spec}),
        ("/apis/policy/v1/namespaces/default/poddisruptionbudgets", budget),
        (PODS, _pod()),
        (LLMDS, custom),
        (f"{core}/resourcequotas", quota),
        (f"{core}/events", event),
        (DEPLOYMENTS, deployment("d")),
        (CRDS, _crd()),
        (f"{_RBAC}/rolebindings", binding),
        (f"{_RBAC}/roles", role),
    ]


def _spoiled(body: Json, rng: random.Random) -> Json:
    """A copy with one or two values anywhere in it replaced."""
    spoiled = copy.deepcopy(body)
    for _ in range(rng.randint(1, 2)):
        places: list[tuple[Any, Any]] = []
        stack: list[Any] = [spoiled]
        while stack:
            node = stack.pop()
            keys = node.keys() if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
            places += [(node, key) for key in keys]
            stack += [node[key] for key in keys]
        parent, key = rng.choice(places)
        parent[key] = copy.deepcopy(rng.choice(_VALUES))
    return spoiled


async def _send(api: Api, path: str, name: str, body: Json, rng: random.Random) -> Answer:
    full = f"{path}/{name}"
    match rng.randrange(8):
        case 0 | 1:
            return await api.post(path, body)
        case 2:
            return await api.put(full, body)
        case 3:
            return await api.patch(full, body)
        case 4:
            return await api.patch(full, body, STRATEGIC)
        case 5:
            return await api.apply(full, body, force="true")
        case 6:
            return await api.apply(f"{full}/status", {"status": body.get("spec")}, force="true")
    return await api.patch(f"{full}/scale", {"spec": {"replicas": rng.choice(_SCALES)}})


async def _fuzz(seed: int, requests: int) -> None:
    rng = random.Random(seed)
    bodies = _bodies()
    async with running_api() as (server, api):
        (await api.post(CRDS, draft_crd())).ok()
        for number in range(requests):
            path, body = rng.choice(bodies)
            name = str(body["metadata"]["name"])
            spoiled = _spoiled(body, rng)
            answer = await _send(api, path, name, spoiled, rng)
            # A server-side apply that its schema cannot type is a 500 on a real server too.
            is_untyped = answer.status == 500 and "failed to create typed patch object" in answer.message(500)
            assert answer.status < 500 or is_untyped, (answer.body, spoiled)
            if rng.random() < 0.3:
                await api.delete(f"{path}/{name}", gracePeriodSeconds="0")
            if number % 25 == 0:
                for accept in ("application/json", TABLE):
                    for listed, _ in bodies:
                        (await api.get(listed, accept=accept)).ok()
                assert (await api.get(PODS, token=VIEWER_TOKEN)).status in (200, 403)
        assert server.is_healthy()


@pytest.mark.parametrize("seed", range(3))
async def test_no_object_makes_an_internal_error(seed: int) -> None:
    """Found this way: names that are no text, and CRDs whose schema is none."""
    await _fuzz(seed, 250)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 110))
async def test_no_object_makes_an_internal_error_however_long_one_looks(seed: int) -> None:
    await _fuzz(seed, 3000)
