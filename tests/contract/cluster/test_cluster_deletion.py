"""Deletion: finalizers, propagation, grace, preconditions, namespaces."""

import pytest

from support.localapi import Api, Json, config_map, llmd, owner_reference, pod


def _maps(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/configmaps"


def _pods(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/pods"


async def _owner_with_child(api: Api, namespace: str, **meta: object) -> tuple[Json, Json]:
    owner = (await api.post(_maps(namespace), config_map("owner"))).ok()
    owner = {"apiVersion": "v1", "kind": "ConfigMap"} | owner
    child = config_map("child", owner)
    child["metadata"] |= meta
    return owner, (await api.post(_maps(namespace), child)).ok()


async def _gone(api: Api, path: str) -> None:
    await api.until(lambda: api.get(path), lambda answer: answer.status == 404)


@pytest.mark.recorded("delete/delete sets deletionTimestamp", "delete/remove finalizer", "delete/delete again")
async def test_a_finalizer_holds_an_object_until_it_is_taken_off(api: Api, namespace: str) -> None:
    path = f"{_maps(namespace)}/m"
    (await api.post(_maps(namespace), {"metadata": {"name": "m", "finalizers": ["pagefleet.dev/x"]}})).ok()
    for _ in range(2):
        assert (await api.delete(path)).ok()["metadata"]["deletionTimestamp"]
    (await api.patch(path, {"data": {"still": "writable"}})).ok()
    added = await api.patch(path, {"metadata": {"finalizers": ["pagefleet.dev/x", "pagefleet.dev/y"]}})
    assert "no new finalizers can be added if the object is being deleted" in added.message(422)
    (await api.patch(path, {"metadata": {"finalizers": None}})).ok()
    (await api.get(path)).message(404)


@pytest.mark.recorded("delete/child collected")
async def test_background_deletion_takes_the_dependents_later(api: Api, namespace: str) -> None:
    await _owner_with_child(api, namespace)
    answer = await api.delete(f"{_maps(namespace)}/owner")
    assert answer.ok()["status"] == "Success"
    await _gone(api, f"{_maps(namespace)}/child")


@pytest.mark.recorded("delete/foreground delete", "delete/owner gone")
async def test_foreground_deletion_waits_for_blocking_dependents(api: Api, namespace: str) -> None:
    await _owner_with_child(api, namespace, finalizers=["pagefleet.dev/hold"])
    deleted = (await api.delete(f"{_maps(namespace)}/owner", {"propagationPolicy": "Foreground"})).ok()
    assert deleted["metadata"]["finalizers"] == ["foregroundDeletion"]
    child = f"{_maps(namespace)}/child"
    await api.until(lambda: api.get(child), lambda a: "deletionTimestamp" in a.body["metadata"])
    assert (await api.get(f"{_maps(namespace)}/owner")).status == 200
    (await api.patch(child, {"metadata": {"finalizers": None}})).ok()
    await _gone(api, f"{_maps(namespace)}/owner")


@pytest.mark.recorded("delete/orphan delete", "delete/child orphaned")
async def test_orphaned_dependents_stay_without_their_owner(api: Api, namespace: str) -> None:
    await _owner_with_child(api, namespace)
    (await api.delete(f"{_maps(namespace)}/owner", {"propagationPolicy": "Orphan"})).ok()
    await _gone(api, f"{_maps(namespace)}/owner")
    child = (await api.get(f"{_maps(namespace)}/child")).ok()
    assert "ownerReferences" not in child["metadata"]


async def test_a_dependent_of_two_owners_goes_with_the_last(api: Api, namespace: str) -> None:
    owners = []
    for name in ("one", "two"):
        owner = (await api.post(_maps(namespace), config_map(name))).ok()
        owners.append({"apiVersion": "v1", "kind": "ConfigMap"} | owner)
    child = config_map("child", *owners)
    (await api.post(_maps(namespace), child)).ok()
    (await api.delete(f"{_maps(namespace)}/one")).ok()
    references = [owner_reference(owners[1])]
    path = f"{_maps(namespace)}/child"
    await api.until(lambda: api.get(path), lambda a: a.body["metadata"].get("ownerReferences") == references)
    (await api.delete(f"{_maps(namespace)}/two")).ok()
    await _gone(api, path)


async def test_an_object_whose_owner_never_was_is_collected(api: Api, namespace: str) -> None:
    ghost: Json = {"apiVersion": "v1", "kind": "ConfigMap"}
    ghost |= {"metadata": {"name": "ghost", "uid": "11111111-1111-4111-8111-111111111111"}}
    (await api.post(_maps(namespace), config_map("child", ghost))).ok()
    await _gone(api, f"{_maps(namespace)}/child")


@pytest.mark.recorded("delete/two controllers refused")
async def test_one_controller_at_most(api: Api, namespace: str) -> None:
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "o", "uid": "u"}}
    one = owner_reference(owner) | {"controller": True}
    body = config_map("m")
    body["metadata"]["ownerReferences"] = [one, one | {"uid": "v"}]
    answer = await api.post(_maps(namespace), body)
    assert "Only one reference can have Controller set to true" in answer.message(422)


async def test_the_same_owner_twice_is_one(api: Api, namespace: str) -> None:
    owner = (await api.post(_maps(namespace), config_map("o"))).ok() | {"apiVersion": "v1", "kind": "ConfigMap"}
    body = config_map("m")
    body["metadata"]["ownerReferences"] = [owner_reference(owner)] * 2
    created = await api.post(_maps(namespace), body)
    assert created.ok()["metadata"]["ownerReferences"] == [owner_reference(owner)]
    assert "contains duplicate entries" in created.headers["Warning"]
    assert created.headers["Warning"].endswith(f'observed: {owner["metadata"]["uid"]}"')


@pytest.mark.recorded("delete/precondition uid mismatch")
async def test_preconditions_guard_a_deletion(api: Api, namespace: str) -> None:
    path = f"{_maps(namespace)}/m"
    created = (await api.post(_maps(namespace), config_map("m"))).ok()
    for field, value, text in (("uid", "other", "UID"), ("resourceVersion", "1", "ResourceVersion")):
        answer = await api.delete(path, {"preconditions": {field: value}})
        assert f"the {text} in the precondition ({value}) does not match" in answer.message(409)
    kept = {key: created["metadata"][key] for key in ("uid", "resourceVersion")}
    (await api.delete(path, {"preconditions": kept})).ok()


async def test_a_pod_on_a_node_is_marked_and_the_node_removes_it(api: Api, namespace: str, node: str) -> None:
    path = f"{_pods(namespace)}/p"
    created = (await api.post(_pods(namespace), pod("p", node=node, terminationGracePeriodSeconds=40))).ok()
    assert created["spec"]["terminationGracePeriodSeconds"] == 40
    graces = []
    queries: list[dict[str, str]] = [{}, {"gracePeriodSeconds": "7"}, {"gracePeriodSeconds": "20"}]
    for query in queries:
        marked = (await api.delete(path, **query)).ok()
        graces.append(marked["metadata"]["deletionGracePeriodSeconds"])
    assert graces == [40, 7, 7]
    assert (await api.get(path)).status == 200
    options = {"gracePeriodSeconds": 0, "preconditions": {"uid": created["metadata"]["uid"]}}
    (await api.delete(path, options)).ok()
    (await api.get(path)).message(404)


async def test_a_pod_without_a_node_goes_at_once(api: Api, namespace: str) -> None:
    (await api.post(_pods(namespace), pod("p", schedulerName="nobody"))).ok()
    deleted = (await api.delete(f"{_pods(namespace)}/p")).ok()
    assert deleted["kind"] == "Pod"
    (await api.get(f"{_pods(namespace)}/p")).message(404)


async def test_a_shorter_grace_counts_from_the_first_deletion(api: Api, namespace: str, node: str) -> None:
    (await api.post(_pods(namespace), pod("p", node=node))).ok()
    first = (await api.delete(f"{_pods(namespace)}/p", gracePeriodSeconds="100")).ok()["metadata"]
    second = (await api.delete(f"{_pods(namespace)}/p", gracePeriodSeconds="10")).ok()["metadata"]
    assert second["deletionTimestamp"] < first["deletionTimestamp"]
    assert second["deletionGracePeriodSeconds"] == 10


@pytest.mark.recorded("delete/delete collection")
async def test_a_collection_is_deleted_and_shown(api: Api, namespace: str) -> None:
    path = f"/apis/pagefleet.dev/v1alpha1/namespaces/{namespace}/llmdeployments"
    for name in ("a", "b"):
        (await api.post(path, llmd(name))).ok()
    deleted = (await api.delete(path)).ok()
    assert [item["metadata"]["name"] for item in deleted["items"]] == ["a", "b"]
    assert (await api.get(path)).ok()["items"] == []


async def test_a_namespace_goes_when_all_that_it_holds_is_gone(api: Api) -> None:
    name = "contract-emptied"
    (await api.post("/api/v1/namespaces", {"metadata": {"name": name}})).ok()
    (await api.post(_maps(name), {"metadata": {"name": "m", "finalizers": ["pagefleet.dev/x"]}})).ok()
    (await api.post(_maps(name), config_map("n"))).ok()
    assert (await api.delete(f"/api/v1/namespaces/{name}")).ok()["status"]["phase"] == "Terminating"
    refused = await api.post(_maps(name), config_map("late"))
    assert "because it is being terminated" in refused.message(403)
    await _gone(api, f"{_maps(name)}/n")
    assert (await api.get(f"/api/v1/namespaces/{name}")).status == 200
    (await api.patch(f"{_maps(name)}/m", {"metadata": {"finalizers": None}})).ok()
    await _gone(api, f"/api/v1/namespaces/{name}")


async def test_some_namespaces_stay(api: Api) -> None:
    for name in ("default", "kube-system", "kube-public"):
        refused = await api.delete(f"/api/v1/namespaces/{name}", dryRun="All")
        assert refused.message(403) == f'namespaces "{name}" is forbidden: this namespace may not be deleted'


async def test_propagation_and_grace_must_make_sense(api: Api, namespace: str) -> None:
    (await api.post(_maps(namespace), config_map("m"))).ok()
    refused = await api.delete(f"{_maps(namespace)}/m", {"propagationPolicy": "Sideways"})
    assert refused.message(422).startswith('DeleteOptions.meta.k8s.io "" is invalid: propagationPolicy: Unsupported')
    refused = await api.delete(f"{_maps(namespace)}/m", {"gracePeriodSeconds": "soon"})
    assert "gracePeriodSeconds of type int64" in refused.message(400)
    assert (await api.get(f"{_maps(namespace)}/m")).status == 200
