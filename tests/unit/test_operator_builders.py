"""What goes into the children."""

from typing import Any

import pytest

from pagefleet_operator import builders
from pagefleet_operator.builders import deployment, disruption_budget, service, service_account
from pagefleet_operator.names import selector
from pagefleet_operator.settings import ChildSettings
from support.operator_objects import llmd

SETTINGS = ChildSettings(server_image="registry/pagefleet-server:1")


def container(**spec: Any) -> dict[str, Any]:
    manifest = deployment(llmd(spec=spec), SETTINGS, replicas=1)
    (only,) = manifest["spec"]["template"]["spec"]["containers"]
    found: dict[str, Any] = only
    return found


def test_smallest_spec_gives_this_container() -> None:
    assert container() == {
        "name": "server",
        "image": "registry/pagefleet-server:1",
        "command": ["pagefleet-server"],
        "args": [
            *("--model", "/models/tiny.gguf", "--served-model-name", "chat"),
            *("--drain-delay", "10", "--drain-timeout", "300"),
        ],
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "TMPDIR", "value": "/var/cache/pagefleet"},
        ],
        "volumeMounts": [{"name": "scratch", "mountPath": "/var/cache/pagefleet"}],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "ports": [{"name": "http", "containerPort": 8000, "protocol": "TCP"}],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "startupProbe": {
            "httpGet": {"path": "/startupz", "port": "http", "scheme": "HTTP"},
            "periodSeconds": 2,
            "timeoutSeconds": 2,
            "failureThreshold": 900,
        },
        "livenessProbe": {
            "httpGet": {"path": "/livez", "port": "http", "scheme": "HTTP"},
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 3,
        },
        "readinessProbe": {
            "httpGet": {"path": "/readyz", "port": "http", "scheme": "HTTP"},
            "periodSeconds": 2,
            "timeoutSeconds": 2,
            "failureThreshold": 2,
        },
    }


@pytest.mark.parametrize(("count", "want"), [(1, []), (4, ["--tensor-parallel-size", "4"])])
def test_several_devices_hold_the_model_together(count: int, want: list[str]) -> None:
    """Devices beyond the first would be reserved and left idle."""
    args = container(engine={"accelerator": {"resourceName": "nvidia.com/gpu", "count": count}})["args"]
    assert [word for word in args if word in ("--tensor-parallel-size", "4")] == want


def test_every_engine_field_reaches_the_command_line_and_the_users_own_come_last() -> None:
    built = container(
        engine={
            "image": "mine:2",
            "kvCacheMemory": "32Mi",
            "gpuMemoryUtilizationPercent": 85,
            "blockSize": 32,
            "prefixCaching": False,
            "maxNumBatchedTokens": 256,
            "maxNumSeqs": 8,
            "maxQueueLength": 64,
            "args": ["--threads", "1"],
            "env": [{"name": "A", "value": "1"}],
        },
        drain={"delaySeconds": 2, "timeoutSeconds": 30},
        model={"source": "file:///m/x", "servedName": "name", "dtype": "float16", "maxModelLen": 4096},
    )
    assert built["image"] == "mine:2"
    assert built["args"] == [
        *("--model", "/m/x", "--served-model-name", "name", "--dtype", "float16", "--max-model-len", "4096"),
        *("--gpu-memory-utilization", "0.85", "--block-size", "32", "--no-prefix-caching"),
        *("--max-num-batched-tokens", "256"),
        *("--kv-cache-memory", "32MiB", "--max-num-seqs", "8", "--max-queue", "64"),
        *("--drain-delay", "2", "--drain-timeout", "30"),
        *("--threads", "1"),
    ]
    assert built["env"][-1] == {"name": "A", "value": "1"}


def test_the_operator_never_says_where_to_listen() -> None:
    built = container(engine={"maxNumSeqs": 1})
    assert not any("host" in text for text in built["args"])
    assert not any("HOST" in item["name"] for item in built["env"])


def test_resources_are_passed_on_only_when_given() -> None:
    assert "resources" not in container()
    wanted = {"requests": {"cpu": 1, "memory": "1Gi"}, "limits": {"memory": "2Gi"}}
    assert container(resources=wanted)["resources"] == wanted


def test_a_model_in_a_claim_is_mounted_read_only() -> None:
    manifest = deployment(llmd(spec={"model": {"source": "pvc://models/llama/8b"}}), SETTINGS, replicas=1)
    pod = manifest["spec"]["template"]["spec"]
    assert {"name": "model", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}} in pod["volumes"]
    server = pod["containers"][0]
    assert {"name": "model", "mountPath": "/var/lib/pagefleet/model", "readOnly": True} in server["volumeMounts"]
    assert server["args"][:2] == ["--model", "/var/lib/pagefleet/model/llama/8b"]


def test_devices_are_requested_tolerated_and_given_shared_memory() -> None:
    spec = {
        "engine": {"accelerator": {"resourceName": "nvidia.com/gpu", "count": 2}},
        "resources": {"limits": {"memory": "64Gi"}},
    }
    pod = deployment(llmd(spec=spec), SETTINGS, replicas=1)["spec"]["template"]["spec"]
    server = pod["containers"][0]
    assert server["resources"] == {
        "limits": {"memory": "64Gi", "nvidia.com/gpu": "2"},
        "requests": {"nvidia.com/gpu": "2"},
    }
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert {"name": "shared-memory", "mountPath": "/dev/shm"} in server["volumeMounts"]


def test_without_devices_there_is_none_of_it() -> None:
    pod = deployment(llmd(), SETTINGS, replicas=1)["spec"]["template"]["spec"]
    assert "tolerations" not in pod
    assert [volume["name"] for volume in pod["volumes"]] == ["scratch"]


def test_the_grace_period_holds_the_whole_drain() -> None:
    pod = deployment(llmd(spec={"drain": {"delaySeconds": 5, "timeoutSeconds": 60}}), SETTINGS, replicas=1)
    grace = pod["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace == 5 + 60 + SETTINGS.grace_margin_seconds


def test_rollouts_add_before_they_take_away() -> None:
    spec = deployment(llmd(spec={"startup": {"timeoutSeconds": 100}}), SETTINGS, replicas=3)["spec"]
    assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert spec["replicas"] == 3
    assert spec["progressDeadlineSeconds"] > 100


@pytest.mark.parametrize(
    "manifest",
    [service_account(llmd()), service(llmd()), disruption_budget(llmd()), deployment(llmd(), SETTINGS, replicas=1)],
    ids=lambda item: item["kind"],
)
def test_children_are_ours_and_collected_with_their_owner(manifest: dict[str, Any]) -> None:
    metadata = manifest["metadata"]
    assert (metadata["name"], metadata["namespace"]) == ("chat", "default")
    assert metadata["labels"] == {
        "app.kubernetes.io/name": "pagefleet-server",
        "app.kubernetes.io/instance": "chat",
        "app.kubernetes.io/managed-by": "pagefleet-operator",
        "pagefleet.dev/llmdeployment": "chat",
    }
    assert metadata["ownerReferences"] == [
        {
            "apiVersion": "pagefleet.dev/v1alpha1",
            "kind": "LLMDeployment",
            "name": "chat",
            "uid": "uid-1",
            "controller": True,
            "blockOwnerDeletion": True,
        }
    ]


def test_the_service_is_as_asked_for() -> None:
    spec = service(llmd(spec={"service": {"type": "NodePort", "port": 8080}}))["spec"]
    assert (spec["type"], spec["ports"][0]["port"]) == ("NodePort", 8080)


def test_the_budget_never_keeps_broken_pods() -> None:
    spec = disruption_budget(llmd(spec={"disruptionBudget": {"maxUnavailable": 2}}))["spec"]
    assert (spec["maxUnavailable"], spec["unhealthyPodEvictionPolicy"]) == (2, "AlwaysAllow")


def test_pods_have_no_rights_and_no_root() -> None:
    pod = deployment(llmd(), SETTINGS, replicas=1)["spec"]["template"]["spec"]
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == ("chat", False)
    assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert service_account(llmd())["automountServiceAccountToken"] is False


def test_replicas_are_spread_over_nodes_where_that_is_possible() -> None:
    made = deployment(llmd(), SETTINGS, replicas=2)["spec"]
    (spread,) = made["template"]["spec"]["topologySpreadConstraints"]
    assert (spread["topologyKey"], spread["maxSkew"]) == ("kubernetes.io/hostname", 1)
    assert spread["whenUnsatisfiable"] == "ScheduleAnyway"
    assert spread["labelSelector"] == made["selector"]


def test_the_service_selects_what_the_deployment_runs() -> None:
    selector = service(llmd())["spec"]["selector"]
    spec = deployment(llmd(), SETTINGS, replicas=1)["spec"]
    assert selector == spec["selector"]["matchLabels"]
    assert selector.items() <= spec["template"]["metadata"]["labels"].items()


def volumes_of(pod: dict[str, Any]) -> dict[str, Any]:
    return {item["name"]: item for item in pod["volumes"]}


def test_a_model_of_a_hub_is_named_with_its_revision_and_kept_in_the_claim() -> None:
    model = {
        "source": "hf://acme/tiny/sub/q4.gguf",
        "revision": "v1",
        "tokenSecretRef": {"name": "hub", "key": "token"},
        "cache": {"size": "10Gi", "storageClassName": "fast"},
    }
    made = llmd(spec={"model": model})
    pod = builders.deployment(made, SETTINGS, replicas=1)["spec"]["template"]["spec"]
    server = pod["containers"][0]
    assert server["args"][:2] == ["--model", "hf://acme/tiny@v1/sub/q4.gguf"]
    assert server["args"][4:6] == ["--download-dir", "/var/lib/pagefleet/models"]
    token = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
    assert token in server["env"]
    assert volumes_of(pod)["model-cache"]["persistentVolumeClaim"] == {"claimName": "chat"}
    assert {"name": "model-cache", "mountPath": "/var/lib/pagefleet/models"} in server["volumeMounts"]
    assert pod["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
    cache = made.spec.cache
    assert cache is not None
    assert builders.cache_claim(made, cache)["spec"] == {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "10Gi"}},
        "storageClassName": "fast",
    }


def test_without_a_cache_every_replica_downloads_to_its_scratch_folder() -> None:
    pod = builders.deployment(llmd(spec={"model": {"source": "hf://acme/tiny"}}), SETTINGS, replicas=1)
    spec = pod["spec"]["template"]["spec"]
    args = spec["containers"][0]["args"]
    assert args[1] == "hf://acme/tiny"
    assert args[args.index("--download-dir") + 1].startswith("/var/cache/pagefleet/")
    assert "fsGroup" not in spec["securityContext"]


def test_keys_are_mounted_and_never_read() -> None:
    spec = {"auth": {"apiKeysSecretRef": {"name": "keys", "key": "all"}}}
    pod = builders.deployment(llmd(spec=spec), SETTINGS, replicas=1)["spec"]["template"]["spec"]
    args = pod["containers"][0]["args"]
    assert args[args.index("--api-key-file") + 1] == "/etc/pagefleet/auth/api-keys"
    want = {"secretName": "keys", "items": [{"key": "all", "path": "api-keys"}]}
    assert volumes_of(pod)["api-keys"]["secret"] == want


def admitted(policy: dict[str, Any]) -> list[Any]:
    found: list[Any] = policy["spec"]["ingress"][0]["from"]
    return found


def test_a_policy_admits_the_own_namespace_the_operator_monitoring_and_who_is_named() -> None:
    made = llmd(spec={"networkPolicy": {"mode": "Restricted", "namespaces": ["gateway"]}})
    settings = ChildSettings(server_image="img", monitoring_namespace="prom", operator_namespace="ops")
    policy = builders.network_policy(made, settings)

    def of(name: str) -> dict[str, Any]:
        return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}

    operator = {**of("ops"), "podSelector": {"matchLabels": {"app.kubernetes.io/name": "pagefleet-operator"}}}
    assert admitted(policy) == [{"podSelector": {}}, operator, of("gateway"), of("prom")]
    assert policy["spec"]["ingress"][0]["ports"] == [{"protocol": "TCP", "port": 8000}]
    assert len(policy["spec"]["ingress"]) == 1
    assert policy["spec"]["policyTypes"] == ["Ingress"]


def test_a_policy_leaves_the_other_ports_of_a_sidecars_pod_open() -> None:
    template = {"spec": {"containers": [{"name": "app", "image": "a"}]}}
    spec = {"networkPolicy": {"mode": "Restricted"}, "placement": "Sidecar", "template": template}
    rules = builders.network_policy(llmd(spec=spec), SETTINGS)["spec"]["ingress"]
    assert "from" not in rules[1]
    open_ports = [range(item["port"], item["endPort"] + 1) for item in rules[1]["ports"] if item["protocol"] == "TCP"]
    assert not any(8000 in ports for ports in open_ports)
    assert all(any(port in ports for ports in open_ports) for port in (1, 7999, 8001, 65535))


def test_monitors_select_the_replicas_by_their_port() -> None:
    spec = builders.pod_monitor(llmd())["spec"]
    assert spec["selector"] == {"matchLabels": selector("chat")}
    assert spec["podMetricsEndpoints"][0]["port"] == "http"
