"""A model on a Hugging Face hub: how it is named, which files are needed, what they must hash to. Torch-free.

Names: `hf://org/name`, `hf://org/name@revision`, `hf://org/name@revision/file.gguf`, or the same without `hf://`.
Protocol: https://huggingface.co/docs/hub/api (`/api/models/{repo}/revision/{revision}?blobs=true`, `/resolve/`).
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagefleet_server.model_errors import ModelError

SCHEME = "hf://"
_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9])?"
_NAME = re.compile(
    rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>[A-Za-z0-9][A-Za-z0-9._/-]{{0,199}}?))?"
    r"(?:/(?P<file>(?:[A-Za-z0-9_-][A-Za-z0-9 ._-]{0,199}/){0,4}[A-Za-z0-9_-][A-Za-z0-9 ._-]{0,194}\.gguf))?"
)
COMMIT = re.compile(r"[0-9a-f]{40}")

SMALL_FILES = (".json", ".jinja", ".txt", ".model")
"""Configuration, tokenizer and chat template beside the weights; code of the repository is never fetched."""
MAX_FILES = 20_000
MAX_FILE_BYTES = 2**42
READ_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class HubModel:
    """What is asked for."""

    repo: str
    """org/name"""
    revision: str = "main"
    """Branch, tag or commit."""
    file: str | None = None
    """A .gguf file of the repository; None: its safetensors with everything beside them."""


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file of a commit, with what proves it."""

    name: str
    size: int
    """Bytes."""
    sha256: str | None
    """Of large files; else `blob` is there."""
    blob: str | None
    """Git's id of a small file: SHA-1 of "blob SIZE\\0" and the content."""

    def is_whole(self, path: Path) -> bool:
        """Whether the file at `path` has this content. Reads all of it. Raises OSError."""
        if path.stat().st_size != self.size:
            return False
        digest = hashlib.sha256() if self.sha256 is not None else hashlib.sha1(f"blob {self.size}\0".encode())
        with path.open("rb") as file:
            while data := file.read(READ_BYTES):
                digest.update(data)
        return digest.hexdigest() == (self.sha256 if self.sha256 is not None else self.blob)


def hub_model(model: str) -> HubModel | None:
    """What `--model` asks of a hub; None for a path of this machine. Raises ModelError for a malformed hf:// name."""
    named = model.startswith(SCHEME)
    if not named and (Path(model).exists() or model.endswith(".gguf") or model.startswith(("/", ".", "~"))):
        return None
    found = _NAME.fullmatch(model.removeprefix(SCHEME))
    if found is None or ".." in model:
        if not named:
            return None
        raise ModelError(
            f"{model[:200]}: is no model of a hub; write hf://org/name, hf://org/name@revision or add /file.gguf"
        )
    return HubModel(found["repo"], found["revision"] or "main", found["file"])


def read_listing(repo: str, answer: Any) -> tuple[str, list[HubFile]]:
    """(commit, every file) out of the hub's answer. Raises ModelError when it is not what a hub answers."""
    try:
        commit = str(answer["sha"])
        files = [_read_file(item) for item in answer["siblings"][:MAX_FILES]]
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"the hub's list of {repo} cannot be read ({error!r}); check HF_ENDPOINT") from error
    if COMMIT.fullmatch(commit) is None:
        raise ModelError(f"the hub's list of {repo} names no commit; check HF_ENDPOINT")
    return commit, files


def _read_file(item: Mapping[str, Any]) -> HubFile:
    size, large = int(item["size"]), item.get("lfs")
    if not 0 <= size <= MAX_FILE_BYTES:
        raise ValueError(f"size {size}")
    sha256 = str(large.get("sha256") or large["oid"]) if large else None
    return HubFile(str(item["rfilename"]), size, sha256, None if sha256 else str(item["blobId"]))


def select(model: HubModel, files: Iterable[HubFile]) -> list[HubFile]:
    """The files that a server needs. Raises ModelError when the repository does not hold such a model."""
    by_name = {file.name: file for file in files}
    if model.file is not None:
        if model.file not in by_name:
            some = sorted(name for name in by_name if name.endswith(".gguf"))[:5]
            raise ModelError(
                f"{model.repo}@{model.revision} has no file {model.file}; it has {', '.join(some) or 'no .gguf'}"
            )
        return [by_name[model.file]]
    top = {name: file for name, file in by_name.items() if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9 ._-]*", name)}
    if "config.json" not in top:
        hint = "; name one of its .gguf files" if any(name.endswith(".gguf") for name in by_name) else ""
        raise ModelError(f"{model.repo}@{model.revision} has no config.json: it is no model for this server{hint}")
    weights = [name for name in top if re.fullmatch(r"model.*\.safetensors", name)]
    if "model.safetensors.index.json" not in top:
        weights = [name for name in weights if name == "model.safetensors"]
    if not weights:
        raise ModelError(
            f"{model.repo}@{model.revision} has no model.safetensors: convert its weights, or name a .gguf file of it"
        )
    small = [name for name in top if name.endswith(SMALL_FILES)]
    return [top[name] for name in sorted({*small, *weights})]
