"""Volumes as folders: what each kind becomes, and what is refused."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pagefleet_localcluster.node.environment import ConfigProblem, PodFacts
from pagefleet_localcluster.node.volumes import VolumeProblem, config_references, mounts_of, prepare_volumes
from pagefleet_localcluster.objects import Object
from support.localcluster_builders import pod


def prepare(folder: Path, volume: Object, config: Mapping[tuple[str, str], Any] | None = None) -> Path:
    facts = PodFacts(pod("p", volumes=[{"name": "v", **volume}]), "127.64.0.1", "127.0.0.1", {}, config or {}, {})
    return prepare_volumes(facts, folder / "pod", folder / "shared")["v"]


@pytest.mark.parametrize("kind", ["", "DirectoryOrCreate", "Directory"])
def test_host_folders_are_themselves(kind: str, tmp_path: Path) -> None:
    if kind != "DirectoryOrCreate":
        (tmp_path / "host").mkdir()
    assert prepare(tmp_path, {"hostPath": {"path": str(tmp_path / "host"), "type": kind}}) == tmp_path / "host"
    assert (tmp_path / "host").is_dir()


@pytest.mark.parametrize(
    ("case", "volume", "want"),
    [
        ("no such folder", {"hostPath": {"path": "/no/such", "type": "Directory"}}, "/no/such is not a directory"),
        ("no such file", {"hostPath": {"path": "/no/such", "type": "File"}}, "/no/such is not a file"),
        ("nothing there", {"hostPath": {"path": "/no/such"}}, "/no/such does not exist"),
        ("no such secret", {"secret": {"secretName": "x"}}, 'secret "x" not found'),
        (
            "no such key",
            {"configMap": {"name": "m", "items": [{"key": "z", "path": "z"}]}},
            "references non-existent config key: z",
        ),
        (
            "out of the volume",
            {"configMap": {"name": "m", "items": [{"key": "k", "path": "../../k"}]}},
            r"file '\.\./\.\./k' leaves its volume",
        ),
        ("another kind", {"nfs": {"server": "x"}}, "nfs volumes do not exist on a process node"),
    ],
)
def test_what_cannot_be_mounted_is_named(case: str, volume: Object, want: str, tmp_path: Path) -> None:
    with pytest.raises(VolumeProblem, match=want):
        prepare(tmp_path, volume, {("ConfigMap", "m"): {"k": "v"}})


def test_optional_sources_may_be_absent(tmp_path: Path) -> None:
    assert list(prepare(tmp_path, {"configMap": {"name": "m", "optional": True}}).iterdir()) == []
    items = [{"key": "z", "path": "z"}, {"key": "k", "path": "k"}]
    source = {"configMap": {"name": "m", "optional": True, "items": items}}
    assert [f.name for f in prepare(tmp_path, source, {("ConfigMap", "m"): {"k": "v"}}).iterdir()] == ["k"]


def test_files_have_the_modes_that_are_asked_for(tmp_path: Path) -> None:
    config = {"configMap": {"name": "m", "items": [{"key": "k", "path": "deep/k", "mode": 0o400}]}}
    other = {"secret": {"name": "s"}}
    data = {("ConfigMap", "m"): {"k": "v"}, ("Secret", "s"): {"x": "y"}}
    folder = prepare(tmp_path, {"projected": {"defaultMode": 0o640, "sources": [config, other]}}, data)
    assert [(folder / name).stat().st_mode & 0o777 for name in ("deep/k", "x")] == [0o400, 0o640]


def test_a_volume_that_only_a_real_cluster_has_is_refused_by_name(tmp_path: Path) -> None:
    token = {"serviceAccountToken": {"path": "token", "audience": "vault"}}
    with pytest.raises(VolumeProblem, match="serviceAccountToken volumes do not exist on a process node"):
        prepare(tmp_path, {"projected": {"sources": [token]}})


def test_bytes_survive(tmp_path: Path) -> None:
    folder = prepare(tmp_path, {"secret": {"secretName": "s"}}, {("Secret", "s"): {"k": "\udcff\x00\n"}})
    assert (folder / "k").read_bytes() == b"\xff\x00\n"


def test_a_sub_path_stays_inside_its_volume(tmp_path: Path) -> None:
    (tmp_path / "v").mkdir()
    inside = {"name": "c", "volumeMounts": [{"name": "v", "mountPath": "/x/", "subPathExpr": "$(POD)"}]}
    assert mounts_of(inside, {"v": tmp_path / "v"}, lambda text: text.replace("$(POD)", "p")) == [
        ("/x", tmp_path / "v/p")
    ]
    outside = {"name": "c", "volumeMounts": [{"name": "v", "mountPath": "/x", "subPath": "../secrets"}]}
    with pytest.raises(ConfigProblem, match="leaves its volume"):
        mounts_of(outside, {"v": tmp_path / "v"}, lambda text: text)


def test_everything_that_a_pod_reads_is_fetched() -> None:
    container = {
        "name": "c",
        "image": "i",
        "envFrom": [{"configMapRef": {"name": "a"}}, {"secretRef": {"name": "b"}}],
        "env": [{"name": "E", "valueFrom": {"secretKeyRef": {"name": "c", "key": "k"}}}],
    }
    volumes = [
        {"name": "v", "secret": {"secretName": "d"}},
        {"name": "w", "projected": {"sources": [{"secret": {"name": "e"}}, {"configMap": {"name": "f"}}]}},
    ]
    spec = {"containers": [], "initContainers": [container], "volumes": volumes}
    assert config_references({"spec": spec}) == {
        ("ConfigMap", "a"),
        ("Secret", "b"),
        ("Secret", "c"),
        ("Secret", "d"),
        ("Secret", "e"),
        ("ConfigMap", "f"),
    }
