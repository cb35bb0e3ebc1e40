"""Tokenizer and chat template of a model, from a Hugging Face directory or a .gguf file. Torch-free."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from pagefleet_server.gguf_metadata import GGUFMetadata, read_gguf_metadata
from pagefleet_server.model_errors import ModelError


@dataclass(frozen=True, slots=True)
class LoadedTokenizer:
    """All that the API needs to go from text to token ids and back."""

    tokenizer: Tokenizer
    """encode() adds special tokens (BOS) where the model wants them; chat prompts are encoded without them."""
    chat_template: str | None
    """Jinja source; None for a model without one."""
    bos_token: str | None
    bos_token_id: int | None
    eos_token: str | None
    eos_token_id: int | None
    special_token_ids: frozenset[int]
    """Ids that skip_special_tokens leaves out of the text."""
    vocab_size: int
    """Ids are below it. The model's logits may be wider (padded)."""


def load_tokenizer(path: Path) -> LoadedTokenizer:
    """Read a Hugging Face directory (tokenizer.json) or a .gguf file. Raises ModelError naming file and remedy."""
    if path.is_dir():
        return _from_directory(path)
    if not path.exists():
        raise ModelError(f"{path}: no such file or directory; give a Hugging Face directory or a .gguf file")
    if path.suffix != ".gguf":
        raise ModelError(f"{path}: is neither a directory nor a .gguf file")
    return _from_gguf(read_gguf_metadata(path))


def check_is_model(directory: Path) -> None:
    """Raises ModelError for a directory of something else, with what may have been meant."""
    if (directory / "config.json").is_file():
        return
    files = sorted(directory.glob("*.gguf"))
    hint = f"did you mean {files[0]}?" if files else "give a Hugging Face model directory or a .gguf file"
    raise ModelError(f"{directory}: holds no config.json; {hint}")


def _from_directory(path: Path) -> LoadedTokenizer:
    file = path / "tokenizer.json"
    if not file.is_file():
        check_is_model(path)
    if not file.is_file():
        raise ModelError(f"{file}: not found; save the model's fast tokenizer there (save_pretrained writes it)")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"{file}: cannot be read as a tokenizer: {str(error)[:200]}; fetch it again") from error
    config = read_json(path / "tokenizer_config.json")
    bos, eos = _token_text(config.get("bos_token")), _token_text(config.get("eos_token"))
    if config.get("add_bos_token") is True and bos is not None and not tokenizer.encode("").ids:
        _add_bos(tokenizer, bos, file)
    return _finish(tokenizer, _directory_template(path, config), bos, eos)


def read_template(given: str) -> str:
    """What --chat-template means: a template has {{ or {% in it, anything else is a file. Raises ModelError."""
    if "{{" in given or "{%" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(
            f"--chat-template {given[:200]}: cannot be read ({str(error)[:200]}); check the path"
        ) from error


def _directory_template(path: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else chat_template.json, else tokenizer_config.json (a string, or a list with "default")."""
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{file}: cannot be read: {error}") from error
    template = read_json(path / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object, {} when the file is absent. Raises ModelError naming the file when it is damaged."""
    value = _read_json(file, {})
    if not isinstance(value, dict):
        raise ModelError(f"{file}: holds a {type(value).__name__}; expected a JSON object")
    return value


def read_json_list(file: Path) -> list[Any]:
    """A JSON array, [] when the file is absent. Raises ModelError naming the file when it is damaged."""
    value = _read_json(file, [])
    if not isinstance(value, list):
        raise ModelError(f"{file}: holds a {type(value).__name__}; expected a JSON array")
    return value


def _read_json(file: Path, absent: object) -> object:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return absent
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file}: cannot be read as JSON: {str(error)[:200]}; fetch it again") from error


def _token_text(token: object) -> str | None:
    """ "<s>" or {"content": "<s>", ...} -> "<s>"."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


# llama.cpp's names of pre-tokenizers (`tokenizer.ggml.pre`). Only those whose rules are published with a model that we
# can compare with; a wrong split gives wrong tokens without an error, so an unknown name is refused.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def _byte_level() -> pre_tokenizers.PreTokenizer:
    """GPT-2's own split."""
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_first() -> pre_tokenizers.PreTokenizer:
    """SmolLM: every digit is its own word, then GPT-2's split."""
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])


def _split_first(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_PRE_TOKENIZERS: Mapping[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _byte_level,
    "smollm": _digits_first,
    "llama-bpe": lambda: _split_first(_LLAMA3_SPLIT),
    "qwen2": lambda: _split_first(_QWEN2_SPLIT),
}
CONTROL, _USER_DEFINED = 3, 4
"""ggml's types of tokens."""


def _from_gguf(metadata: GGUFMetadata) -> LoadedTokenizer:
    path = metadata.path
    kind = metadata.get_str("tokenizer.ggml.model")
    pre = metadata.get_str("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise ModelError(
            f"{path}: tokenizer.ggml.model is {kind!r}; only 'gpt2' (byte-level BPE) is read from .gguf files; "
            "serve the model from its Hugging Face directory"
        )
    if pre is None or pre not in _PRE_TOKENIZERS:
        raise ModelError(
            f"{path}: tokenizer.ggml.pre is {pre!r}; known are {', '.join(sorted(_PRE_TOKENIZERS))}; "
            "serve the model from its Hugging Face directory"
        )
    tokens = metadata.get_strings("tokenizer.ggml.tokens")
    merges = metadata.get_strings("tokenizer.ggml.merges")
    if not tokens or merges is None:
        raise ModelError(f"{path}: tokenizer.ggml.tokens or merges is missing; the file holds no tokenizer")
    types = metadata.get_ints("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError(f"{path}: {len(types)} token types for {len(tokens)} tokens; the file is damaged")
    pairs = [_pair(merge, path) for merge in merges]
    try:
        model = models.BPE(
            vocab={token: index for index, token in enumerate(tokens)}, merges=pairs, ignore_merges=pre == "llama-bpe"
        )
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"{path}: its tokenizer is inconsistent: {str(error)[:200]}") from error
    tokenizer = Tokenizer(model)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(tokens[i], special=True, normalized=False) for i, t in enumerate(types) if t == CONTROL]
    )
    tokenizer.add_tokens(
        [AddedToken(tokens[i], special=False, normalized=False) for i, t in enumerate(types) if t == _USER_DEFINED]
    )
    bos, eos = (_token_at(metadata, f"tokenizer.ggml.{name}_token_id", tokens) for name in ("bos", "eos"))
    if metadata.get_bool("tokenizer.ggml.add_bos_token") and bos is not None:
        _add_bos(tokenizer, bos, path)
    return _finish(tokenizer, metadata.get_str("tokenizer.chat_template"), bos, eos)


def _pair(merge: str, path: Path) -> tuple[str, str]:
    """ "a b" -> ("a", "b"); byte-level tokens hold no space of their own."""
    left, _, right = merge.partition(" ")
    if not left or not right:
        raise ModelError(f"{path}: the merge {merge[:50]!r} is no pair; the file is damaged")
    return left, right


def _token_at(metadata: GGUFMetadata, key: str, tokens: list[str]) -> str | None:
    index = metadata.get_int(key)
    if index is None:
        return None
    if not 0 <= index < len(tokens):
        raise ModelError(f"{metadata.path}: {key} is {index}; it must be in [0, {len(tokens)})")
    return tokens[index]


def _add_bos(tokenizer: Tokenizer, bos: str, path: Path) -> None:
    bos_id = tokenizer.token_to_id(bos)
    if bos_id is None:
        raise ModelError(f"{path}: the BOS token {bos!r} is not in the vocabulary")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos}:0 $A:0", pair=f"{bos}:0 $A:0 {bos}:1 $B:1", special_tokens=[(bos, bos_id)]
    )


def _finish(tokenizer: Tokenizer, template: str | None, bos: str | None, eos: str | None) -> LoadedTokenizer:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    added = tokenizer.get_added_tokens_decoder()
    return LoadedTokenizer(
        tokenizer=tokenizer,
        chat_template=template,
        bos_token=bos,
        bos_token_id=None if bos is None else tokenizer.token_to_id(bos),
        eos_token=eos,
        eos_token_id=None if eos is None else tokenizer.token_to_id(eos),
        special_token_ids=frozenset(index for index, token in added.items() if token.special),
        vocab_size=tokenizer.get_vocab_size(with_added_tokens=True),
    )
