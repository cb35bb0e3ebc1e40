"""Pods, Deployments, Services, budgets and quotas at the API; what controllers do with them has its own tests."""

import secrets

import pytest

from support.localapi import TABLE, Api, Json, deployment, llmd, pod


def _core(namespace: str, plural: str) -> str:
    return f"/api/v1/namespaces/{namespace}/{plural}"


def _deployments(namespace: str) -> str:
    return f"/apis/apps/v1/namespaces/{namespace}/deployments"


@pytest.mark.recorded("workload/create")
async def test_a_deployment_gets_its_defaults(api: Api, namespace: str) -> None:
    spec = (await api.post(_deployments(namespace), deployment("d", replicas=0))).ok()["spec"]
    assert spec["strategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": "25%", "maxUnavailable": "25%"}}
    assert (spec["revisionHistoryLimit"], spec["progressDeadlineSeconds"]) == (10, 600)
    container = spec["template"]["spec"]["containers"][0]
    assert (container["imagePullPolicy"], container["terminationMessagePath"]) == (
        "IfNotPresent",
        "/dev/termination-log",
    )


async def test_recreate_takes_no_rolling_update(api: Api, namespace: str) -> None:
    body = deployment("d", replicas=0, strategy={"type": "Recreate"})
    assert (await api.post(_deployments(namespace), body)).ok()["spec"]["strategy"] == {"type": "Recreate"}


@pytest.mark.parametrize("field", ["labels", "annotations"])
async def test_a_template_takes_no_keys_that_its_pods_could_not_have(api: Api, namespace: str, field: str) -> None:
    """It was taken, and the ReplicaSet controller failed for ever."""
    body = deployment("d", replicas=0)
    body["spec"]["template"]["metadata"].setdefault(field, {})["bad key!"] = "v"
    answer = await api.post(_deployments(namespace), body)
    assert f'spec.template.{field}: Invalid value: "bad key!": name part must consist of' in answer.message(422)


async def test_recreate_and_a_rolling_update_exclude_each_other(api: Api, namespace: str) -> None:
    strategy = {"type": "Recreate", "rollingUpdate": {"maxSurge": 1}}
    answer = await api.post(_deployments(namespace), deployment("d", strategy=strategy))
    assert answer.message(422).endswith(
        "spec.strategy.rollingUpdate: Forbidden: may not be specified when strategy `type` is 'Recreate'"
    )


async def test_quantities_and_zeros_have_one_form(api: Api, namespace: str) -> None:
    body = deployment("d", replicas=0, minReadySeconds=0)
    container = body["spec"]["template"]["spec"]["containers"][0]
    container["resources"] = {"limits": {"cpu": "1000m", "memory": "1024Mi"}, "requests": {"cpu": 0.5}}
    spec = (await api.post(_deployments(namespace), body)).ok()["spec"]
    assert spec["template"]["spec"]["containers"][0]["resources"] == {
        "limits": {"cpu": "1", "memory": "1Gi"},
        "requests": {"cpu": "500m"},
    }
    assert spec["replicas"] == 0
    assert "minReadySeconds" not in spec


@pytest.mark.recorded("workload/invalid pod template")
async def test_an_invalid_template_names_the_field(api: Api, namespace: str) -> None:
    body = deployment("d")
    body["spec"]["template"]["spec"]["containers"].append({"name": "server", "image": "x"})
    body["spec"]["template"]["spec"]["containers"][0]["volumeMounts"] = [{"name": "none", "mountPath": "/m"}]
    answer = await api.post(_deployments(namespace), body)
    answer.message(422)
    fields = [cause["field"] for cause in answer.body["details"]["causes"]]
    assert any(field.startswith("spec.template.spec.containers[1].name") for field in fields)


@pytest.mark.recorded("workload/deployment scale", "status_scale/patch scale", "status_scale/scale below minimum")
async def test_scale_reads_and_writes_the_count(api: Api, namespace: str) -> None:
    objects = f"/apis/pagefleet.dev/v1alpha1/namespaces/{namespace}/llmdeployments"
    path = f"{objects}/d"
    (await api.post(objects, llmd("d", replicas=0))).ok()
    (await api.patch(f"{path}/status", {"status": {"replicas": 0, "selector": "app=d"}})).ok()
    scale = (await api.get(f"{path}/scale")).ok()
    assert (scale["kind"], scale["apiVersion"]) == ("Scale", "autoscaling/v1")
    assert scale["status"]["selector"] == "app=d"
    scale["spec"] = {"replicas": 2}
    assert (await api.put(f"{path}/scale", scale)).ok()["spec"] == {"replicas": 2}
    assert (await api.get(path)).ok()["spec"]["replicas"] == 2
    stale = await api.put(f"{path}/scale", scale | {"spec": {"replicas": 3}})
    assert "the object has been modified" in stale.message(409)
    assert (await api.patch(f"{path}/scale", {"spec": {"replicas": -1}})).status == 422
    assert (await api.get(f"{path}/scale", accept=TABLE)).status in (200, 406)


@pytest.mark.parametrize(
    ("change", "field", "text"),
    [
        (
            {"strategy": {"rollingUpdate": {"maxSurge": "some"}}},
            "spec.strategy.rollingUpdate.maxSurge",
            "valid percent",
        ),
        ({"strategy": {"rollingUpdate": {"maxSurge": -1}}}, "spec.strategy.rollingUpdate.maxSurge", "greater than or"),
        (
            {"strategy": {"rollingUpdate": {"maxSurge": "0%", "maxUnavailable": 0}}},
            "spec.strategy.rollingUpdate.maxUnavailable",
            "may not be 0 when `maxSurge` is 0",
        ),
        ({"replicas": -1}, "spec.replicas", "must be greater than or equal to 0"),
    ],
)
async def test_a_deployment_that_cannot_roll_is_refused(
    api: Api, namespace: str, change: Json, field: str, text: str
) -> None:
    answer = await api.post(_deployments(namespace), deployment("d", **change))
    assert text in answer.message(422)
    assert [cause["field"] for cause in answer.body["details"]["causes"]] == [field]


@pytest.mark.parametrize(
    ("container", "code", "text"),
    [
        (
            {"name": "Not_A_Label"},
            422,
            'spec.containers[0].name: Invalid value: "Not_A_Label": a lowercase RFC 1123 label',
        ),
        (
            {"ports": [{"containerPort": 70000}]},
            422,
            "ports[0].containerPort: Invalid value: 70000: must be between 1 and",
        ),
        ({"image": ""}, 422, "spec.containers[0].image: Required value"),
        ({"resources": {"limits": {"cpu": "lots"}}}, 400, "quantities must match the regular expression"),
    ],
)
async def test_a_pod_that_cannot_run_is_refused(
    api: Api, namespace: str, container: Json, code: int, text: str
) -> None:
    body = pod("p")
    body["spec"]["containers"][0] |= container
    assert text in (await api.post(_core(namespace, "pods"), body)).message(code)


async def test_a_name_may_stand_twice_in_env(api: Api, namespace: str) -> None:
    """Once every keyed list had to be unique; Kubernetes asks it of containers, volumes and mounts only."""
    body = pod("p", schedulerName="nobody")
    body["spec"]["containers"][0]["env"] = [{"name": "X", "value": "1"}, {"name": "X", "value": "2"}]
    (await api.post(_core(namespace, "pods"), body)).ok()


async def test_a_budget_counts_one_way_only(api: Api, namespace: str) -> None:
    path = f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets"
    spec = {"selector": {"matchLabels": {"a": "b"}}, "minAvailable": 1, "maxUnavailable": 1}
    answer = await api.post(path, {"metadata": {"name": "b"}, "spec": spec})
    assert "cannot be both set" in answer.message(422)
    spec = {"selector": {"matchLabels": {"a": "b"}}, "minAvailable": "half"}
    assert "valid percent string" in (await api.post(path, {"metadata": {"name": "b"}, "spec": spec})).message(422)


async def test_a_pod_is_bound_once(api: Api, namespace: str, node: str) -> None:
    (await api.post(_core(namespace, "pods"), pod("p", schedulerName="nobody"))).ok()
    binding = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": "p"},
        "target": {"kind": "Node", "name": node},
    }
    path = f"{_core(namespace, 'pods')}/p"
    (await api.post(f"{path}/binding", binding)).ok()
    bound = (await api.get(path)).ok()
    assert bound["spec"]["nodeName"] == node
    assert [c["type"] for c in bound["status"]["conditions"] if c["status"] == "True"] == ["PodScheduled"]
    missing = await api.post(f"{path}/binding", {"metadata": {"name": "p"}})
    assert missing.message(500) == "target.name: Required value"
    again = await api.post(f"{path}/binding", binding)
    assert f'is already assigned to node "{node}"' in again.message(409)


async def test_a_new_node_takes_no_pods_before_it_is_ready(api: Api) -> None:
    name = f"contract-{secrets.token_hex(4)}"
    created = (await api.post("/api/v1/nodes", {"metadata": {"name": name}})).ok()
    assert created["spec"]["taints"] == [{"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"}]
    path = f"/api/v1/nodes/{name}"
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": ""}
    (await api.patch(f"{path}/status", {"status": {"conditions": [ready]}})).ok()
    await api.until(lambda: api.get(path), lambda answer: not answer.body["spec"].get("taints"))
    (await api.delete(path)).ok()


async def test_the_spec_of_a_pod_is_fixed_but_for_its_image(api: Api, namespace: str) -> None:
    path = f"{_core(namespace, 'pods')}/p"
    (await api.post(_core(namespace, "pods"), pod("p", schedulerName="nobody"))).ok()
    changed = await api.patch(path, [{"op": "replace", "path": "/spec/containers/0/image", "value": "img:2"}],
                              "application/json-patch+json")  # fmt: skip
    assert changed.ok()["spec"]["containers"][0]["image"] == "img:2"
    refused = await api.patch(path, {"spec": {"hostname": "other"}})
    assert "spec: Forbidden: pod updates may not change fields other than" in refused.message(422)


@pytest.mark.recorded("workload/service")
async def test_a_service_gets_an_address_for_good(api: Api, namespace: str) -> None:
    body = {"metadata": {"name": "s"}, "spec": {"selector": {"a": "b"}, "ports": [{"port": 80, "targetPort": "http"}]}}
    created = (await api.post(_core(namespace, "services"), body)).ok()
    address = created["spec"]["clusterIP"]
    assert created["spec"]["clusterIPs"] == [address]
    assert created["spec"]["ports"] == [{"protocol": "TCP", "port": 80, "targetPort": "http"}]
    path = f"{_core(namespace, 'services')}/s"
    replaced = (await api.put(path, body)).ok()
    assert replaced["spec"]["clusterIP"] == address
    assert (await api.patch(path, {"spec": {"clusterIP": "127.96.255.1"}})).status == 422
    headless = {"metadata": {"name": "h"}, "spec": {"clusterIP": "None", "selector": {"a": "b"}}}
    assert (await api.post(_core(namespace, "services"), headless)).ok()["spec"]["clusterIPs"] == ["None"]


async def test_ports_of_a_service_need_names_when_there_are_several(api: Api, namespace: str) -> None:
    body = {"metadata": {"name": "s"}, "spec": {"ports": [{"port": 80}, {"port": 81}]}}
    message = (await api.post(_core(namespace, "services"), body)).message(422)
    assert "spec.ports[0].name: Required value" in message


async def test_an_eviction_spends_the_budget_and_is_refused_without(api: Api, namespace: str, node: str) -> None:
    budgets = f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets"
    for name in ("one", "two"):
        body = pod(name, node=node)
        body["metadata"]["labels"] = {"app": "x"}
        (await api.post(_core(namespace, "pods"), body)).ok()
        ready = {"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}}
        (await api.patch(f"{_core(namespace, 'pods')}/{name}/status", ready)).ok()
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": {"app": "x"}}}
    (await api.post(budgets, {"metadata": {"name": "b"}, "spec": spec})).ok()
    await api.until(lambda: api.get(f"{budgets}/b"), lambda a: a.body["status"]["disruptionsAllowed"] == 1)

    async def evict(name: str) -> Json:
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
        answer = await api.post(f"{_core(namespace, 'pods')}/{name}/eviction", eviction)
        found: Json = answer.body
        return found

    assert (await evict("one"))["code"] == 201
    refused = await evict("two")
    assert refused["code"] == 429
    assert refused["message"] == "Cannot evict pod as it would violate the pod's disruption budget."
    assert refused["details"]["causes"][0]["reason"] == "DisruptionBudget"


async def test_a_quota_refuses_the_pod_that_exceeds_it(api: Api, namespace: str) -> None:
    hard = {"requests.nvidia.com/gpu": "1"}
    (await api.post(_core(namespace, "resourcequotas"), {"metadata": {"name": "q"}, "spec": {"hard": hard}})).ok()

    def gpu(name: str) -> Json:
        body = pod(name, schedulerName="nobody")
        body["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": 1}}
        return body

    quota = f"{_core(namespace, 'resourcequotas')}/q"
    await api.until(lambda: api.get(quota), lambda a: a.body["status"].get("used") == {"requests.nvidia.com/gpu": "0"})
    (await api.post(_core(namespace, "pods"), gpu("one"))).ok()
    await api.until(lambda: api.get(quota), lambda a: a.body["status"]["used"] == {"requests.nvidia.com/gpu": "1"})
    answer = await api.until(  # a real server learns of the used amount a moment after it was stored
        lambda: api.post(_core(namespace, "pods"), gpu("two"), dryRun="All"), lambda answer: answer.status == 403
    )
    assert answer.message(403) == (
        'pods "two" is forbidden: exceeded quota: q, requested: requests.nvidia.com/gpu=1, '
        "used: requests.nvidia.com/gpu=1, limited: requests.nvidia.com/gpu=1"
    )
    (await api.post(_core(namespace, "pods"), pod("three", schedulerName="nobody"))).ok()


@pytest.mark.recorded("lease_events_rbac/event (core/v1)")
async def test_events_are_found_by_what_they_are_about(api: Api, namespace: str) -> None:
    about = {"kind": "Pod", "name": "p", "namespace": namespace}
    event = {"metadata": {"name": "e"}, "involvedObject": about, "reason": "R", "message": "m", "type": "Normal"}
    (await api.post(_core(namespace, "events"), event)).ok()
    found = (await api.get(_core(namespace, "events"), fieldSelector="involvedObject.name=p,reason=R")).ok()
    assert len(found["items"]) == 1
    found = (await api.get(_core(namespace, "events"), fieldSelector="involvedObject.name=other")).ok()
    assert found["items"] == []


@pytest.mark.recorded("lease_events_rbac/create lease", "lease_events_rbac/renew")
async def test_a_lease_is_taken_by_one(api: Api, namespace: str) -> None:
    path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
    lease = (await api.post(path, {"metadata": {"name": "l"}, "spec": {"holderIdentity": "a"}})).ok()
    taken = lease | {"spec": {"holderIdentity": "b", "renewTime": "2026-01-01T00:00:00.123456Z"}}
    assert (await api.put(f"{path}/l", taken)).ok()["spec"]["renewTime"] == "2026-01-01T00:00:00.123456Z"
    assert (await api.put(f"{path}/l", lease | {"spec": {"holderIdentity": "c"}})).status == 409
