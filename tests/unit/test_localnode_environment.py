"""What containers find in their environment, command and arguments."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from pagefleet_localcluster.node.environment import (
    ConfigProblem,
    PodFacts,
    argv_of,
    environment_of,
    expand,
    service_variables,
)
from pagefleet_localcluster.node.images import ImageTable, repository_of
from pagefleet_localcluster.node.volumes import path_rewriter
from pagefleet_localcluster.objects import Object
from support.localcluster_builders import pod, service


def facts(config: Mapping[tuple[str, str], Mapping[str, str] | None] | None = None, **changes: str) -> PodFacts:
    allocatable = {"cpu": "4", "memory": "8Gi"}
    return PodFacts(pod("p", labels={"app": "web"}), "127.64.0.7", "127.0.0.1", allocatable, config or {}, changes)


def environment(container: Object, f: PodFacts | None = None) -> dict[str, str]:
    return environment_of(container, f if f is not None else facts(), {"BASE": "b"}, lambda text: text)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("$(A)", "1"),
        ("x$(A)y$(A)", "x1y1"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$1"),
        ("$(B)", "$(B)"),
        ("$A ${A}", "$A ${A}"),
        ("$(A", "$(A"),
        ("100$", "100$"),
    ],
)
def test_expansion(text: str, want: str) -> None:
    assert expand(text, {"A": "1"}) == want


def test_values_see_only_what_came_before() -> None:
    container = {"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "$(A)$(C)"}, {"name": "C", "value": "3"}]}
    got = environment(container)
    assert (got["BASE"], got["B"]) == ("b", "1$(C)")
    assert argv_of({"command": ["x"], "args": ["$(B)$(C)"]}, got, lambda text: text) == ["x", "1$(C)3"]


@pytest.mark.parametrize(
    ("path", "want"),
    [
        ("metadata.name", "p"),
        ("metadata.namespace", "default"),
        ("metadata.uid", "uid-p"),
        ("metadata.labels['app']", "web"),
        ("metadata.annotations['none']", ""),
        ("spec.nodeName", "n0"),
        ("spec.serviceAccountName", "default"),
        ("status.podIP", "127.64.0.7"),
        ("status.hostIP", "127.0.0.1"),
    ],
)
def test_fields(path: str, want: str) -> None:
    container = {"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": path}}}]}
    assert environment(container)["A"] == want


@pytest.mark.parametrize(
    ("reference", "want"),
    [
        ({"resource": "limits.memory", "divisor": "1Mi"}, "64"),
        ({"resource": "limits.cpu"}, "2"),
        ({"resource": "requests.cpu", "divisor": "1m"}, "1500"),
        ({"resource": "limits.ephemeral-storage"}, "0"),
    ],
)
def test_resources(reference: Object, want: str) -> None:
    resources = {"limits": {"memory": "64Mi", "cpu": "1500m"}, "requests": {"cpu": "1500m"}}
    container = {
        "name": "c",
        "resources": resources,
        "env": [{"name": "A", "valueFrom": {"resourceFieldRef": reference}}],
    }
    assert environment(container)["A"] == want


def test_a_limit_that_is_not_set_is_the_nodes() -> None:
    container = {"name": "c", "env": [{"name": "A", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}}]}
    assert environment(container)["A"] == "4"


def test_config_maps_and_secrets() -> None:
    f = facts({("ConfigMap", "m"): {"k": "v", "bad name": "x"}, ("Secret", "s"): {"p": "w"}})
    container = {
        "envFrom": [{"configMapRef": {"name": "m"}, "prefix": "M_"}, {"secretRef": {"name": "gone", "optional": True}}],
        "env": [
            {"name": "P", "valueFrom": {"secretKeyRef": {"name": "s", "key": "p"}}},
            {"name": "Q", "valueFrom": {"configMapKeyRef": {"name": "m", "key": "none", "optional": True}}},
        ],
    }
    assert environment(container, f) == {"BASE": "b", "M_k": "v", "P": "w"}


@pytest.mark.parametrize(
    ("source", "want"),
    [
        ({"secretKeyRef": {"name": "x", "key": "k"}}, 'secret "x" not found'),
        ({"configMapKeyRef": {"name": "m", "key": "k"}}, "couldn't find key k in ConfigMap default/m"),
        ({"fieldRef": {"fieldPath": "spec.bogus"}}, "unsupported fieldPath: spec.bogus"),
        ({"fileKeyRef": {}}, "env A: valueFrom ['fileKeyRef'] is not supported"),
    ],
)
def test_what_is_missing_is_named(source: Object, want: str) -> None:
    f = facts({("ConfigMap", "m"): {}})
    with pytest.raises(ConfigProblem) as caught:
        environment({"name": "c", "env": [{"name": "A", "valueFrom": source}]}, f)
    assert str(caught.value) == want


def test_services_reach_every_container_as_docker_links() -> None:
    got = service_variables([service(port=80)])
    assert got["WEB_SERVICE_HOST"] == "127.96.0.10"
    assert got["WEB_PORT"] == "tcp://127.96.0.10:80"
    assert got["WEB_SERVICE_PORT_HTTP"] == "80"
    assert got["WEB_PORT_80_TCP_ADDR"] == "127.96.0.10"
    assert service_variables([service(clusterIP="None")]) == {}


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("/models", "/pod/m"),
        ("/models/a.gguf", "/pod/m/a.gguf"),
        ("--model=/models/a", "--model=/pod/m/a"),
        ("file:///models/a", "file:///pod/m/a"),
        ("/models:/models/deep:/other", "/pod/m:/pod/d:/other"),
        ("/models/deep/x", "/pod/d/x"),
        ("/modelsX /my/models /models.old", "/modelsX /my/models /models.old"),
        ("http://host/models", "http://host/models"),
        ('{"path": "/models"}', '{"path": "/pod/m"}'),
        ("/dev/termination-log", "/pod/t"),
    ],
)
def test_mount_paths_are_rewritten_as_whole_path_prefixes(text: str, want: str) -> None:
    mounts = {"/models": "/pod/m", "/models/deep": "/pod/d", "/dev/termination-log": "/pod/t"}
    assert path_rewriter([(path, Path(folder)) for path, folder in mounts.items()])(text) == want


@pytest.mark.parametrize(
    ("image", "want"),
    [
        ("server", "server"),
        ("a/b/server:v1", "a/b/server"),
        ("host:5000/server", "host:5000/server"),
        ("host:5000/server:v1@sha256:00", "host:5000/server"),
    ],
)
def test_repository_of_an_image(image: str, want: str) -> None:
    assert repository_of(image) == want


@pytest.mark.parametrize(
    "image", ["server", "ghcr.io/x/server:1", "pagefleet-server", "r:5000/pagefleet-server@sha256:0"]
)
def test_our_images_are_this_installation(image: str) -> None:
    rule = ImageTable().find(image)
    assert rule is not None and rule.entrypoint == ("pagefleet-server",)
