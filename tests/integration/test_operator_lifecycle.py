"""The real operator process against the embedded API and controllers: one cluster for all tests of this file."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import yaml

from pagefleet_localcluster.client import CLAIMS, DEPLOYMENTS, PODS, SERVICES, ApiError, Resource
from support.operator_cluster import (
    CRDS,
    EVENTS,
    LLMDS,
    NETWORK_POLICIES,
    POD_MONITOR_CRD,
    POD_MONITORS,
    ROOT,
    OperatorCluster,
    operator_cluster,
)
from support.recording_proxy import granted_by

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]
FAST = {"scaleDown": {"stabilizationWindowSeconds": 2}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[OperatorCluster]:
    async with operator_cluster(tmp_path_factory.mktemp("operator")) as running:
        yield running


async def test_from_apply_to_available_with_live_load(cluster: OperatorCluster) -> None:
    cluster.node.loads["live"] = {"used": 61, "total": 100, "running": 3, "waiting": 2, "waiting_blocks": 7}
    await cluster.create({"replicas": 2}, name="live")
    await cluster.condition("Available", "True", name="live")

    async def loaded() -> bool:
        status = (await cluster.llmd("live"))["status"]
        return bool(status.get("kvBlocks", {}).get("summary") == "122/200" and status["ready"] == "2/2")

    await cluster.until(loaded, "load in status")
    await cluster.condition("Progressing", "False", name="live")
    status = (await cluster.llmd("live"))["status"]
    assert status["kvBlocks"]["occupancy"] == "61%"
    assert status["kvBlocks"]["waiting"] == 14
    assert status["requests"] == {"running": 6, "waiting": 4}
    assert (status["model"], status["phase"], status["reason"]) == ("live", "Available", "ReplicasReady")
    assert (status["replicas"], status["readyReplicas"]) == (2, 2)
    assert status["selector"] == "app.kubernetes.io/name=pagefleet-server,pagefleet.dev/llmdeployment=live"
    assert [row["state"] for row in status["pods"]] == ["Ready", "Ready"]
    service = await cluster.get(SERVICES, "live")
    assert service is not None
    assert service["spec"]["ports"][0]["targetPort"] == "http"


async def test_nothing_of_kopf_is_written_and_nothing_at_all_at_rest(cluster: OperatorCluster) -> None:
    await cluster.create({"autoscaling": {"maxReplicas": 3}}, name="resting")
    await cluster.condition("ScalingActive", "True", name="resting")
    await cluster.condition("Progressing", "False", name="resting")
    await cluster.scraped("resting", 2)  # whatever was on its way has been written
    before = len(cluster.proxy.writes())
    await cluster.scraped("resting", 3)  # two whole rounds of a resting fleet
    assert [seen for seen in cluster.proxy.writes()[before:] if "/resting" in seen.path] == []
    found = await cluster.llmd("resting")
    assert "finalizers" not in found["metadata"]
    assert "annotations" not in found["metadata"]


async def test_drift_is_repaired_and_said(cluster: OperatorCluster) -> None:
    await cluster.create({}, name="drift")
    await cluster.condition("Available", "True", name="drift")
    await cluster.client.patch(DEPLOYMENTS, "drift", {"spec": {"replicas": 3}}, "default")

    async def repaired() -> bool:
        deployment = await cluster.get(DEPLOYMENTS, "drift")
        one = deployment is not None and deployment["spec"]["replicas"] == 1
        return one and len(await cluster.pods("drift")) == 1

    await cluster.until(repaired, "one replica again")
    await cluster.client.patch(SERVICES, "drift", {"spec": {"selector": {"other": "label"}}}, "default")

    async def service_repaired() -> bool:
        service = await cluster.get(SERVICES, "drift")
        return service is not None and "pagefleet.dev/llmdeployment" in service["spec"]["selector"]

    await cluster.until(service_repaired, "selector again")
    assert "DriftRepaired" in await cluster.events("drift")
    await cluster.client.delete(DEPLOYMENTS, "drift", "default")
    await cluster.until(repaired, "a new Deployment")


async def test_what_others_do_to_the_child_is_undone_and_they_are_told_what_to_edit(cluster: OperatorCluster) -> None:
    await cluster.create({"engine": {"image": "one:1"}}, name="undone")
    await cluster.condition("Available", "True", name="undone")
    await cluster.client.patch(LLMDS, "undone", {"spec": {"engine": {"image": "two:2"}}}, "default")

    async def runs(image: str) -> bool:
        deployment = await cluster.get(DEPLOYMENTS, "undone")
        assert deployment is not None
        rolled = deployment.get("status", {}).get("observedGeneration") == deployment["metadata"]["generation"]
        images = {pod["spec"]["containers"][0]["image"] for pod in await cluster.pods("undone")}
        return rolled and images == {image}

    await cluster.until(lambda: runs("two:2"), "the new image")
    await cluster.kubectl("rollout", "undo", "deployment/undone")

    async def is_told(times: int) -> bool:
        return (await cluster.events("undone")).count("DriftRepaired") >= times

    await cluster.until(lambda: is_told(1), "an Event about the undo")
    await cluster.until(lambda: runs("two:2"), "the wanted image again")
    scale = {"spec": {"replicas": 4}}  # as a foreign autoscaler does
    await cluster.client.patch(DEPLOYMENTS, "undone", scale, "default", subresource="scale")

    async def is_scaled_back() -> bool:
        deployment = await cluster.get(DEPLOYMENTS, "undone")
        return deployment is not None and deployment["spec"]["replicas"] == 1 and len(await cluster.pods("undone")) == 1

    await cluster.until(is_scaled_back, "one replica again")
    events = (await cluster.client.list(EVENTS, "default"))["items"]
    said = [item["message"] for item in events if item["reason"] == "DriftRepaired" and "undone" in item["message"]]
    assert all("edit LLMDeployment undone instead" in message for message in said)
    assert any("kubectl" in message for message in said), "who did it is named"


async def test_a_pause_is_undone_and_copies_of_pods_are_no_replicas(cluster: OperatorCluster) -> None:
    """A paused Deployment kept every later change of the spec from being rolled out, and nothing said so."""
    await cluster.create({"engine": {"image": "one:1"}}, name="calm")
    await cluster.condition("Available", "True", name="calm")
    await cluster.client.patch(DEPLOYMENTS, "calm", {"spec": {"paused": True}}, "default")
    await cluster.client.patch(LLMDS, "calm", {"spec": {"engine": {"image": "two:2"}}}, "default")

    async def is_rolled_out() -> bool:
        images = {pod["spec"]["containers"][0]["image"] for pod in await cluster.pods("calm")}
        return images == {"two:2"} and (await cluster.llmd("calm"))["status"].get("ready") == "1/1"

    await cluster.until(is_rolled_out, "the new image")
    assert "DriftRepaired" in await cluster.events("calm")
    [pod] = await cluster.pods("calm")
    copied = {"name": "calm-debug", "labels": pod["metadata"]["labels"] | {"pod-template-hash": "none"}}
    container = {"name": "server", "image": "two:2"}
    await cluster.client.create(PODS, {"metadata": copied, "spec": {"containers": [container]}}, "default")

    async def both_run() -> bool:
        return [item.get("status", {}).get("phase") for item in await cluster.pods("calm")] == ["Running"] * 2

    await cluster.until(both_run, "the copy runs")
    await cluster.client.patch(LLMDS, "calm", {"spec": {"service": {"port": 81}}}, "default")
    await cluster.condition("Progressing", "False", name="calm")

    async def is_one() -> bool:
        status = (await cluster.llmd("calm"))["status"]
        return (status["ready"], status["replicas"], len(status["pods"])) == ("1/1", 1, 1)

    await cluster.until(is_one, "one replica, not the copy beside it")  # The row of the image before goes in its turn.
    await cluster.client.delete(PODS, "calm-debug", "default")


async def test_scales_out_on_need_and_in_after_the_window(cluster: OperatorCluster) -> None:
    await cluster.create({"autoscaling": {"maxReplicas": 4, "behavior": FAST}}, name="elastic")
    await cluster.condition("ScalingActive", "True", name="elastic")
    cluster.node.loads["elastic"] = {"used": 100, "waiting_blocks": 60, "running": 5, "waiting": 3}

    async def is_ready(wanted: int) -> bool:
        status = (await cluster.llmd("elastic"))["status"]
        return status.get("ready") == f"{wanted}/{wanted}" and len(await cluster.pods("elastic")) == wanted

    await cluster.until(lambda: is_ready(4), "four replicas")  # two full pods ask for more still
    busy = sorted(pod["metadata"]["name"] for pod in await cluster.pods("elastic"))[0]
    cluster.node.loads |= {"elastic": {}, busy: {"used": 5, "running": 1}}
    await cluster.until(lambda: is_ready(1), "one replica")
    assert [pod["metadata"]["name"] for pod in await cluster.pods("elastic")] == [busy], "the busiest pod stays"

    async def rows() -> bool:
        found = (await cluster.llmd("elastic"))["status"]["pods"]
        return [(row["name"], row["state"]) for row in found] == [(busy, "Ready")]

    await cluster.until(rows, "gone pods leave the table")
    status = (await cluster.llmd("elastic"))["status"]
    changes = [(item["from"], item["to"]) for item in status["autoscaling"]["decisions"]]
    assert (changes[0][0], changes[-1][1]) == (1, 1)
    assert status["autoscaling"]["lastScaleTime"] == status["autoscaling"]["decisions"][-1]["time"]
    assert {"ScaledUp", "ScaledDown"} <= set(await cluster.events("elastic"))


async def test_a_dry_run_decides_and_writes_nothing(cluster: OperatorCluster) -> None:
    cluster.node.loads["dry"] = {"used": 100, "waiting_blocks": 60}
    await cluster.create({"autoscaling": {"maxReplicas": 4, "mode": "DryRun"}}, name="dry")
    await cluster.condition("ScalingActive", "True", name="dry")

    async def desired() -> bool:
        return bool((await cluster.llmd("dry"))["status"]["autoscaling"]["desiredReplicas"] > 1)

    await cluster.until(desired, "a decision in status")
    assert (await cluster.llmd("dry"))["spec"]["replicas"] == 1
    await cluster.client.patch(LLMDS, "dry", {"spec": {"replicas": 2}}, "default", subresource="scale")

    async def followed() -> bool:
        return len(await cluster.pods("dry")) == 2

    await cluster.until(followed, "kubectl scale is obeyed")


async def test_a_crashing_model_is_degraded_with_its_message_and_others_are_served(cluster: OperatorCluster) -> None:
    cluster.node.crashes["broken"] = "model file /m does not exist"
    await cluster.create({}, name="broken")
    broken = await cluster.condition("Degraded", "True", name="broken", reason="ModelUnusable")
    assert "model file /m does not exist" in broken["message"]
    await cluster.create({}, name="fine")
    await cluster.condition("Available", "True", name="fine")
    found = await cluster.llmd("broken")
    assert (found["status"]["phase"], found["status"]["reason"]) == ("Degraded", "ModelUnusable")


async def test_a_template_that_the_api_refuses_is_explained_and_running_pods_stay(cluster: OperatorCluster) -> None:
    await cluster.create({}, name="templated")
    await cluster.condition("Available", "True", name="templated")
    before = [pod["metadata"]["name"] for pod in await cluster.pods("templated")]
    bad = {"spec": {"template": {"spec": {"nodeSelecter": {"a": "b"}}}}}
    await cluster.client.patch(LLMDS, "templated", bad, "default")
    refused = await cluster.condition("Degraded", "True", name="templated", reason="InvalidTemplate")
    assert "nodeSelecter" in refused["message"]
    assert [pod["metadata"]["name"] for pod in await cluster.pods("templated")] == before
    good = {"spec": {"template": {"spec": {"nodeSelecter": None, "priorityClassName": None}}}}
    await cluster.client.patch(LLMDS, "templated", good, "default")
    await cluster.condition("Degraded", "False", name="templated")


async def test_an_object_of_our_name_that_is_not_ours_is_never_touched(cluster: OperatorCluster) -> None:
    theirs = {
        "metadata": {"name": "taken", "namespace": "default"},
        "spec": {"ports": [{"port": 9}], "selector": {"app": "theirs"}},
    }
    created = await cluster.client.create(SERVICES, theirs, "default")
    await cluster.create({}, name="taken")
    conflict = await cluster.condition("Degraded", "True", name="taken", reason="NameConflict")
    assert "Service taken" in conflict["message"]
    assert await cluster.get(DEPLOYMENTS, "taken") is None
    same = await cluster.get(SERVICES, "taken")
    assert same is not None
    assert same["metadata"]["resourceVersion"] == created["metadata"]["resourceVersion"]
    await cluster.client.delete(SERVICES, "taken", "default")
    await cluster.condition("Available", "True", name="taken")


async def test_an_invalid_object_is_refused_with_the_field(cluster: OperatorCluster) -> None:
    with pytest.raises(ApiError, match=r"minReplicas must not be above"):
        await cluster.create({"autoscaling": {"minReplicas": 3, "maxReplicas": 2}}, name="invalid")


async def test_deletion_needs_no_operator_and_a_signal_ends_it(cluster: OperatorCluster) -> None:
    await cluster.create({}, name="leaving")
    await cluster.condition("Available", "True", name="leaving")
    assert await cluster.operator.stop() == 0
    await cluster.client.delete(LLMDS, "leaving", "default")

    async def gone() -> bool:
        left = await cluster.client.list(PODS, "default", labelSelector="pagefleet.dev/llmdeployment=leaving")
        return await cluster.get(DEPLOYMENTS, "leaving") is None and not left["items"]

    await cluster.until(gone, "children collected")
    await cluster.operator.start()


async def test_a_fight_over_a_child_is_reported_with_the_rival_and_stays_slow(cluster: OperatorCluster) -> None:
    await cluster.create({}, name="fought")
    await cluster.condition("Available", "True", name="fought")
    changes = 0

    async def contested() -> bool:
        nonlocal changes
        deployment = await cluster.get(DEPLOYMENTS, "fought")
        assert deployment is not None
        if deployment["spec"]["replicas"] == 1:
            await cluster.client.patch(DEPLOYMENTS, "fought", {"spec": {"replicas": 2}}, "default")
            changes += 1
        conditions = (await cluster.llmd("fought"))["status"]["conditions"]
        return any(item["reason"] == "FieldContested" for item in conditions)

    await cluster.until(contested, "FieldContested")
    assert changes <= 5, "a contested child is repaired at a slow pace"
    degraded = await cluster.condition("Degraded", "True", name="fought", reason="FieldContested")
    assert "pagefleet-local" in degraded["message"], "the other manager is named"
    await cluster.client.delete(LLMDS, "fought", "default")


async def test_a_failed_rollout_goes_back_and_a_changed_spec_goes_forward(cluster: OperatorCluster) -> None:
    await cluster.create({"replicas": 2, "engine": {"image": "good:1"}}, name="rolled")
    await cluster.condition("Available", "True", name="rolled")
    await cluster.condition("Progressing", "False", name="rolled")
    names = {pod["metadata"]["name"] for pod in await cluster.pods("rolled")}
    cluster.node.crashes["rolled"] = "unknown option --nonsense"
    change = {"spec": {"engine": {"image": "bad:2"}}}
    await cluster.client.patch(LLMDS, "rolled", change, "default")
    failed = await cluster.condition("Degraded", "True", name="rolled", reason="RolloutFailed")
    assert "unknown option --nonsense" in failed["message"]

    async def images() -> set[str]:
        return {pod["spec"]["containers"][0]["image"] for pod in await cluster.pods("rolled")}

    async def is_back() -> bool:
        return (
            await images() == {"good:1"} and {pod["metadata"]["name"] for pod in await cluster.pods("rolled")} == names
        )

    await cluster.until(is_back, "the replicas of before, untouched")
    del cluster.node.crashes["rolled"]
    await cluster.client.patch(LLMDS, "rolled", {"spec": {"engine": {"image": "fixed:3"}}}, "default")

    async def is_fixed() -> bool:
        return await images() == {"fixed:3"}

    await cluster.until(is_fixed, "the new template")
    await cluster.condition("Degraded", "False", name="rolled")
    assert "failedTemplateHash" not in (await cluster.llmd("rolled"))["status"]["rollout"]


async def test_children_that_a_spec_may_ask_for_come_and_go_with_it(cluster: OperatorCluster) -> None:
    model = {"source": "hf://acme/tiny", "cache": {"size": "1Gi"}}
    await cluster.create({"model": model, "networkPolicy": {"mode": "Restricted"}}, name="extra")
    await cluster.condition("Available", "True", name="extra")
    claim, policy = await cluster.get(CLAIMS, "extra"), await cluster.get(NETWORK_POLICIES, "extra")
    assert claim is not None
    assert policy is not None
    assert (claim["spec"]["accessModes"], claim["spec"]["resources"]["requests"]) == (
        ["ReadWriteMany"],
        {"storage": "1Gi"},
    )
    await cluster.client.create(CRDS, POD_MONITOR_CRD)

    async def exists(resource: Resource, wanted: bool) -> bool:
        return (await cluster.get(resource, "extra") is not None) is wanted

    await cluster.until(lambda: exists(POD_MONITORS, True), "a PodMonitor once the kind is there")
    await cluster.client.delete(NETWORK_POLICIES, "extra", "default")
    await cluster.until(lambda: exists(NETWORK_POLICIES, True), "a deleted policy comes back")
    off = {"monitoring": {"podMonitor": "Disabled"}, "networkPolicy": {"mode": "Disabled"}, "model": {"cache": None}}
    await cluster.client.patch(LLMDS, "extra", {"spec": off}, "default")
    await cluster.until(lambda: exists(POD_MONITORS, False), "no PodMonitor any more")
    await cluster.until(lambda: exists(NETWORK_POLICIES, False), "no policy any more")
    assert await cluster.get(CLAIMS, "extra") is not None, "data goes with its LLMDeployment only"
    await cluster.client.delete(LLMDS, "extra", "default")
    await cluster.until(lambda: exists(CLAIMS, False), "the claim is collected")


async def test_a_download_is_shown_in_status(cluster: OperatorCluster) -> None:
    cluster.node.downloads["fetching"] = (42, 100)
    await cluster.create({"model": {"source": "hf://acme/tiny"}}, name="fetching")
    progressing = await cluster.condition("Progressing", "True", name="fetching", reason="Downloading")
    assert progressing["message"] == "0 of 1 replicas are ready, 1 download the model: 42 %"
    (row,) = (await cluster.llmd("fetching"))["status"]["pods"]
    assert (row["state"], row["progress"]) == ("Starting", "Downloading 42 %")
    cluster.node.downloads["fetching"] = (100, 100)
    await cluster.condition("Available", "True", name="fetching")

    async def over() -> bool:
        return "progress" not in (await cluster.llmd("fetching"))["status"]["pods"][0]

    await cluster.until(over, "no progress any more")


async def test_a_claim_of_one_node_is_refused_for_two_pods_with_the_reason(cluster: OperatorCluster) -> None:
    claim = {
        "metadata": {"name": "single"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    await cluster.client.create(CLAIMS, claim, "default")
    model = {"source": "hf://acme/tiny", "cache": {"claimName": "single"}}
    await cluster.create({"model": model, "replicas": 1}, name="alone")
    refused = await cluster.condition("Degraded", "True", name="alone", reason="CacheNotShared")
    assert "up to 2 replicas (rollout.maxSurge included)" in refused["message"]
    assert await cluster.pods("alone") == []
    await cluster.client.patch(LLMDS, "alone", {"spec": {"rollout": {"maxSurge": 0, "maxUnavailable": 1}}}, "default")
    await cluster.condition("Available", "True", name="alone")
    own = {"source": "hf://acme/tiny", "cache": {"size": "1Gi", "accessModes": ["ReadWriteOnce"]}}
    with pytest.raises(ApiError, match=r"accessModes must hold ReadWriteMany: more than one replica"):
        await cluster.create({"model": own}, name="refused")


async def test_the_role_grants_what_was_used_and_nothing_else(
    cluster: OperatorCluster, request: pytest.FixtureRequest
) -> None:
    """Last in this file: it looks at every request of the tests before it."""
    documents = list(yaml.safe_load_all((ROOT / "manifests" / "base" / "rbac.yaml").read_text()))
    (role,) = [item for item in documents if item["kind"] == "Role"]
    granted = granted_by(role)
    paths = {
        seen.path.partition("/llmdeployments/")[2] for seen in cluster.proxy.writes() if "/llmdeployments/" in seen.path
    }
    assert {path.partition("/")[2] for path in paths} == {"status", "scale"}, "no finalizer, no annotation, ever"
    assert [seen for seen in cluster.proxy.seen if seen.is_unguarded] == [], "what comes late would not be refused"
    used = {found for seen in cluster.proxy.seen if (found := seen.permission) is not None}
    assert used <= granted
    everything = {name for name in globals() if name.startswith("test_")}
    if not everything <= {item.name for item in request.session.items}:
        pytest.skip("only a part of this file's tests ran, so not every right was used")
    # An apply of something new is also a create; blockOwnerDeletion needs `finalizers`, which no request names.
    applied = {"serviceaccounts", "services", "poddisruptionbudgets", "deployments"}
    applied |= {"persistentvolumeclaims", "networkpolicies", "podmonitors"}
    implied = {(group, resource, "create") for group, resource, _ in used if resource in applied}
    implied.add(("pagefleet.dev", "llmdeployments/finalizers", "update"))
    assert granted <= used | implied
    assert not {"secrets", "pods/exec"} & {resource for _, resource, _ in granted}
