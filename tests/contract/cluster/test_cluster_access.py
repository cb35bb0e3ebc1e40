"""Who may do what: roles, bindings, and the words of a refusal."""

import pytest

from support.localapi import VIEWER_TOKEN, Api, Json

RBAC = "/apis/rbac.authorization.k8s.io/v1"
pytestmark = pytest.mark.own_server_only("a foreign cluster knows no viewer token")


async def _grant(api: Api, namespace: str, *rules: Json) -> None:
    roles = f"{RBAC}/namespaces/{namespace}"
    (await api.post(f"{roles}/roles", {"metadata": {"name": "r"}, "rules": list(rules)})).ok()
    subject = {"kind": "User", "name": "viewer", "apiGroup": "rbac.authorization.k8s.io"}
    reference = {"kind": "Role", "name": "r", "apiGroup": "rbac.authorization.k8s.io"}
    body = {"metadata": {"name": "b"}, "roleRef": reference, "subjects": [subject]}
    (await api.post(f"{roles}/rolebindings", body)).ok()


async def _allowed(api: Api, path: str, status: int = 200) -> None:
    """A real server learns of a binding a moment after it was stored."""
    await api.until(lambda: api.get(path, token=VIEWER_TOKEN), lambda answer: answer.status == status)


@pytest.mark.recorded("lease_events_rbac/viewer may list", "lease_events_rbac/viewer may not create")
async def test_a_role_gives_its_verbs_in_its_namespace_only(api: Api, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    await _grant(api, namespace, {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get", "list"]})
    await _allowed(api, path)
    refused = await api.post(path, {"metadata": {"name": "m"}}, token=VIEWER_TOKEN)
    assert refused.message(403) == (
        f'configmaps is forbidden: User "viewer" cannot create resource "configmaps" in API group "" '
        f'in the namespace "{namespace}"'
    )
    everywhere = await api.get("/api/v1/configmaps", token=VIEWER_TOKEN)
    assert everywhere.message(403).endswith("at the cluster scope")
    assert (await api.get("/api/v1/namespaces/default/configmaps", token=VIEWER_TOKEN)).status == 403
    assert (await api.get(path, token=VIEWER_TOKEN, watch="true", timeoutSeconds="1")).status == 403


@pytest.mark.recorded("lease_events_rbac/viewer named pod, missing", "lease_events_rbac/viewer other pod")
async def test_a_rule_can_name_single_objects(api: Api, namespace: str) -> None:
    rule = {"apiGroups": [""], "resources": ["pods"], "resourceNames": ["one"], "verbs": ["get"]}
    await _grant(api, namespace, rule)
    await _allowed(api, f"/api/v1/namespaces/{namespace}/pods/one", 404)
    assert (await api.get(f"/api/v1/namespaces/{namespace}/pods/two", token=VIEWER_TOKEN)).status == 403


@pytest.mark.recorded("lease_events_rbac/viewer may not patch status")
async def test_a_subresource_is_a_resource_of_its_own(api: Api, namespace: str) -> None:
    await _grant(api, namespace, {"apiGroups": ["apps"], "resources": ["deployments"], "verbs": ["*"]})
    path = f"/apis/apps/v1/namespaces/{namespace}/deployments/d/status"
    refused = await api.patch(path, {"status": {"replicas": 1}}, token=VIEWER_TOKEN)
    assert 'cannot patch resource "deployments/status" in API group "apps"' in refused.message(403)


@pytest.mark.recorded("lease_events_rbac/self subject access review", "lease_events_rbac/unknown token")
async def test_users_can_ask_what_they_may(api: Api, namespace: str) -> None:
    await _grant(api, namespace, {"apiGroups": [""], "resources": ["pods/log"], "verbs": ["get"]})
    reviews = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    wanted = {"namespace": namespace, "verb": "get", "resource": "pods"}
    log = {"spec": {"resourceAttributes": wanted | {"subresource": "log"}}}
    await api.until(lambda: api.post(reviews, log, token=VIEWER_TOKEN), lambda answer: answer.body["status"]["allowed"])
    for more in ({}, {"subresource": "log", "verb": "create"}):
        body = {"spec": {"resourceAttributes": wanted | more}}
        assert (await api.post(reviews, body, token=VIEWER_TOKEN)).ok()["status"]["allowed"] is False
    assert (await api.post(reviews, {"spec": {}}, token="nobody")).message(401) == "Unauthorized"


async def test_a_cluster_role_can_be_given_in_one_namespace_or_in_all(api: Api, namespace: str) -> None:
    rule = {"apiGroups": ["*"], "resources": ["*"], "verbs": ["list"]}
    (await api.post(f"{RBAC}/clusterroles", {"metadata": {"name": namespace}, "rules": [rule]})).ok()
    reference = {"kind": "ClusterRole", "name": namespace, "apiGroup": "rbac.authorization.k8s.io"}
    body = {"metadata": {"name": namespace}, "roleRef": reference, "subjects": [{"kind": "User", "name": "viewer"}]}
    (await api.post(f"{RBAC}/namespaces/{namespace}/rolebindings", body)).ok()
    await _allowed(api, f"/api/v1/namespaces/{namespace}/secrets")
    assert (await api.get("/api/v1/nodes", token=VIEWER_TOKEN)).status == 403
    (await api.post(f"{RBAC}/clusterrolebindings", body)).ok()
    await _allowed(api, "/api/v1/nodes")
    for path in (f"{RBAC}/clusterrolebindings/{namespace}", f"{RBAC}/clusterroles/{namespace}"):
        (await api.delete(path)).ok()


async def test_probes_and_version_need_no_token(api: Api) -> None:
    for path in ("/healthz", "/livez", "/readyz", "/version"):
        assert (await api.get(path, token="")).status == 200
        assert (await api.get(path, token="nobody")).message(401) == "Unauthorized"


async def test_who_shows_no_token_is_anonymous(api: Api, namespace: str) -> None:
    refused = await api.get(f"/api/v1/namespaces/{namespace}/configmaps", token="")
    assert refused.message(403) == (
        'configmaps is forbidden: User "system:anonymous" cannot list resource "configmaps" in API group "" '
        f'in the namespace "{namespace}"'
    )
    assert (await api.get("/api", token="")).message(403) == 'forbidden: User "system:anonymous" cannot get path "/api"'
