"""What lies at the model's path: checked in milliseconds, before anything heavy is imported or read."""

import json
import struct
from dataclasses import dataclass
from pathlib import Path

from pagefleet_server.gguf_metadata import GGUFMetadata, read_gguf_metadata
from pagefleet_server.model_errors import ModelError
from pagefleet_server.tokenizer import read_json

MAX_HEADER_BYTES = 100 * 1024 * 1024
"""The safetensors format's own bound."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A directory or a .gguf file that holds what it promises."""

    directory: Path
    gguf_file: str | None
    """Name inside the directory; None for a Hugging Face directory."""
    gguf: GGUFMetadata | None

    @property
    def path(self) -> Path:
        """What the user gave."""
        return self.directory if self.gguf_file is None else self.directory / self.gguf_file


def open_checkpoint(model: str, *, need_weights: bool = True) -> Checkpoint:
    """Check the path: configuration there, every weight file there and whole. Raises ModelError naming the file."""
    path = Path(model)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{path}: holds no config.json; give a Hugging Face model directory or a .gguf file")
        read_json(path / "config.json")
        if need_weights:
            for file in _weight_files(path):
                _check_safetensors(file)
        return Checkpoint(directory=path, gguf_file=None, gguf=None)
    if not path.exists():
        raise ModelError(f"{path}: no such file or directory; give a Hugging Face model directory or a .gguf file")
    if path.suffix != ".gguf":
        raise ModelError(f"{path}: is neither a directory nor a .gguf file")
    return Checkpoint(directory=path.parent, gguf_file=path.name, gguf=read_gguf_metadata(path))


def _weight_files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        weights = read_json(index).get("weight_map")
        if not isinstance(weights, dict) or not weights:
            raise ModelError(f"{index}: has no weight_map; fetch it again")
        files = [path / str(name) for name in sorted(set(weights.values()))]
    else:
        files = [path / "model.safetensors"]
    for file in files:
        if not file.is_file():
            pickled = any(path.glob("pytorch_model*.bin"))
            hint = "; convert the pickled .bin weights to safetensors" if pickled else "; fetch it again"
            raise ModelError(f"{file}: not found{hint}")
    return files


def _check_safetensors(file: Path) -> None:
    """Header readable, and the file as long as the header says."""
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            head = stream.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            if not 2 <= length <= min(MAX_HEADER_BYTES, size):
                raise ModelError(f"{file}: is truncated or no safetensors file ({size} bytes); fetch it again")
            header = json.loads(stream.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({error.strerror or error}); check the path") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ModelError(f"{file}: its header is damaged; fetch it again") from error
    needed = 8 + length + max(ends, default=0)
    if size < needed:
        raise ModelError(f"{file}: is truncated: {size} bytes, {needed} needed; fetch it again")
