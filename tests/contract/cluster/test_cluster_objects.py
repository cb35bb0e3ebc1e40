"""Create, read, replace, patch: what holds for every object."""

import pytest

from support.localapi import APPLY, CRDS, JSON_PATCH, MERGE, STRATEGIC, Api, config_map, deployment, draft_crd, llmd


def _maps(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/configmaps"


def _llmds(namespace: str) -> str:
    return f"/apis/pagefleet.dev/v1alpha1/namespaces/{namespace}/llmdeployments"


@pytest.mark.recorded("patch/generateName")
async def test_generate_name_makes_different_names(api: Api, namespace: str) -> None:
    body = {"metadata": {"generateName": "x-"}}
    names = {(await api.post(_maps(namespace), body)).ok()["metadata"]["name"] for _ in range(3)}
    assert len(names) == 3
    assert all(name.startswith("x-") and len(name) == 7 for name in names)


async def test_an_object_needs_a_name_or_a_prefix(api: Api, namespace: str) -> None:
    message = (await api.post(_maps(namespace), {"metadata": {}})).message(422)
    assert message.endswith("metadata.name: Required value: name or generateName is required")


@pytest.mark.recorded("patch/create existing")
async def test_a_name_can_be_given_only_once(api: Api, namespace: str) -> None:
    (await api.post(_maps(namespace), config_map("m"))).ok()
    answer = await api.post(_maps(namespace), config_map("m"))
    assert answer.message(409) == 'configmaps "m" already exists'
    assert answer.body["reason"] == "AlreadyExists"


async def test_nothing_is_created_in_a_namespace_that_does_not_exist(api: Api) -> None:
    answer = await api.post(_maps("contract-nowhere"), config_map("m"))
    assert answer.message(404) == 'namespaces "contract-nowhere" not found'


async def test_the_api_owns_uid_times_and_versions(api: Api, namespace: str) -> None:
    meta = {"name": "m", "uid": "mine", "creationTimestamp": "2001-01-01T00:00:00Z", "generation": 7}
    created = (await api.post(_maps(namespace), {"metadata": meta})).ok()["metadata"]
    assert created["uid"] != "mine"
    assert created["creationTimestamp"] > "2020"
    assert created["generation"] == 7, "nobody counts the generations of a ConfigMap"
    changed = {"metadata": created | {"creationTimestamp": "2001-01-01T00:00:00Z", "generation": 9}, "data": {"a": "1"}}
    after = (await api.put(f"{_maps(namespace)}/m", changed)).ok()["metadata"]
    fixed = ("uid", "creationTimestamp", "generation")
    assert [after[name] for name in fixed] == [created[name] for name in fixed]
    assert int(after["resourceVersion"]) > int(created["resourceVersion"])


async def test_a_write_that_changes_nothing_keeps_the_version(api: Api, namespace: str) -> None:
    created = (await api.post(_maps(namespace), config_map("m"))).ok()
    again = (await api.put(f"{_maps(namespace)}/m", created)).ok()
    patched = (await api.patch(f"{_maps(namespace)}/m", {"data": {"a": "b"}})).ok()
    versions = {obj["metadata"]["resourceVersion"] for obj in (created, again, patched)}
    assert len(versions) == 1


@pytest.mark.recorded("patch/merge patch with old resourceVersion", "lease_events_rbac/renew with an old version")
async def test_an_old_version_conflicts_in_every_kind_of_write(api: Api, namespace: str) -> None:
    old = (await api.post(_maps(namespace), config_map("m"))).ok()
    (await api.patch(f"{_maps(namespace)}/m", {"data": {"a": "2"}})).ok()
    stale = {"metadata": {"resourceVersion": old["metadata"]["resourceVersion"]}, "data": {"a": "3"}}
    path = f"{_maps(namespace)}/m"
    for answer in (
        await api.put(path, old | {"data": {"a": "3"}}),
        await api.patch(path, stale, MERGE),
        await api.patch(path, stale, STRATEGIC),
        await api.apply(path, stale | {"apiVersion": "v1", "kind": "ConfigMap"}, force="true"),
    ):
        assert "the object has been modified" in answer.message(409)
    assert (await api.get(path)).ok()["data"] == {"a": "2"}


async def test_a_wrong_uid_conflicts(api: Api, namespace: str) -> None:
    created = (await api.post(_maps(namespace), config_map("m"))).ok()
    created["metadata"]["uid"] = "11111111-1111-4111-8111-111111111111"
    answer = await api.put(f"{_maps(namespace)}/m", created)
    assert "Precondition failed: UID in precondition" in answer.message(409)


@pytest.mark.recorded("patch/json patch test fails", "patch/json patch to a missing path")
async def test_a_json_patch_whose_test_fails_changes_nothing(api: Api, namespace: str) -> None:
    (await api.post(_maps(namespace), config_map("m"))).ok()
    operations = [
        {"op": "replace", "path": "/data/a", "value": "c"},
        {"op": "test", "path": "/metadata/resourceVersion", "value": "1"},
    ]
    answer = await api.patch(f"{_maps(namespace)}/m", operations, JSON_PATCH)
    assert answer.message(422) == "the server rejected our request due to an error in our request"
    assert (await api.get(f"{_maps(namespace)}/m")).ok()["data"] == {"a": "b"}


@pytest.mark.recorded("patch/strategic merge on a custom resource", "patch/unknown patch type")
async def test_custom_objects_take_no_strategic_patch(api: Api, namespace: str) -> None:
    (await api.post(_llmds(namespace), llmd("o"))).ok()
    message = (await api.patch(f"{_llmds(namespace)}/o", {"spec": {"replicas": 2}}, STRATEGIC)).message(415)
    assert message.endswith(f"application/json-patch+json, application/merge-patch+json, {APPLY}")


async def test_a_strategic_patch_merges_containers_by_name(api: Api, namespace: str) -> None:
    path = f"/apis/apps/v1/namespaces/{namespace}/deployments"
    (await api.post(path, deployment("d", replicas=0))).ok()
    container = {"name": "server", "env": [{"name": "X", "value": "1"}]}
    patch = {"spec": {"template": {"spec": {"containers": [container]}}}}
    after = (await api.patch(f"{path}/d", patch, STRATEGIC)).ok()["spec"]["template"]["spec"]["containers"]
    assert [(c["name"], c["image"], c["env"]) for c in after] == [("server", "img:1", [{"name": "X", "value": "1"}])]


async def test_a_strategic_patch_puts_its_own_items_first(api: Api, namespace: str) -> None:
    path = f"/apis/apps/v1/namespaces/{namespace}/deployments"
    (await api.post(path, deployment("d", replicas=0))).ok()
    patch = {"spec": {"template": {"spec": {"containers": [{"name": "new", "image": "img:2"}]}}}}
    after = (await api.patch(f"{path}/d", patch, STRATEGIC)).ok()["spec"]["template"]["spec"]["containers"]
    assert [container["name"] for container in after] == ["new", "server"]


async def test_a_json_patch_replaces_what_is_not_there(api: Api, namespace: str) -> None:
    (await api.post(_maps(namespace), {"metadata": {"name": "m"}})).ok()
    path = f"{_maps(namespace)}/m"
    replaced = await api.patch(path, [{"op": "replace", "path": "/data", "value": {"a": "b"}}], JSON_PATCH)
    assert replaced.ok()["data"] == {"a": "b"}
    missing = [{"op": "remove", "path": "/binaryData"}], [{"op": "replace", "path": "/spec/replicas", "value": 1}]
    for operations in missing:
        (await api.patch(path, operations, JSON_PATCH)).message(422)


async def test_faults_are_found_before_the_name_is_looked_up(api: Api, namespace: str) -> None:
    (await api.post(_llmds(namespace), llmd("o"))).ok()
    strict = await api.post(_llmds(namespace), llmd("o", bogus=1), fieldValidation="Strict")
    assert 'unknown field "spec.bogus"' in strict.message(400)
    assert (await api.post(_llmds(namespace), llmd("o", replicas=-1))).status == 422
    warned = await api.put(f"{_llmds(namespace)}/nobody", llmd("nobody", bogus=1))
    assert warned.status == 404
    assert "spec.bogus" in warned.headers["Warning"]


@pytest.mark.recorded("patch/dry run")
async def test_a_dry_run_answers_and_stores_nothing(api: Api, namespace: str) -> None:
    (await api.post(_maps(namespace), config_map("m"), dryRun="All")).ok()
    (await api.get(f"{_maps(namespace)}/m")).message(404)
    (await api.post(_maps(namespace), config_map("m"))).ok()
    assert (await api.patch(f"{_maps(namespace)}/m", {"data": {"a": "z"}}, dryRun="All")).ok()["data"] == {"a": "z"}
    (await api.delete(f"{_maps(namespace)}/m", dryRun="All")).ok()
    assert (await api.get(f"{_maps(namespace)}/m")).ok()["data"] == {"a": "b"}
    assert 'supported values: "All"' in (await api.post(_maps(namespace), config_map("n"), dryRun="Some")).message(422)


@pytest.mark.recorded("status_scale/spec change bumps generation", "status_scale/status endpoint changes status only")
async def test_generation_counts_changes_of_the_spec_alone(api: Api, namespace: str) -> None:
    path = f"{_llmds(namespace)}/o"
    created = (await api.post(_llmds(namespace), llmd("o"))).ok()
    assert created["metadata"]["generation"] == 1
    generations = [
        (await api.patch(path, {"spec": {"replicas": 2}})).ok(),
        (await api.patch(path, {"metadata": {"labels": {"a": "b"}}})).ok(),
        (await api.patch(path, {"status": {"replicas": 9}})).ok(),
        (await api.patch(f"{path}/status", {"status": {"replicas": 1}, "spec": {"replicas": 7}})).ok(),
    ]
    assert [obj["metadata"]["generation"] for obj in generations] == [2, 2, 2, 2]
    assert generations[2].get("status") is None
    assert generations[3]["status"] == {"replicas": 1}
    assert generations[3]["spec"]["replicas"] == 2


async def test_the_status_endpoint_of_a_custom_object_leaves_metadata_alone(api: Api, namespace: str) -> None:
    (await api.post(_llmds(namespace), llmd("o"))).ok()
    patch = {"metadata": {"labels": {"a": "b"}, "finalizers": ["x/y"]}, "status": {"replicas": 1}}
    after = (await api.patch(f"{_llmds(namespace)}/o/status", patch)).ok()
    assert "labels" not in after["metadata"]
    assert "finalizers" not in after["metadata"]


async def test_a_custom_object_says_what_it_is(api: Api, namespace: str) -> None:
    """Built-in objects are understood without; clients that leave it out fail on real servers only."""
    path, whole = _llmds(namespace), llmd("o")
    for field in ("kind", "apiVersion"):
        body = {key: value for key, value in whole.items() if key != field}
        for answer in (await api.post(path, body), await api.put(f"{path}/o", body)):
            answer.message(400)
    assert (await api.post(path, body)).message(400) == (
        "the API version in the data () does not match the expected API version (pagefleet.dev/v1alpha1)"
    )
    body = {key: value for key, value in whole.items() if key != "kind"}
    start = "the object provided is unrecognized (must be of type LLMDeployment): Object 'Kind' is missing in '{"
    message = (await api.post(path, body)).message(400)
    assert message.startswith(start) and message.endswith('({"apiVersion": "pagefleet.dev/ ...)')
    other = (await api.post(path, whole | {"kind": "Other"})).message(422)
    assert other == 'Other.pagefleet.dev "o" is invalid: kind: Invalid value: "Other": must be LLMDeployment'
    for config, shown in (({}, "/, Kind="), ({"kind": "ConfigMap"}, "/, Kind=ConfigMap"),
                          ({"apiVersion": "v1", "kind": "Secret"}, "/v1, Kind=Secret")):  # fmt: skip
        refused = await api.apply(f"{_maps(namespace)}/m", config)
        assert refused.message(400) == f"invalid object type: {shown}"


@pytest.mark.recorded("crd/unknown field, strict", "crd/unknown field, warn", "crd/defaults and pruning")
async def test_unknown_fields_refuse_warn_or_vanish(api: Api, namespace: str) -> None:
    body = llmd("o", bogus=1)
    strict = await api.post(_llmds(namespace), body, fieldValidation="Strict")
    assert strict.message(400).endswith('strict decoding error: unknown field "spec.bogus"')
    warned = await api.post(_llmds(namespace), body, fieldValidation="Warn")
    assert "bogus" not in warned.ok()["spec"]
    assert warned.headers["Warning"] == '299 - "unknown field \\"spec.bogus\\""'
    silent = await api.put(f"{_llmds(namespace)}/o", warned.body | {"extra": 1}, fieldValidation="Ignore")
    assert silent.status == 200
    assert "Warning" not in silent.headers
    assert "extra" not in silent.body


async def test_unknown_fields_of_builtin_objects_are_named_too(api: Api, namespace: str) -> None:
    path = f"/apis/apps/v1/namespaces/{namespace}/deployments"
    body = deployment("d", replicas=0)
    body["spec"]["template"]["spec"]["containers"][0]["imgae"] = "typo"
    message = (await api.post(path, body, fieldValidation="Strict")).message(400)
    assert 'unknown field "spec.template.spec.containers[0].imgae"' in message


@pytest.mark.recorded("crd/required missing", "crd/CEL: min > max", "crd/enum")
async def test_an_invalid_custom_object_is_refused_with_every_faulty_field(api: Api, namespace: str) -> None:
    spec = {"replicas": -1, "autoscaling": {"minReplicas": 3, "maxReplicas": 2}}
    answer = await api.post(_llmds(namespace), llmd("o", **spec))
    answer.message(422)
    fields = {cause["field"] for cause in answer.body["details"]["causes"]}
    assert {"spec.replicas", "spec.autoscaling"} <= fields
    patched = await api.post(_llmds(namespace), llmd("o"))
    patched.ok()
    answer = await api.patch(f"{_llmds(namespace)}/o", {"spec": {"placement": "Moon"}})
    assert 'spec.placement: Unsupported value: "Moon": supported values: "Pod", "Sidecar"' in answer.message(422)


@pytest.mark.recorded("crd/CEL transition rule")
async def test_a_transition_rule_holds_against_put_patch_and_apply(api: Api, namespace: str) -> None:
    path = f"{_llmds(namespace)}/o"
    created = (await api.post(_llmds(namespace), llmd("o", engine={"blockSize": 16}))).ok()
    changed = created | {"spec": created["spec"] | {"engine": {"blockSize": 32}}}
    applied = {"apiVersion": created["apiVersion"], "kind": created["kind"], "spec": {"engine": {"blockSize": 32}}}
    for answer in (
        await api.put(path, changed),
        await api.patch(path, {"spec": {"engine": {"blockSize": 32}}}),
        await api.apply(path, applied, force="true"),
    ):
        assert "engine.blockSize is immutable" in answer.message(422)


async def test_labels_are_checked(api: Api, namespace: str) -> None:
    body = config_map("m") | {"metadata": {"name": "m", "labels": {"-bad": "ok", "good": "not ok"}}}
    message = (await api.post(_maps(namespace), body)).message(422)
    assert 'metadata.labels: Invalid value: "-bad"' in message
    assert 'metadata.labels: Invalid value: "not ok"' in message


async def test_versions_of_a_crd_show_the_same_object(api: Api, namespace: str) -> None:
    crd = draft_crd()
    names = {"plural": "widgets", "singular": "widget", "kind": "Widget", "listKind": "WidgetList"}
    crd["metadata"]["name"] = "widgets.contract.pagefleet.dev"
    crd["spec"] |= {"group": "contract.pagefleet.dev", "names": names}
    [old] = crd["spec"]["versions"]
    crd["spec"]["versions"] = [old | {"storage": False}, old | {"name": "v1"}]
    (await api.post(CRDS, crd)).ok()
    root = "/apis/contract.pagefleet.dev"
    first, second = (f"{root}/{version}/namespaces/{namespace}/widgets" for version in ("v1alpha1", "v1"))
    body = llmd("w") | {"apiVersion": "contract.pagefleet.dev/v1alpha1", "kind": "Widget"}
    created = await api.until(lambda: api.post(first, body), lambda answer: answer.status == 201)
    assert created.ok()["apiVersion"] == "contract.pagefleet.dev/v1alpha1"
    assert (await api.get(f"{second}/w")).ok()["apiVersion"] == "contract.pagefleet.dev/v1"
    [listed] = (await api.get(first)).ok()["items"]
    assert listed["apiVersion"] == "contract.pagefleet.dev/v1alpha1"
    same = (await api.put(f"{first}/w", created.body)).ok()
    assert same["metadata"]["resourceVersion"] == created.body["metadata"]["resourceVersion"]
    changed = (await api.patch(f"{second}/w", {"spec": {"replicas": 4}})).ok()
    assert (changed["metadata"]["generation"], changed["spec"]["replicas"]) == (2, 4)
    [event] = await api.watch(first)
    assert event["object"]["apiVersion"] == "contract.pagefleet.dev/v1alpha1"
    (await api.delete(f"{CRDS}/widgets.contract.pagefleet.dev")).ok()


@pytest.mark.recorded("crd/create CRD", "crd/resource discovery")
async def test_a_crd_is_served_at_once_and_its_objects_go_with_it(api: Api, namespace: str) -> None:
    crd = draft_crd()
    names = {"plural": "gadgets", "singular": "gadget", "kind": "Gadget", "listKind": "GadgetList"}
    crd["metadata"]["name"] = "gadgets.contract.pagefleet.dev"
    crd["spec"] |= {"group": "contract.pagefleet.dev", "names": names}
    path = f"/apis/contract.pagefleet.dev/v1alpha1/namespaces/{namespace}/gadgets"
    (await api.post(CRDS, crd)).ok()
    body = llmd("g") | {"apiVersion": "contract.pagefleet.dev/v1alpha1", "kind": "Gadget"}
    created = await api.until(lambda: api.post(path, body), lambda answer: answer.status == 201)
    assert created.ok()["kind"] == "Gadget"
    (await api.delete(f"{CRDS}/gadgets.contract.pagefleet.dev")).ok()
    await api.until(lambda: api.get(f"{path}/g"), lambda answer: answer.status == 404)
