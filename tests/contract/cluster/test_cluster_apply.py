"""Server-side apply over HTTP: the algorithm itself has its unit tests."""

import pytest

from support.localapi import APPLY, Api, Json, deployment


def _deployments(namespace: str) -> str:
    return f"/apis/apps/v1/namespaces/{namespace}/deployments"


def _llmd(name: str, **spec: object) -> Json:
    body: Json = {"apiVersion": "pagefleet.dev/v1alpha1", "kind": "LLMDeployment", "metadata": {"name": name}}
    return body | ({"spec": spec} if spec else {})


def _managers(obj: Json) -> set[tuple[str, str, str]]:
    entries = obj["metadata"]["managedFields"]
    return {(entry["manager"], entry["operation"], entry.get("subresource", "")) for entry in entries}


@pytest.mark.recorded(
    "apply/apply creates",
    "apply/apply again, nothing changes (same resourceVersion)",
    "apply/a field no longer applied is removed",
)
async def test_applied_fields_come_stay_and_go(api: Api, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps/m"
    body: Json = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "m"}, "data": {"a": "1", "b": "2"}}
    created = await api.apply(path, body)
    assert created.status == 201
    again = await api.apply(path, body)
    assert again.status == 200
    assert again.ok()["metadata"]["resourceVersion"] == created.ok()["metadata"]["resourceVersion"]
    del body["data"]["b"]
    assert (await api.apply(path, body)).ok()["data"] == {"a": "1"}


@pytest.mark.recorded("apply/another manager, conflict", "apply/another manager, forced")
async def test_conflicts_name_the_manager_and_force_takes_over(api: Api, namespace: str) -> None:
    path = f"{_deployments(namespace)}/d"
    (await api.apply(path, deployment("d", replicas=0))).ok()
    wanted: Json = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "d"}, "spec": {"replicas": 1}}
    refused = await api.apply(path, wanted, "other")
    assert refused.message(409) == 'Apply failed with 1 conflict: conflict with "tests": .spec.replicas'
    assert refused.body["details"]["causes"][0]["reason"] == "FieldManagerConflict"
    wanted["spec"]["replicas"] = 0
    (await api.apply(path, wanted, "other", force="true")).ok()


async def test_a_count_set_through_scale_conflicts_with_apply(api: Api, namespace: str) -> None:
    path = f"{_deployments(namespace)}/d"
    (await api.apply(path, deployment("d", replicas=0, paused=True))).ok()
    (await api.patch(f"{path}/scale", {"spec": {"replicas": 1}}, fieldManager="hpa")).ok()
    refused = await api.apply(path, deployment("d", replicas=0, paused=True))
    assert 'conflict with "hpa"' in refused.message(409)
    assert 'subresource "scale"' in refused.message(409)


@pytest.mark.recorded("apply/apply its status as another manager", "apply/conditions merge by type")
async def test_spec_and_status_have_their_own_managers(api: Api, namespace: str) -> None:
    path = f"/apis/pagefleet.dev/v1alpha1/namespaces/{namespace}/llmdeployments/o"
    (await api.apply(path, _llmd("o", model={"source": "file:///m"}), "user")).ok()
    condition = {"status": "True", "reason": "R", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    for manager, kind in (("one", "A"), ("two", "B")):
        status = _llmd("o") | {"status": {"conditions": [condition | {"type": kind}]}}
        after = (await api.apply(f"{path}/status", status, manager, force="true")).ok()
    assert [item["type"] for item in after["status"]["conditions"]] == ["A", "B"]
    assert _managers(after) == {("user", "Apply", ""), ("one", "Apply", "status"), ("two", "Apply", "status")}
    after = (await api.apply(f"{path}/status", _llmd("o") | {"status": {}}, "one", force="true")).ok()
    assert [item["type"] for item in after["status"]["conditions"]] == ["B"]


@pytest.mark.recorded("apply/apply with unknown field, strict")
async def test_an_applied_field_must_be_declared(api: Api, namespace: str) -> None:
    body = deployment("d", replicas=0, bogus=1)
    answer = await api.apply(f"{_deployments(namespace)}/d", body, fieldValidation="Strict")
    assert ".spec.bogus: field not declared in schema" in answer.message(500)


@pytest.mark.recorded("apply/apply without fieldManager", "apply/apply with managedFields in body")
async def test_apply_needs_a_manager_and_takes_no_managed_fields(api: Api, namespace: str) -> None:
    path = f"{_deployments(namespace)}/d"
    answer = await api.patch(path, deployment("d"), APPLY)
    assert "fieldManager: Required value: is required for apply patch" in answer.message(422)
    body = deployment("d")
    body["metadata"]["managedFields"] = [{"manager": "x", "operation": "Apply"}]
    assert (await api.apply(path, body)).message(400) == "metadata.managedFields must be nil"


@pytest.mark.recorded("apply/immutable selector")
async def test_the_selector_of_a_deployment_never_changes(api: Api, namespace: str) -> None:
    path = f"{_deployments(namespace)}/d"
    (await api.apply(path, deployment("d", replicas=0))).ok()
    answer = await api.apply(path, deployment("d", replicas=0, selector={"matchLabels": {"app": "x"}}))
    assert "spec.selector: Invalid value" in answer.message(422)
    assert "field is immutable" in answer.message(422)


async def test_a_client_can_clear_all_ownership(api: Api, namespace: str) -> None:
    path = f"{_deployments(namespace)}/d"
    (await api.apply(path, deployment("d", replicas=0))).ok()
    after = (await api.patch(path, {"metadata": {"managedFields": [{}]}})).ok()
    assert "managedFields" not in after["metadata"]


async def test_apply_of_status_alone_does_not_create(api: Api, namespace: str) -> None:
    path = f"/apis/pagefleet.dev/v1alpha1/namespaces/{namespace}/llmdeployments/none/status"
    (await api.apply(path, _llmd("none") | {"status": {"replicas": 1}})).message(404)


async def test_an_applied_object_fits_its_schema_and_names_itself(api: Api, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps/m"
    head: Json = {"apiVersion": "v1", "kind": "ConfigMap"}
    refused = await api.apply(path, head | {"data": {"a": "1"}})
    assert refused.message(400).endswith("(m based on URL) was undeterminable: name must be provided")
    name = {"metadata": {"name": "m"}}
    start = "failed to create typed patch object (/m; /v1, Kind=ConfigMap): "
    refused = await api.apply(path, head | name | {"bogus": 1})
    assert refused.message(500) == f"{start}.bogus: field not declared in schema"
    spec = {"replicas": "3", "selector": {"matchLabels": {"app": "d"}}}
    refused = await api.apply(f"{_deployments(namespace)}/d", deployment("d") | {"spec": spec})
    assert refused.message(500).endswith(".spec.replicas: expected numeric (int or float), got string")
    (await api.apply(path, head | name)).ok()
    (await api.apply(path, head | {"data": {"a": "1"}})).ok()  # what is there is known by its URL


async def test_what_nobody_owned_belongs_to_before_the_first_apply(api: Api, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps/m"
    body: Json = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "m"}, "data": {"a": "1"}}
    (await api.apply(path, body)).ok()
    (await api.patch(path, {"metadata": {"managedFields": [{}]}})).ok()
    changed = (await api.patch(path, {"data": {"b": "2"}})).ok()
    assert "managedFields" not in changed["metadata"], "nobody is tracked before somebody applies"
    refused = await api.apply(path, body | {"data": {"a": "3"}})
    assert refused.message(409).endswith('conflict with "before-first-apply" using v1: .data.a')


async def test_filling_an_empty_map_takes_it_from_nobody(api: Api, namespace: str) -> None:
    path = f"/apis/pagefleet.dev/v1alpha1/namespaces/{namespace}/llmdeployments/o"
    spec: Json = {"model": {"source": "file:///models/m"}}
    (await api.apply(path, _llmd("o", **spec, template={}))).ok()
    filled = (await api.apply(path, _llmd("o", template={"a": "b"}), "other")).ok()
    fields = {entry["manager"]: entry["fieldsV1"]["f:spec"] for entry in filled["metadata"]["managedFields"]}
    assert fields["tests"]["f:template"] == {}
    assert fields["other"] == {"f:template": {"f:a": {}}}


@pytest.mark.parametrize(
    ("version", "kind"),
    [("apps/v1", "Deployment"), ("v1", "Service"), ("policy/v1", "PodDisruptionBudget")],
    ids=["Deployment", "Service", "PodDisruptionBudget"],
)
async def test_an_apply_with_a_version_that_no_object_has_creates_and_changes_nothing(
    api: Api, namespace: str, version: str, kind: str
) -> None:
    """What the operator's first applies rest upon: one that comes late is a conflict, forced or not."""
    selector = {"matchLabels": {"app": "d"}}
    spec: Json = {
        "Deployment": deployment("d", replicas=0)["spec"],
        "Service": {"ports": [{"port": 80}], "selector": {"app": "d"}},
        "PodDisruptionBudget": {"maxUnavailable": 1, "selector": selector},
    }[kind]
    body: Json = {"apiVersion": version, "kind": kind, "metadata": {"name": "d", "resourceVersion": "1"}, "spec": spec}
    root = f"/api/{version}" if version == "v1" else f"/apis/{version}"
    path = f"{root}/namespaces/{namespace}/{kind.lower()}s/d"
    created = await api.apply(path, body, force="true")
    assert created.status == 201
    body["metadata"]["labels"] = {"late": "yes"}
    refused = await api.apply(path, body, force="true")
    assert "the object has been modified" in refused.message(409)
