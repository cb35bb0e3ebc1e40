"""Other people's clients, in environments of their own (`make clients`), against a real server on a real model."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving.export_model import export
from benchmarks.serving.paths import Paths, default_paths
from support.api_server import RunningServer, poll, running

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests" / "clients" / "programs"
SERVED_NAME = "m"
TOOL_TEMPLATE = (
    '{% if tools %}<|im_start|>system\nAnswer with <tool_call>{"name": ..., "arguments": ...}</tool_call>. Tools: '
    "{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The model's own turns, and tools as Hermes writes them: the model's own template takes none."""


def needs(environment: str, program: str = "python") -> Paths:
    """The folder of environments; skips where that one is not installed."""
    paths = default_paths()
    if not paths.program(environment, program).exists():
        pytest.skip(f"{paths.program(environment, program)} is not there: make clients")
    return paths


def write_model(folder: Path, *, dtype: str = "float32", template: str | None = None) -> Path:
    """The real model as a Hugging Face directory, so that every program reads the same weights."""
    model = folder / f"smollm2-{dtype}"
    export(model, dtype)
    if template is not None:
        (model / "chat_template.jinja").write_text(template)
        file = model / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    return model


@contextmanager
def serving(model: Path, log: Path, *flags: str) -> Iterator[RunningServer]:
    """Our server, ready."""
    command = [sys.executable, "-m", "pagefleet_server.main", "--model", str(model), "--served-model-name", SERVED_NAME]
    command += ["--port", "0", "--kv-cache-memory", "512MiB", "--drain-delay", "0", *flags]
    with running(command, log) as server:
        server.wait_listening()
        poll(lambda: "ready after" in server.log, server, "it is ready")
        yield server


def client_env(**more: str) -> dict[str, str]:
    """No hub, no telemetry, no key but a made-up one, none of our packages."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    env |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OPENAI_API_KEY": "none", "DO_NOT_TRACK": "1"}
    return env | {"HF_DATASETS_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"} | more


def call(command: Sequence[str | Path], *, timeout: float, **env: str) -> str:
    """A client's output. Fails with all of it."""
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=client_env(**env),
        check=False,
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def last_json(output: str) -> dict[str, Any]:
    """The last line of a program."""
    found: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return found
