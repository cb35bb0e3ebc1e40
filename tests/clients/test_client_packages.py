"""openai, langchain-openai and litellm do all they can do with a server."""

from collections.abc import Iterator

import pytest

from support.api_server import RunningServer
from support.evidence import write_evidence
from support.third_party import PROGRAMS, TOOL_TEMPLATE, call, last_json, needs, serving, write_model

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("client-packages")
    model = write_model(folder, dtype="float32", template=TOOL_TEMPLATE)
    with serving(model, folder / "server.log", "--dtype", "float32") as started:
        yield started


@pytest.mark.parametrize("name", ["openai", "langchain", "litellm"])
def test_every_part_of_the_package_works(server: RunningServer, name: str) -> None:
    python = needs("clients").python("clients")
    output = call([python, PROGRAMS / f"{name}_client.py", f"{server.base_url}/v1"], timeout=900)
    write_evidence(f"client_{name}", {"package": name, **last_json(output)})
    assert server.process.poll() is None
    assert "Traceback" not in server.log
