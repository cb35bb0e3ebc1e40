"""The user's additions to the pod: what merges how, and what is refused."""

from typing import Any

import pytest

from pagefleet_operator.builders import deployment, service
from pagefleet_operator.errors import SpecError
from pagefleet_operator.parsing import parse
from pagefleet_operator.settings import ChildSettings
from support.operator_objects import llmd, llmd_body

SETTINGS = ChildSettings(server_image="img")


def pod(template: dict[str, Any], **spec: Any) -> dict[str, Any]:
    manifest = deployment(llmd(spec={"template": template, **spec}), SETTINGS, replicas=1)
    found: dict[str, Any] = manifest["spec"]["template"]
    return found


def server(template: dict[str, Any], **spec: Any) -> dict[str, Any]:
    found: dict[str, Any] = pod(template, **spec)["spec"]["containers"][0]
    return found


def test_plain_fields_are_added_and_ours_stay() -> None:
    made = pod(
        {
            "metadata": {"labels": {"team": "x"}, "annotations": {"a": "b"}},
            "spec": {"nodeSelector": {"gpu": "h200"}, "priorityClassName": "high", "serviceAccountName": "mine"},
        }
    )
    assert made["metadata"]["labels"]["team"] == "x"
    assert made["metadata"]["labels"]["pagefleet.dev/llmdeployment"] == "chat"
    assert made["metadata"]["annotations"] == {"a": "b"}
    assert made["spec"]["nodeSelector"] == {"gpu": "h200"}
    assert made["spec"]["serviceAccountName"] == "mine"
    assert made["spec"]["terminationGracePeriodSeconds"] == 325


def test_the_server_takes_mounts_and_variables_by_key() -> None:
    made = server(
        {
            "spec": {
                "volumes": [{"name": "weights", "hostPath": {"path": "/weights"}}],
                "containers": [
                    {
                        "name": "server",
                        "env": [{"name": "A", "value": "1"}],
                        "volumeMounts": [{"name": "weights", "mountPath": "/weights"}],
                        "securityContext": {"runAsUser": 1000},
                    }
                ],
            }
        }
    )
    assert [item["name"] for item in made["env"]] == ["POD_IP", "TMPDIR", "A"]
    assert [item["mountPath"] for item in made["volumeMounts"]] == ["/var/cache/pagefleet", "/weights"]
    assert made["securityContext"]["runAsUser"] == 1000
    assert made["securityContext"]["readOnlyRootFilesystem"] is True
    assert made["command"] == ["pagefleet-server"]


def test_containers_beside_the_server_learn_where_it_is() -> None:
    made = pod({"spec": {"containers": [{"name": "app", "image": "app:1", "env": [{"name": "X", "value": "1"}]}]}})
    ours, app = made["spec"]["containers"]
    assert ours["name"] == "server"
    assert [item["name"] for item in app["env"]] == ["POD_IP", "PAGEFLEET_BASE_URL", "X"]
    assert app["env"][1]["value"] == "http://$(POD_IP):8000/v1"
    assert not any(item["name"] == "PAGEFLEET_BASE_URL" for item in ours["env"])


def test_tolerations_are_added_and_other_lists_replaced() -> None:
    mine = {"key": "spot", "operator": "Exists"}
    made = pod(
        {"spec": {"tolerations": [mine], "topologySpreadConstraints": []}},
        engine={"accelerator": {"resourceName": "nvidia.com/gpu"}},
    )["spec"]
    assert [item["key"] for item in made["tolerations"]] == ["nvidia.com/gpu", "spot"]
    assert made["topologySpreadConstraints"] == []


@pytest.mark.parametrize(
    ("template", "want"),
    [
        ({"spec": {"containers": [{"name": "server", "command": ["sh"]}]}}, r"containers\[0\]\.command"),
        ({"spec": {"containers": [{"name": "server", "readinessProbe": {}}]}}, r"readinessProbe"),
        ({"spec": {"containers": [{"image": "x"}]}}, r"containers\[0\]\.name: is required"),
        ({"spec": {"containers": {}}}, r"containers: must be a list"),
        ({"spec": {"terminationGracePeriodSeconds": 1}}, r"terminationGracePeriodSeconds"),
        ({"spec": {"volumes": [{"$patch": "delete", "name": "scratch"}]}}, r"volumes\[0\]\.\$patch"),
        ({"metadata": {"labels": {"app.kubernetes.io/name": "x"}}}, r"labels\.app\.kubernetes\.io/name"),
        ({"metadata": {"labels": []}}, r"spec\.template"),
        ({"metadata": {"name": "x"}}, r"metadata\.name"),
        ({"replicas": 3}, r"template\.replicas"),
        ([1], r"spec\.template: must be an object"),
    ],
)
def test_what_the_operator_relies_on_cannot_be_changed(template: Any, want: str) -> None:
    with pytest.raises(SpecError, match=want):
        parse(llmd_body(spec={"template": template}))


APP = {"name": "app", "image": "app:1"}


def test_a_sidecar_is_up_before_the_users_containers_and_down_after_them() -> None:
    made = pod({"spec": {"containers": [APP]}}, placement="Sidecar")["spec"]
    assert [item["name"] for item in made["containers"]] == ["app"]
    (sidecar,) = made["initContainers"]
    assert (sidecar["name"], sidecar["restartPolicy"]) == ("server", "Always")
    assert "startupProbe" in sidecar, "gates the start of the others"
    assert {"name": "PAGEFLEET_BASE_URL", "value": "http://$(POD_IP):8000/v1"} in made["containers"][0]["env"]


def test_a_sidecar_takes_mounts_under_its_own_list() -> None:
    mount = {"name": "weights", "mountPath": "/weights"}
    spec = {"containers": [APP], "initContainers": [{"name": "server", "volumeMounts": [mount]}]}
    (sidecar,) = pod({"spec": spec}, placement="Sidecar")["spec"]["initContainers"]
    assert mount in sidecar["volumeMounts"]
    assert sidecar["command"] == ["pagefleet-server"]


def test_the_service_finds_a_sidecar_by_number() -> None:
    made = service(llmd(spec={"placement": "Sidecar", "template": {"spec": {"containers": [APP]}}}))
    assert made["spec"]["ports"][0]["targetPort"] == 8000


@pytest.mark.parametrize(
    ("spec", "want"),
    [
        ({"placement": "Sidecar"}, r"spec\.template: must hold the containers"),
        ({"placement": "Sidecar", "template": {"spec": {}}}, r"spec\.template\.spec\.containers: must hold"),
        (
            {"placement": "Sidecar", "template": {"spec": {"containers": [{"name": "server"}]}}},
            r"under spec\.initContainers",
        ),
        ({"template": {"spec": {"initContainers": [{"name": "server"}]}}}, r"under spec\.containers"),
    ],
)
def test_a_sidecar_needs_company_and_its_name(spec: dict[str, Any], want: str) -> None:
    with pytest.raises(SpecError, match=want):
        parse(llmd_body(spec=spec))
