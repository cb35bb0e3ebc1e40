"""List and watch: selectors, pages, versions, bookmarks."""

import asyncio

import pytest

from support.localapi import TABLE, Api, config_map, llmd, pod


def _maps(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/configmaps"


async def _create(api: Api, path: str, *names: str) -> None:
    for name in names:
        (await api.post(path, config_map(name))).ok()


@pytest.mark.recorded("list_watch/page one", "list_watch/page two")
async def test_pages_show_one_moment_whatever_is_written_between_them(api: Api, namespace: str) -> None:
    path = _maps(namespace)
    names = [f"m{i}" for i in range(5)]
    await _create(api, path, *names)
    first = (await api.get(path, limit="2")).ok()
    (await api.delete(f"{path}/m3")).ok()
    (await api.patch(f"{path}/m4", {"data": {"a": "new"}})).ok()
    (await api.post(path, config_map("m2b"))).ok()
    seen, page = [item["metadata"]["name"] for item in first["items"]], first
    while page["metadata"].get("continue"):
        page = (await api.get(path, limit="2", **{"continue": page["metadata"]["continue"]})).ok()
        seen += [item["metadata"]["name"] for item in page["items"]]
        assert page["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]
    assert seen == names
    assert page["items"][-1]["data"] == {"a": "b"}


@pytest.mark.recorded("list_watch/bad continue")
async def test_a_token_that_is_none_is_refused(api: Api, namespace: str) -> None:
    answer = await api.get(_maps(namespace), limit="2", **{"continue": "xx"})
    assert answer.message(400).startswith("invalid continue token")


@pytest.mark.recorded("list_watch/label selector", "list_watch/label selector set", "list_watch/bad label selector")
async def test_selectors_narrow_lists_and_deletions(api: Api, namespace: str) -> None:
    path = _maps(namespace)
    for name, labels in (("a", {"n": "0"}), ("b", {"n": "1"}), ("c", {})):
        (await api.post(path, {"metadata": {"name": name, "labels": labels}})).ok()

    async def names(selector: str) -> list[str]:
        items = (await api.get(path, labelSelector=selector)).ok()["items"]
        return [item["metadata"]["name"] for item in items]

    assert await names("n in (0,1)") == ["a", "b"]
    assert await names("n notin (0)") == ["b", "c"]
    assert await names("!n") == ["c"]
    assert await names("n==") == []
    (await api.delete(path, labelSelector="n")).ok()
    assert await names("") == ["c"]


@pytest.mark.recorded("list_watch/field selector name", "list_watch/field selector unsupported")
async def test_field_selectors_know_some_fields_only(api: Api, namespace: str, node: str) -> None:
    pods = f"/api/v1/namespaces/{namespace}/pods"
    (await api.post(pods, pod("p1", node=node))).ok()
    (await api.post(pods, pod("p2", schedulerName="nobody"))).ok()
    found = (await api.get(pods, fieldSelector=f"spec.nodeName={node},status.phase=Pending")).ok()
    assert [item["metadata"]["name"] for item in found["items"]] == ["p1"]
    answer = await api.get(_maps(namespace), fieldSelector="data.a=b")
    known = 'only "metadata.name", "metadata.namespace"'
    assert answer.message(400) == f'"data.a" is not a known field selector: {known}'
    for path in (pods, f"/apis/pagefleet.dev/v1alpha1/namespaces/{namespace}/llmdeployments"):
        answer = await api.get(path, fieldSelector="data.a=b")
        assert answer.message(400) == "field label not supported: data.a"


@pytest.mark.recorded("list_watch/watch with selector from a version")
async def test_a_watch_goes_on_where_a_list_ended(api: Api, namespace: str) -> None:
    path = _maps(namespace)
    await _create(api, path, "old")
    version = (await api.get(path)).ok()["metadata"]["resourceVersion"]
    (await api.patch(f"{path}/old", {"data": {"a": "2"}})).ok()
    await _create(api, path, "new")
    (await api.delete(f"{path}/old")).ok()
    events = await api.watch(path, resourceVersion=version)
    seen = [(event["type"], event["object"]["metadata"]["name"]) for event in events if event["type"] != "BOOKMARK"]
    assert seen == [("MODIFIED", "old"), ("ADDED", "new"), ("DELETED", "old")]
    versions = [int(event["object"]["metadata"]["resourceVersion"]) for event in events]
    assert versions == sorted(versions)


@pytest.mark.recorded("list_watch/watch with selector from a version")
async def test_objects_enter_and_leave_a_selection(api: Api, namespace: str) -> None:
    path = _maps(namespace)
    (await api.post(path, {"metadata": {"name": "m", "labels": {"n": "0"}}})).ok()
    version = (await api.get(path)).ok()["metadata"]["resourceVersion"]
    for value in ("1", "0", None):
        (await api.patch(f"{path}/m", {"metadata": {"labels": {"n": value}}})).ok()
    events = await api.watch(path, resourceVersion=version, labelSelector="n=0")
    assert [event["type"] for event in events] == ["DELETED", "ADDED", "DELETED"]
    assert events[0]["object"]["metadata"]["labels"] == {"n": "0"}


@pytest.mark.recorded("list_watch/watch without version sends ADDED first", "list_watch/watch list (sendInitialEvents)")
async def test_a_watch_without_version_begins_with_what_is_there(api: Api, namespace: str) -> None:
    path = _maps(namespace)
    await _create(api, path, "m")
    events = await api.watch(path)
    assert [(e["type"], e["object"]["metadata"]["name"]) for e in events] == [("ADDED", "m")]
    events = await api.watch(
        path, sendInitialEvents="true", resourceVersionMatch="NotOlderThan", allowWatchBookmarks="true"
    )
    assert [event["type"] for event in events][:2] == ["ADDED", "BOOKMARK"]
    assert events[1]["object"]["metadata"]["annotations"] == {"k8s.io/initial-events-end": "true"}


@pytest.mark.embedded_only("a young server still knows its first version; the recorded one was old enough")
@pytest.mark.recorded("list_watch/watch from an expired version")
async def test_an_expired_version_is_an_error_event(api: Api, namespace: str) -> None:
    [event] = await api.watch(_maps(namespace), resourceVersion="1")
    assert event["type"] == "ERROR"
    assert (event["object"]["code"], event["object"]["reason"]) == (410, "Expired")


@pytest.mark.recorded("list_watch/watch with bad version", "list_watch/list at a future version")
async def test_versions_that_cannot_be(api: Api, namespace: str) -> None:
    path = _maps(namespace)
    assert "invalid syntax" in (await api.get(path, watch="true", resourceVersion="abc")).message(500)
    future = await api.get(path, resourceVersion="99999999", resourceVersionMatch="Exact")
    assert future.message(504).startswith("Timeout: Too large resource version: 99999999")


async def test_a_watch_from_a_version_still_to_come_waits(api: Api, namespace: str) -> None:
    path = _maps(namespace)
    version = int((await api.get(path)).ok()["metadata"]["resourceVersion"])
    await _create(api, path, "m")
    assert await api.watch(path, seconds=1, resourceVersion=str(version + 10**6)) == []


async def test_options_that_need_each_other(api: Api, namespace: str) -> None:
    for query in ({"watch": "true", "sendInitialEvents": "true"}, {"resourceVersionMatch": "Exact"}):
        answer = await api.get(_maps(namespace), **query)
        assert answer.message(422).startswith('ListOptions.meta.k8s.io "" is invalid: resourceVersionMatch: Forbidden')
        assert "name" not in answer.body["details"]


async def test_a_bookmark_comes_before_a_watch_ends(api: Api, namespace: str) -> None:
    path = _maps(namespace)
    version = (await api.get(path)).ok()["metadata"]["resourceVersion"]
    other = f"/api/v1/namespaces/{namespace}/secrets"
    (await api.post(other, {"metadata": {"name": "s"}})).ok()
    events = await api.watch(path, seconds=4, resourceVersion=version, allowWatchBookmarks="true")
    assert {event["type"] for event in events} == {"BOOKMARK"}
    assert int(events[-1]["object"]["metadata"]["resourceVersion"]) > int(version)


@pytest.mark.recorded("crd/table", "crd/table of one", "crd/table, no objects embedded", "status_scale/status table")
async def test_a_table_has_the_columns_of_the_crd(api: Api, namespace: str) -> None:
    path = f"/apis/pagefleet.dev/v1alpha1/namespaces/{namespace}/llmdeployments"
    (await api.post(path, llmd("o"))).ok()
    table = (await api.get(path, accept=TABLE)).ok()
    names = [column["name"] for column in table["columnDefinitions"]]
    assert names[:4] == ["Name", "Model", "Ready", "Desired"]
    assert table["rows"][0]["cells"][:4] == ["o", None, None, 1]
    assert table["rows"][0]["object"]["kind"] == "PartialObjectMetadata"


async def test_metadata_alone_can_be_asked_for(api: Api, namespace: str) -> None:
    await _create(api, _maps(namespace), "m")
    accept = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
    found = (await api.get(_maps(namespace), accept=accept)).ok()
    assert found["kind"] == "PartialObjectMetadataList"
    assert [set(item) - {"kind", "apiVersion"} for item in found["items"]] == [{"metadata"}]


async def test_many_watchers_see_the_same(api: Api, namespace: str) -> None:
    path = _maps(namespace)
    version = (await api.get(path)).ok()["metadata"]["resourceVersion"]
    watches = [asyncio.create_task(api.watch(path, seconds=20, count=10, resourceVersion=version)) for _ in range(50)]
    await _create(api, path, *(f"m{i}" for i in range(10)))
    seen = [[event["object"]["metadata"]["name"] for event in await watch] for watch in watches]
    assert seen == [[f"m{i}" for i in range(10)]] * 50
