"""What kubectl prints against the embedded API: as recorded on a real server, but for listed differences."""

import difflib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cluster_targets import embedded_cluster, whole_cluster
from support.kubectl import Kubectl, Said, normalised
from support.localapi import Json, draft_crd, llmd

GOLDEN = Path(__file__).parent / "kubectl"
_BLOCK = re.compile(r"^\$ kubectl ([^\n]*)\n```\n(.*?)```$", re.MULTILINE | re.DOTALL)

_PROTOBUF = "typed commands send protobuf, which this API does not read; the answer says to use `apply -f`"
# Command -> (lines that may differ, why).
DIFFERENCES: dict[str, tuple[str, str]] = {
    "auth can-i create llmdeployments": (".*", _PROTOBUF),
    "create namespace other": (".*", _PROTOBUF),
    "describe deploy web": ("Progressing True .*", "the reason changes as the rollout goes on: a matter of the moment"),
    "get events --sort-by=.metadata.name -o custom-columns=R:.reason,K:.involvedObject.kind,T:.type": (
        ".*",
        "repeated events are counted in one object here, and no API server reports its own start",
    ),
}


def recorded(file: str) -> list[tuple[str, list[str]]]:
    """(command, normalised output with exit code) in order."""
    text = (GOLDEN / file).read_text()
    return [(match[1], _without_last_blanks(normalised(match[2]))) for match in _BLOCK.finditer(text)]


def _without_last_blanks(lines: list[str]) -> list[str]:
    *output, code = lines
    while output and not output[-1]:
        output.pop()
    return [*output, code]


def arguments(command: str) -> list[str]:
    """The recordings join arguments with spaces; only the last of `-p` holds some itself."""
    head, _, patch = command.partition(" -p ")
    return head.split(" ") + (["-p", patch] if patch else [])


def _web(image: str = "img:1") -> Json:
    container = {"name": "server", "image": image, "command": ["x"]}
    template = {"metadata": {"labels": {"app": "web"}}, "spec": {"containers": [container]}}
    spec = {"replicas": 2, "selector": {"matchLabels": {"app": "web"}}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"}, "spec": spec}


def _demo(**spec: object) -> Json:
    kind = {"apiVersion": "pagefleet.dev/v1alpha1", "kind": "LLMDeployment"}
    return kind | {"metadata": {"name": "demo"}, "spec": {"model": {"source": "file:///models/m"}} | spec}


def _other_objects() -> list[Json]:
    """What the recorded cluster held besides, in the namespace `rec`."""
    found: list[Json] = [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "rec"}}]
    counts = {"a": 1, "ap": 2, "b": 1, "gen-js56z": 1, "p": 2, "s": 5, "w0": 1, "w1": 1, "yam": 1, "yy": 1}
    kind = {"apiVersion": "pagefleet.dev/v1alpha1", "kind": "LLMDeployment"}
    for name, count in counts.items():
        found.append(kind | llmd(name, replicas=count))
    for name, count in (("dep", 1), ("gpu", 2), ("web", 1)):
        body = _web()
        body["metadata"]["name"] = name
        body["spec"]["replicas"] = count
        found.append(body)
    for body in found[1:]:
        body["metadata"]["namespace"] = "rec"
    return found


def _assert_same(want: list[str], got: list[str]) -> None:
    assert got == want, "\n".join(difflib.unified_diff(want, got, "golden", "here", lineterm=""))


@pytest.fixture(scope="module")
def kubectl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubectl]:
    folder = tmp_path_factory.mktemp("kubectl")
    files = {
        "crd": draft_crd(),
        "a": _demo(replicas=2),
        "b": _demo(replicas=3),
        "bad": _demo(bogus=1),
        "web": _web(),
        "others": {"apiVersion": "v1", "kind": "List", "items": _other_objects()},
    }
    for name, body in files.items():
        (folder / f"{name}.yaml").write_text(json.dumps(body))
    with embedded_cluster() as kubeconfig:
        run = Kubectl.of(kubeconfig, folder)
        run.ok("apply", "-f", "crd.yaml")
        run.ok("apply", "-f", "others.yaml")
        status = {"ready": "1/3", "kvBlocks": {"occupancy": "61%", "summary": "812/1330"}}
        run.ok(
            "patch",
            "llmd",
            "s",
            "-n",
            "rec",
            "--subresource=status",
            "--type=merge",
            "-p",
            json.dumps({"status": status}),
        )
        yield run


RECORDED = recorded("recorded-1.37-on-1.36.2.md")


@pytest.fixture(scope="module")
def said(kubectl: Kubectl) -> dict[int, Said]:
    """Every recorded command, in order: later ones see what earlier ones did."""
    return {number: kubectl(*arguments(command)) for number, (command, _) in enumerate(RECORDED)}


@pytest.mark.parametrize(
    "number", range(len(RECORDED)), ids=[f"{i} {command[:60]}" for i, (command, _) in enumerate(RECORDED)]
)
def test_kubectl_prints_what_it_prints_on_a_real_server(said: dict[int, Said], number: int) -> None:
    command, want = RECORDED[number]
    got = said[number].lines()
    if command in DIFFERENCES:
        may_differ = re.compile(DIFFERENCES[command][0])
        want, got = ([line for line in lines if not may_differ.fullmatch(line)] for lines in (want, got))
    _assert_same(want, got)


OWN = recorded("own-1.37.md")


@pytest.fixture(scope="module")
def own_said(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Said]]:
    """Our own commands on a whole local cluster, in order, with a real process behind the pod."""
    folder = tmp_path_factory.mktemp("own")
    container = {"name": "main", "image": "shell:1", "command": ["sh", "-c", "echo started; exec sleep 1000"]}
    pod: Json = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": [container]}}
    pod["spec"]["terminationGracePeriodSeconds"] = 1
    service = {"metadata": {"name": "s"}, "spec": {"selector": {"app": "web"}, "ports": [{"name": "http", "port": 80}]}}
    web = _web()
    web["spec"]["template"]["spec"] = pod["spec"]
    files = {
        "crd": draft_crd(),
        "pod": pod,
        "web": web,
        "service": {"apiVersion": "v1", "kind": "Service"} | service,
        "demo": _demo(replicas=2),
        "invalid": _demo(replicas=-1, placement="Moon"),
        "typo": _web() | {"spec": _web()["spec"] | {"replcas": 3}},
    }
    for name, body in files.items():
        (folder / f"{name}.yaml").write_text(json.dumps(body))
    with whole_cluster(folder / "cluster") as kubeconfig_path:
        run = Kubectl.at(kubeconfig_path, folder)
        watching = None
        said: dict[int, Said] = {}
        for number, (command, _) in enumerate(OWN):
            if command == "get pods -w":
                watching = (number, run.start(*arguments(command)))
                continue
            said[number] = run(*arguments(command))
        assert watching is not None
        number, process = watching
        process.terminate()
        output, _ = process.communicate(timeout=10)
        said[number] = Said(output, 0)
        yield said


@pytest.mark.parametrize("number", range(len(OWN)), ids=[f"{i} {command[:60]}" for i, (command, _) in enumerate(OWN)])
def test_kubectl_prints_as_before(own_said: dict[int, Said], number: int) -> None:
    want, got = OWN[number][1], own_said[number].lines()
    if OWN[number][0] == "get pods -w":  # intermediate states of a moment may be missed or seen twice
        shown = re.compile(r"NAME .*|p (?!.*(Pending|ContainerCreating)).*|\(exit 0\)")
        want, got = ([line for line in dict.fromkeys(lines) if shown.fullmatch(line)] for lines in (want, got))
    if OWN[number][0].startswith("rollout status"):  # how often it reports on the way is a matter of speed
        want, got = want[-2:], got[-2:]
    _assert_same(want, got)
