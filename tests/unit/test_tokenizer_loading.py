import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from pagefleet_server.gguf_metadata import read_gguf_metadata
from pagefleet_server.model_errors import ModelError
from pagefleet_server.tokenizer import load_tokenizer
from support.gguf_bytes import byte_level_tokenizer, gguf, ints, strings, text
from support.smollm2 import smollm2_gguf


def write(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    return path


def test_smollm2_splits_digits_first_and_knows_its_specials() -> None:
    loaded = load_tokenizer(smollm2_gguf())
    encoded = loaded.tokenizer.encode("Hello 1234<|im_end|>")
    assert encoded.tokens == ["Hello", "Ġ", "1", "2", "3", "4", "<|im_end|>"]
    assert (loaded.bos_token, loaded.eos_token, loaded.eos_token_id) == ("<|im_start|>", "<|im_end|>", 2)
    assert loaded.special_token_ids == frozenset(range(17))
    assert loaded.vocab_size == 49152
    assert loaded.chat_template is not None and "<|im_start|>assistant" in loaded.chat_template


@pytest.mark.parametrize("words", ["  two  spaces\n\n", "naïve 日本語 🙂 1,234.5", "def f(x):\n\treturn x", ""])
def test_smollm2_gives_the_text_back(words: str) -> None:
    tokenizer = load_tokenizer(smollm2_gguf()).tokenizer
    assert tokenizer.decode(tokenizer.encode(words).ids) == words


def test_loading_a_tokenizer_brings_no_torch() -> None:
    code = "import sys, pagefleet_server.tokenizer; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_value_type_is_read(tmp_path: Path) -> None:
    items = [
        ("u8", 0, b"\xff"),
        ("i8", 1, b"\xff"),
        ("u16", 2, struct.pack("<H", 65535)),
        ("i16", 3, struct.pack("<h", -2)),
        ("u32", 4, struct.pack("<I", 2**32 - 1)),
        ("i32", 5, struct.pack("<i", -3)),
        ("f32", 6, struct.pack("<f", 0.5)),
        ("bool", 7, b"\1"),
        ("string", 8, text("é")),
        ("strings", 9, strings(["x", ""])),
        ("nested", 9, struct.pack("<IQ", 9, 1) + ints([1, -1])),
        ("u64", 10, struct.pack("<Q", 2**63)),
        ("i64", 11, struct.pack("<q", -(2**63))),
        ("f64", 12, struct.pack("<d", 0.1)),
    ]
    values = read_gguf_metadata(write(tmp_path, gguf(items))).values
    assert list(values.values()) == [
        255, -1, 65535, -2, 2**32 - 1, -3, 0.5, True, "é", ["x", ""], [[1, -1]], 2**63, -(2**63), 0.1,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("data", "want"),
    [
        (b"", "empty"),
        (b"PK\3\4 not a model at all, but long enough", "no GGUF file"),
        (gguf([], version=1), "version 1"),
        (gguf([("k", 99, b"")]), "unknown value type 99"),
        (gguf([("k", 9, struct.pack("<IQ", 4, 2**40))]), "array items"),
        (gguf([("k", 8, struct.pack("<Q", 2**50))]), "string bytes"),
        (gguf([("k", 9, struct.pack("<IQ", 9, 1) * 9)]), "nested deeper"),
        (gguf([], tensors=[("w", (8, 8), 0), ("v", (64,), 256)])[:-1], "truncated"),
    ],
)
def test_damaged_file_is_named_with_what_is_wrong(tmp_path: Path, data: bytes, want: str) -> None:
    path = write(tmp_path, data)
    with pytest.raises(ModelError, match=want) as error:
        read_gguf_metadata(path)
    assert str(path) in str(error.value)


def test_every_truncation_of_a_file_is_refused(tmp_path: Path) -> None:
    whole = gguf(byte_level_tokenizer(), tensors=[("w", (4,), 0)])
    load_tokenizer(write(tmp_path, whole))
    for length in range(0, len(whole), 7):
        with pytest.raises(ModelError):
            load_tokenizer(write(tmp_path, whole[:length]))


@pytest.mark.parametrize(
    ("items", "want"),
    [
        (byte_level_tokenizer(kind="llama"), "tokenizer.ggml.model is 'llama'"),
        (byte_level_tokenizer(pre="martian"), "tokenizer.ggml.pre is 'martian'"),
        ([*byte_level_tokenizer(), ("tokenizer.ggml.eos_token_id", 4, struct.pack("<I", 70))], "in \\[0, 7\\)"),
        ([*byte_level_tokenizer(), ("tokenizer.ggml.merges", 9, strings(["ab"]))], "is no pair"),
        ([*byte_level_tokenizer(), ("tokenizer.ggml.merges", 9, strings(["a zz"]))], "inconsistent"),
        ([*byte_level_tokenizer(), ("tokenizer.ggml.token_type", 9, ints([1]))], "1 token types for 7 tokens"),
        ([*byte_level_tokenizer(), ("tokenizer.ggml.tokens", 8, text("a"))], "is a str; expected a list"),
        ([*byte_level_tokenizer(), ("tokenizer.ggml.tokens", 9, ints([1]))], "no str"),
    ],
)
def test_tokenizer_that_we_cannot_prove_is_refused(
    tmp_path: Path, items: list[tuple[str, int, bytes]], want: str
) -> None:
    with pytest.raises(ModelError, match=want):
        load_tokenizer(write(tmp_path, gguf(items)))


def test_bos_is_added_where_the_file_asks_for_it(tmp_path: Path) -> None:
    without = load_tokenizer(write(tmp_path, gguf(byte_level_tokenizer())))
    assert without.tokenizer.encode("ab ab").tokens == ["ab", "Ġab"]
    loaded = load_tokenizer(write(tmp_path, gguf(byte_level_tokenizer(bos=True))))
    assert loaded.tokenizer.encode("ab ab").tokens == ["<s>", "ab", "Ġab"]
    assert loaded.tokenizer.encode("ab", add_special_tokens=False).tokens == ["ab"]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    file = tmp_path / "source.gguf"
    file.write_bytes(gguf(byte_level_tokenizer()))
    load_tokenizer(file).tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def configure(directory: Path, **fields: object) -> None:
    (directory / "tokenizer_config.json").write_text(json.dumps(fields))


def test_directory_reads_special_tokens_as_text_or_object(directory: Path) -> None:
    configure(directory, bos_token={"content": "<s>"}, eos_token="</s>", add_bos_token=True, chat_template="T")
    loaded = load_tokenizer(directory)
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.chat_template) == (0, 1, "T")
    assert loaded.tokenizer.encode("ab").tokens == ["<s>", "ab"]


def test_chat_template_file_wins_over_the_list_in_the_config(directory: Path) -> None:
    templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    configure(directory, chat_template=templates)
    assert load_tokenizer(directory).chat_template == "plain"
    (directory / "chat_template.jinja").write_text("file")
    assert load_tokenizer(directory).chat_template == "file"


def test_directory_without_any_config_still_loads(directory: Path) -> None:
    loaded = load_tokenizer(directory)
    assert loaded.chat_template is None and loaded.eos_token is None
    assert loaded.vocab_size == 7


@pytest.mark.parametrize(
    ("name", "content", "want"),
    [
        ("tokenizer.json", "{", "tokenizer.json: cannot be read as a tokenizer"),
        ("tokenizer_config.json", "[", "tokenizer_config.json: cannot be read as JSON"),
        ("tokenizer_config.json", "[]", "expected a JSON object"),
    ],
)
def test_damaged_directory_names_its_file(directory: Path, name: str, content: str, want: str) -> None:
    (directory / name).write_text(content)
    with pytest.raises(ModelError, match=want):
        load_tokenizer(directory)


def test_path_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file or directory"):
        load_tokenizer(tmp_path / "none")
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json: not found"):
        load_tokenizer(tmp_path)
    (tmp_path / "x.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"neither a directory nor a \.gguf"):
        load_tokenizer(tmp_path / "x.bin")
