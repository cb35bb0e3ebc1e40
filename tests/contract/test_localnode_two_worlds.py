"""One pod, two worlds: what a container would be given, and what the process node gives, differ only in folders."""

from pathlib import Path
from typing import Any

import pytest

from pagefleet_localcluster.node.environment import PodFacts, argv_of, environment_of
from pagefleet_localcluster.node.launch import ContainerFolder, build_command
from pagefleet_localcluster.node.settings import NodeSettings
from pagefleet_localcluster.node.volumes import prepare_volumes
from pagefleet_localcluster.objects import Object
from pagefleet_operator.builders import deployment
from pagefleet_operator.settings import ChildSettings
from support.operator_objects import llmd

ADDRESS = "127.64.3.4"
NODE_VARIABLES = {
    "PATH",
    "HOME",
    "TMPDIR",
    "HOSTNAME",
    "LANG",
    "XDG_CACHE_HOME",
    "CUDA_VISIBLE_DEVICES",
    "PAGEFLEET_HOST",
}
"""What the node adds, as an image would."""


def pod_of(template: Object) -> Object:
    metadata = {"name": "chat-1", "namespace": "default", "uid": "uid-1", **template.get("metadata", {})}
    return {"metadata": metadata, "spec": {"nodeName": "n", **template["spec"]}}


def operators_pod(**spec: Any) -> Object:
    manifest = deployment(llmd(spec=spec), ChildSettings(server_image="registry/pagefleet-server:1"), replicas=1)
    return pod_of(manifest["spec"]["template"])


def mounted_pod() -> Object:
    """A pod whose paths come through every door: args, values, a claim, a sub-path, a file URL."""
    container = {
        "name": "server",
        "image": "registry/pagefleet-server:1",
        "command": ["pagefleet-server"],
        "args": ["--model=/models/llama/weights.gguf", "--api-key-file", "/etc/keys/api", "$(EXTRA)"],
        "env": [
            {"name": "EXTRA", "value": "--load=file:///models/llama"},
            {"name": "SEARCH", "value": "/models:/etc/keys:/usr/share"},
            {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        ],
        "volumeMounts": [
            {"name": "models", "mountPath": "/models"},
            {"name": "keys", "mountPath": "/etc/keys/", "readOnly": True},
            {"name": "models", "mountPath": "/adapters", "subPath": "lora"},
        ],
    }
    volumes = [
        {"name": "models", "persistentVolumeClaim": {"claimName": "models"}},
        {"name": "keys", "secret": {"secretName": "keys"}},
    ]
    return pod_of({"spec": {"containers": [container], "volumes": volumes}})


@pytest.mark.parametrize(
    ("case", "pod"),
    [
        ("the smallest spec", operators_pod()),
        ("engine settings", operators_pod(engine={"kvCacheMemory": "32Mi", "args": ["--threads", "1"]})),
        ("mounts", mounted_pod()),
    ],
)
def test_only_folders_differ(case: str, pod: Object, tmp_path: Path) -> None:
    facts = PodFacts(pod, ADDRESS, "127.0.0.1", {"cpu": "2"}, {("Secret", "keys"): {"api": "k"}}, {})
    settings = NodeSettings("n", tmp_path / "node", tmp_path / "shared")
    folder = ContainerFolder(tmp_path / "node" / "c")
    folder.work.mkdir(parents=True)
    volumes = prepare_volumes(facts, tmp_path / "node" / "volumes", settings.shared_directory)
    [container] = pod["spec"]["containers"]
    local = build_command(container, facts, settings=settings, folder=folder, volumes=volumes, gpu_ids=())

    folders = {m["mountPath"].rstrip("/"): volumes[m["name"]] / m.get("subPath", "") for m in container["volumeMounts"]}

    def moved(text: str) -> str:
        """What the text says, once every mount is where its folder is."""
        for path, target in folders.items():
            text = text.replace(path, str(target).rstrip("/"))
        return text

    environment = environment_of(container, facts, {}, lambda text: text)
    assert list(local.argv) == [moved(word) for word in argv_of(container, environment, lambda text: text)], case
    given = {name: value for name, value in local.environment.items() if name in environment}
    assert given == {name: moved(value) for name, value in environment.items()}
    assert set(local.environment) - set(environment) <= NODE_VARIABLES
    assert local.environment["PAGEFLEET_HOST"] == ADDRESS
    assert Path(local.program).name == "pagefleet-server"
    for target in folders.values():
        assert target.is_dir() and target.is_relative_to(tmp_path)
    for path in folders:
        assert not any(word.startswith(path) for word in (*local.argv, *local.environment.values()))


def test_files_are_where_the_arguments_say(tmp_path: Path) -> None:
    pod = mounted_pod()
    facts = PodFacts(pod, ADDRESS, "127.0.0.1", {}, {("Secret", "keys"): {"api": "k"}}, {})
    settings = NodeSettings("n", tmp_path / "node", tmp_path / "shared")
    folder = ContainerFolder(tmp_path / "c")
    folder.work.mkdir(parents=True)
    volumes = prepare_volumes(facts, tmp_path / "volumes", settings.shared_directory)
    [container] = pod["spec"]["containers"]
    argv = build_command(container, facts, settings=settings, folder=folder, volumes=volumes, gpu_ids=()).argv
    assert Path(argv[argv.index("--api-key-file") + 1]).read_text() == "k"
    assert argv[-1] == f"--load=file://{tmp_path}/shared/claims/default/models/llama"
