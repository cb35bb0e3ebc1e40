"""What lies at the model's path: checked in milliseconds, before anything heavy is imported or read."""

from dataclasses import dataclass
from pathlib import Path

from pagefleet_server.gguf_metadata import GGUFMetadata, read_gguf_metadata
from pagefleet_server.model_errors import ModelError
from pagefleet_server.models.config_sizes import check_sizes
from pagefleet_server.models.safetensors_table import read_tensor_table
from pagefleet_server.tokenizer import check_is_model, read_json

INDEX = "model.safetensors.index.json"


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
        check_is_model(path)
        check_sizes(path / "config.json", read_json(path / "config.json"))
        if need_weights:
            _check_weights(path)
        return Checkpoint(directory=path, gguf_file=None, gguf=None)
    if not path.exists():
        raise ModelError(f"{path}: no such file or directory; give a Hugging Face model directory or a .gguf file")
    if path.suffix != ".gguf":
        raise ModelError(f"{path}: is neither a directory nor a .gguf file")
    return Checkpoint(directory=path.parent, gguf_file=path.name, gguf=read_gguf_metadata(path))


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a directory, all of them there. Raises ModelError naming the first that is not."""
    weights = _weight_map(path)
    files = [path / name for name in sorted(set(weights.values()))] or [path / "model.safetensors"]
    for file in files:
        if not file.is_file():
            pickled = any(path.glob("pytorch_model*.bin"))
            hint = "; convert the pickled .bin weights to safetensors" if pickled else "; fetch it again"
            raise ModelError(f"{file}: not found{hint}")
    return files


def _weight_map(path: Path) -> dict[str, str]:
    """Tensor -> file, by the index; {} without one."""
    index = path / INDEX
    if not index.is_file():
        return {}
    weights = read_json(index).get("weight_map")
    if not isinstance(weights, dict) or not weights:
        raise ModelError(f"{index}: has no weight_map; fetch it again")
    for name in weights.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelError(f"{index}: names {str(name)[:100]!r}, which is no file beside it; fetch it again")
    return weights


def _check_weights(path: Path) -> None:
    """Every file whole, and every tensor of the index in its file."""
    tables = {file.name: read_tensor_table(file) for file in weight_files(path)}
    for tensor, name in _weight_map(path).items():
        if tensor not in tables[name]:
            raise ModelError(f"{path / name}: holds no tensor {tensor[:200]}, which {INDEX} says; fetch both again")
