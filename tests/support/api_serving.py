"""One real server process with a tiny random model, for the tests of a module."""

import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest

from support.api_server import RunningServer, Talk, poll, running
from support.tiny_models import write_tiny_llama

NAME = "tiny"


CONTEXT = 256


TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools | tojson }}</s>\n{% endif %}"
    "{% for message in messages %}{% if message.role == 'tool' %}{{ raise_exception('no tools in this house') }}"
    "{% endif %}<|im_start|>{{ message.role }}\n{{ message.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("api-serving")
    model = write_tiny_llama(folder / "model", max_positions=CONTEXT)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    command = [sys.executable, "-m", "pagefleet_server.main", "--model", str(model), "--served-model-name", NAME]
    command += ["--port", "0", "--num-kv-blocks", "256", "--threads", "1", "--dtype", "float32", "--drain-delay", "0"]
    with running(command, folder / "server.log", {"OMP_NUM_THREADS": "1"}) as started:
        started.wait_listening()
        poll(lambda: "ready after" in started.log, started, "it is ready")
        yield started


@pytest.fixture
async def talk(server: RunningServer) -> AsyncIterator[Talk]:
    async with aiohttp.ClientSession(server.base_url) as session:
        yield Talk(server, session)


GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 24}
