"""The pages: generated ones are current, links lead somewhere, every reason is explained, commands run."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pagefleet_operator.parsing import parse
from support.cluster_targets import embedded_cluster
from support.kubectl import Kubectl

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), *sorted(ROOT.glob("*.md"))]
OPERATOR = ROOT / "operator" / "pagefleet_operator"
YAML_BLOCK = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)
CODE_BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_the_site_builds_strictly(tmp_path: Path) -> None:
    mkdocs = Path(sys.executable).parent / "mkdocs"
    done = subprocess.run(
        [str(mkdocs), "build", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "excluded from the built site" not in done.stderr, "a page links to what the site has not"
    outside = re.compile(r'(?:src|href)="(?:https?:)?//(?!squidfunk)[^"]*\.(?:js|css|woff2?|png|svg)"')
    for page in (tmp_path / "site").rglob("*.html"):
        assert not outside.search(page.read_text()), f"{page} loads something from elsewhere"


@pytest.mark.parametrize("tool", ["flag_docs.py", "crd_docs.py", "dashboards.py", "decision_index.py"])
def test_a_generated_page_is_current(tool: str) -> None:
    command = [sys.executable, str(ROOT / "tools" / tool), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def named_paths(page: Path) -> Iterator[str]:
    """Files of the repository that a page names between backticks."""
    for text in re.findall(r"`([\w./-]+)`", page.read_text()):
        if re.match(r"(manifests|charts|crds|docs|tools|benchmarks|tests|images|demo|examples)/", text):
            yield text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_are_there(page: Path) -> None:
    missing = {path for path in named_paths(page) if not (ROOT / path).exists() and not list(ROOT.glob(path))}
    assert missing == set()


@pytest.mark.parametrize("page", sorted(ROOT.glob("*.md")), ids=lambda page: page.name)
def test_links_of_the_pages_beside_the_code_lead_somewhere(page: Path) -> None:
    """Those of docs/ are checked by the strict build."""
    text = page.read_text()
    anchors = {
        re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.+)$", text, re.M)
    }
    targets = [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    wrong = [target for target in targets if not (ROOT / target.partition("#")[0]).exists()]
    assert wrong + [target for target in targets if target[0] == "#" and target[1:] not in anchors] == []


def test_every_sample_is_on_the_page_of_samples() -> None:
    samples = {path.name for path in (ROOT / "manifests" / "samples").glob("*.yaml")}
    assert set(re.findall(r"`([\w-]+\.yaml)`", (DOCS / "samples.md").read_text())) == samples


def documented_objects() -> list[Any]:
    return [
        pytest.param(item, id=f"{page.stem}-{item['metadata']['name']}")
        for page in PAGES
        for block in YAML_BLOCK.findall(page.read_text())
        for item in yaml.safe_load_all(block)
        if isinstance(item, dict) and item.get("kind") == "LLMDeployment"
    ]


@pytest.mark.parametrize("item", documented_objects())
def test_an_object_on_a_page_is_valid(item: dict[str, Any]) -> None:
    parse(item | {"metadata": {"namespace": "default", "uid": "u"} | item["metadata"]})


def reasons() -> set[str]:
    """Every reason that a condition of ours can have, from the code that makes them."""
    found: set[str] = set()
    for path in (OPERATOR / "conditions.py", OPERATOR / "pods.py", OPERATOR / "reconcile.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                place = {"Verdict": 2, "Trouble": 0}.get(node.func.id)
                options: list[ast.expr] = node.args[place : place + 1] if place is not None else []
            elif isinstance(node, ast.Yield) and isinstance(node.value, ast.Tuple):
                first = node.value.elts[0]
                options = [first.body, first.orelse] if isinstance(first, ast.IfExp) else [first]
            else:
                continue
            found |= {item.value for item in options if isinstance(item, ast.Constant) and isinstance(item.value, str)}
    return found


def test_every_reason_of_a_condition_is_explained() -> None:
    found = reasons()
    assert {"CrashLoop", "QuotaExceeded", "NoReadyReplicas", "NameConflict"} <= found, "the search finds none"
    text = (DOCS / "troubleshooting.md").read_text() + (DOCS / "autoscaling.md").read_text()
    assert {reason for reason in found if f"`{reason}`" not in text} == set()


def kubectl_lines(page: Path) -> list[str]:
    """Commands of the page's code blocks that need nothing but kubectl and a cluster."""
    lines = [line for block in CODE_BLOCK.findall(page.read_text()) for line in block.splitlines()]
    return [line.split("#")[0].strip() for line in lines if line.startswith("kubectl ")]


def test_the_commands_of_the_install_page_run_as_written(tmp_path: Path) -> None:
    """In their order: install for a namespace, then for all, upgrade, remove."""
    commands = kubectl_lines(DOCS / "install.md")
    assert len(commands) >= 6
    with embedded_cluster() as kubeconfig:
        kubectl = Kubectl.of(kubeconfig, tmp_path)
        for command in commands:
            words = [str(ROOT / word) if (ROOT / word).exists() else word for word in command.split()[1:]]
            said = kubectl(*words, timeout_seconds=60)
            # The cascade of the namespace may have taken it already.
            gone = words[0] == "delete" and "NotFound" in said.output
            assert said.code == 0 or gone, f"{command}: {said.output}"
        assert "pagefleet" not in kubectl.ok("get", "crds,clusterroles", "-o", "name")
