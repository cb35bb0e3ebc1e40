"""What the model's makers say about drawing, and which template and end tokens hold."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from pagefleet_server.api.generation_defaults import load_generation_defaults, with_defaults
from pagefleet_server.api.protocol.chat import ChatBody
from pagefleet_server.api.protocol.completions import CompletionBody
from pagefleet_server.gguf_metadata import read_gguf_metadata
from pagefleet_server.model_errors import ModelError
from pagefleet_server.models.checkpoint import Checkpoint
from pagefleet_server.models.eos import eos_token_ids
from pagefleet_server.tokenizer import read_template
from support.gguf_bytes import Item, gguf, ints, strings
from support.smollm2 import smollm2_gguf


def model(path: Path, **values: Any) -> Path:
    (path / "generation_config.json").write_text(json.dumps(values))
    return path


def test_values_of_the_file_hold_where_the_request_says_nothing(tmp_path: Path) -> None:
    defaults = load_generation_defaults(
        model(tmp_path, temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.05, do_sample=True, max_length=99)
    )
    assert defaults == {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05}
    body = with_defaults(CompletionBody.model_validate({"prompt": "a", "top_k": 0, "temperature": None}), defaults)
    assert (body.temperature, body.top_p, body.top_k, body.repetition_penalty, body.prompt) == (0.6, 0.95, 0, 1.05, "a")
    chat = ChatBody.model_validate({"messages": [{"role": "user", "content": "a"}], "temperature": 0})
    assert (with_defaults(chat, defaults).temperature, with_defaults(chat, defaults).top_p) == (0, 0.95)


def test_without_file_or_values_nothing_changes(tmp_path: Path) -> None:
    body = CompletionBody.model_validate({"prompt": "a"})
    assert load_generation_defaults(tmp_path) == {}
    assert load_generation_defaults(model(tmp_path, eos_token_id=[1, 2], temperature=None)) == {}
    assert load_generation_defaults(smollm2_gguf()) == {}
    assert with_defaults(body, {}) is body


@pytest.mark.parametrize(
    ("values", "want"),
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"top_p": "high"}, "top_p is high"),
        ({"top_k": 1.5}, "top_k is 1.5"),
    ],
)
def test_value_that_no_request_could_have_is_refused(tmp_path: Path, values: dict[str, Any], want: str) -> None:
    with pytest.raises(ModelError, match=f"generation_config.json: {want}.*--no-generation-config"):
        load_generation_defaults(model(tmp_path, **values))


def test_template_is_given_as_text_or_as_a_file(tmp_path: Path) -> None:
    text = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (tmp_path / "chat.jinja").write_text(text)
    assert read_template(text) == read_template(str(tmp_path / "chat.jinja")) == text
    with pytest.raises(ModelError, match=r"--chat-template .*none.jinja: cannot be read"):
        read_template(str(tmp_path / "none.jinja"))


def ends(path: Path, tokens: list[str], types: list[int], **keys: int) -> tuple[int, ...]:
    items: list[Item] = [("tokenizer.ggml.tokens", 9, strings(tokens)), ("tokenizer.ggml.token_type", 9, ints(types))]
    items += [(f"tokenizer.ggml.{name}_token_id", 4, struct.pack("<I", value)) for name, value in keys.items()]
    path.write_bytes(gguf(items))
    return eos_token_ids(Checkpoint(path.parent, path.name, read_gguf_metadata(path)), None)


def test_gguf_files_name_one_end_and_have_several(tmp_path: Path) -> None:
    """Llama 3's instruct files say eos 128001 only; their turns end with <|eot_id|>."""
    tokens = ["a", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_start|>", "<|end|>"]
    control = [1, 3, 3, 3, 3, 1]
    assert ends(tmp_path / "m.gguf", tokens, control, eos=1) == (1, 2, 3)
    assert ends(tmp_path / "m.gguf", tokens, control, eos=0, eot=4) == (0, 1, 2, 3, 4)
    assert ends(tmp_path / "m.gguf", ["a", "</s>"], [1, 3], eos=1) == (1,)
