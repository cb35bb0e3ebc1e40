"""generation_config.json and the chat template flag, through the command line to the wire."""

import json
from pathlib import Path

import aiohttp

from support.api_server import Talk, memory_command, running, write_letter_model


async def served(tmp_path: Path, *flags: str) -> tuple[dict[str, object], list[int]]:
    """default_sampling_params, and the tokens of a conversation."""
    model = write_letter_model(tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps({"temperature": 0.25, "top_k": 7}))
    with running(memory_command("none", model, *flags), tmp_path / "server.log") as server:
        server.wait_listening()
        async with aiohttp.ClientSession(server.base_url) as session:
            talk = Talk(server, session)
            await talk.until_ready()
            listed = json.loads((await talk.get("/v1/models"))[1])["data"][0]
            _, answer = await talk.post("/tokenize", messages=[{"role": "user", "content": "ab"}])
    return listed["default_sampling_params"], answer["tokens"]


async def test_models_own_values_and_a_template_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}{{ m.content }}b{% endfor %}")
    defaults, tokens = await served(tmp_path, "--chat-template", str(tmp_path / "chat.jinja"))
    assert defaults == {"temperature": 0.25, "top_k": 7}
    assert tokens == [1, 2, 2]


async def test_they_can_be_turned_off(tmp_path: Path) -> None:
    defaults, tokens = await served(tmp_path, "--no-generation-config", "--chat-template", "{{ messages[0].content }}")
    assert defaults == {}
    assert tokens == [1, 2]
