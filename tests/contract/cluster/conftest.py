"""Fixtures of the contract suite: an API server by kubeconfig, a namespace, transcripts."""

import ast
import json
import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pagefleet_localcluster.kubeconfig import Kubeconfig
from support.cluster_targets import is_foreign, target, target_names
from support.localapi import CRDS, RECORDED, Api, Json, draft_crd, ready_node
from support.recorded_differences import CASE_DIFFERENCES
from support.transcripts import Transcript, case_name, in_short, write_cases

FOLDER = Path(__file__).parent
RECORDED_CASES: dict[str, list[str]] = json.loads((RECORDED / "1.36.2" / "cases" / "cases.json").read_text())
"""What a real server answered to the cases of this suite, in short."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record", metavar="DIR", type=Path, help="store the normalised transcript of every contract case in DIR"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "recorded(step, ...): recorded exchanges with a real server that show the same")
    config.addinivalue_line("markers", "embedded_only(reason): a case that a real server is not asked")
    config.addinivalue_line("markers", "own_server_only(reason): a case that a server of somebody else is not asked")


@pytest.fixture(scope="session", params=target_names())
def kubeconfig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubeconfig]:
    with target(request.param, tmp_path_factory.mktemp(request.param)) as found:
        yield found


@pytest.fixture
async def api(kubeconfig: Kubeconfig, request: pytest.FixtureRequest) -> AsyncIterator[Api]:
    for name, applies in (("embedded_only", True), ("own_server_only", is_foreign())):
        mark = request.node.get_closest_marker(name)
        if mark is not None and applies and "real" in request.node.name:
            pytest.skip(str(mark.args[0]))
    transcript = Transcript()
    connector = aiohttp.TCPConnector(limit=0, ssl=kubeconfig.ssl_context or True)
    async with aiohttp.ClientSession(connector=connector, skip_auto_headers=("Content-Type", "User-Agent")) as session:
        client = Api(session, kubeconfig.server, kubeconfig.token or "", transcript)
        await client.post(CRDS, draft_crd())
        transcript.clear()
        yield client
    case, said = case_name(request.node.name), transcript.normalised(request.node.name)
    folder: Path | None = request.config.getoption("--record", default=None)
    if folder is not None:
        _store(folder / f"{request.node.name}.json", said)
        write_cases(folder / "cases.json", {case: in_short(said)})
    if "embedded" in request.node.name and case in RECORDED_CASES and case not in CASE_DIFFERENCES:
        assert in_short(said) == RECORDED_CASES[case], "a real server answered otherwise"


def _store(path: Path, said: Json) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(said, indent=1))


@pytest.fixture
async def namespace(api: Api) -> AsyncIterator[str]:
    name = f"contract-{secrets.token_hex(4)}"
    (await api.post("/api/v1/namespaces", {"metadata": {"name": name}})).ok()
    yield name
    await api.delete(f"/api/v1/namespaces/{name}")


@pytest.fixture
async def node(api: Api) -> AsyncIterator[str]:
    name = f"contract-{secrets.token_hex(4)}"
    await ready_node(api, name)
    yield name
    await api.delete(f"/api/v1/nodes/{name}")


def unverified_cases() -> list[str]:
    """Cases that no recording of a real server backs."""
    verified = {case.partition("[")[0] for case in RECORDED_CASES}
    found = []
    for path in sorted(FOLDER.glob("test_cluster_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef) and node.name.startswith("test_"):
                marks = [ast.unparse(decorator) for decorator in node.decorator_list]
                if node.name not in verified and not any("mark.recorded" in mark for mark in marks):
                    found.append(node.name)
    return found


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.section("contract suite")
    terminalreporter.line(f"ran on: {', '.join(target_names())}")
    if "real" not in target_names():
        terminalreporter.line("no real API server: set KUBEBUILDER_ASSETS or PAGEFLEET_CONTRACT_KUBECONFIG")
    names = unverified_cases()
    terminalreporter.line(f"unverified ({len(names)} cases without a recording of a real server):")
    for name in names:
        terminalreporter.line(f"  {name}")
