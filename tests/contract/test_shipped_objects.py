"""All that we ship is taken, strictly: by the embedded API and, where its binaries are, by a real kube-apiserver."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from pagefleet_localcluster.kubeconfig import Kubeconfig
from pagefleet_operator.parsing import parse
from support.cluster_targets import target, target_names
from support.localapi import Api
from support.shipped import children_of, kustomized

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "manifests" / "samples"
FOREIGN = ("keda.sh", "monitoring.coreos.com", "inference.networking.k8s.io")
"""Kinds whose CRDs are not ours."""
NOT_LOCAL = ("autoscaling",)
"""Groups that the embedded API does not serve."""
CLUSTER_KINDS = ("Namespace", "CustomResourceDefinition", "ClusterRole", "ClusterRoleBinding")
IRREGULAR = {"NetworkPolicy": "networkpolicies"}


@pytest.fixture(scope="module", params=target_names())
def kubeconfig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubeconfig]:
    with target(request.param, tmp_path_factory.mktemp(request.param)) as found:
        yield found


@pytest.fixture
async def api(kubeconfig: Kubeconfig) -> AsyncIterator[Api]:
    connector = aiohttp.TCPConnector(ssl=kubeconfig.ssl_context or True)
    async with aiohttp.ClientSession(connector=connector, skip_auto_headers=("Content-Type", "User-Agent")) as session:
        yield Api(session, kubeconfig.server, kubeconfig.token or "")


def path_of(item: dict[str, Any], namespace: str) -> str:
    version, kind = item["apiVersion"], item["kind"]
    plural = IRREGULAR.get(kind, f"{kind.lower()}s")
    base = f"/apis/{version}" if "/" in version else f"/api/{version}"
    scope = "" if kind in CLUSTER_KINDS else f"/namespaces/{item['metadata'].get('namespace', namespace)}"
    return f"{base}{scope}/{plural}/{item['metadata']['name']}"


async def take(api: Api, item: dict[str, Any], *, namespace: str = "pagefleet") -> dict[str, Any]:
    """Server-side apply; an unknown field, a missing one or a value out of bounds fails."""
    answer = await api.apply(path_of(item, namespace), item, fieldValidation="Strict", force="true")
    assert answer.status < 300, f"{item['kind']} {item['metadata']['name']}: {answer.body}"
    taken: dict[str, Any] = answer.body
    return taken


async def test_everything_that_is_shipped_is_taken(api: Api, request: pytest.FixtureRequest) -> None:
    """Overlays, samples, and the children that the operator makes of each sample."""
    left_out = FOREIGN + (NOT_LOCAL if "embedded" in request.node.name else ())
    for name in ("namespaced", "cluster-wide", "dev"):
        for item in kustomized(name):
            await take(api, item)
    objects = "/apis/pagefleet.dev/v1alpha1/namespaces/pagefleet/llmdeployments"
    await api.until(lambda: api.get(objects), lambda answer: answer.status == 200)
    for path in sorted(SAMPLES.glob("*.yaml")):
        for item in yaml.safe_load_all(path.read_text()):
            if item["apiVersion"].split("/")[0] in left_out:
                continue
            live = await take(api, item)
            if item["kind"] != "LLMDeployment":
                continue
            for child in children_of(parse(live)):
                await take(api, child)
    for name in ("dev", "cluster-wide"):
        for item in reversed(kustomized(name)):
            await api.delete(path_of(item, "pagefleet"))
