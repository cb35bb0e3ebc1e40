"""Whether a model makes embeddings, and of which hidden states. Torch-free: the checkpoint says it in small files.

Sentence-transformers' layout: modules.json lists what follows the transformer; 1_Pooling/config.json says the kind.
"""

from pathlib import Path
from typing import Literal

from pagefleet_server.model_errors import ModelError, ModelRefused
from pagefleet_server.settings import ModelSettings
from pagefleet_server.tokenizer import read_json, read_json_list

Pooling = Literal["last", "mean"]

_KINDS: dict[str, Pooling] = {"lasttoken": "last", "last": "last", "mean": "mean", "mean_tokens": "mean"}
_FLAG = "pooling_mode_"


def pooling_of(settings: ModelSettings) -> Pooling | None:
    """None: the model makes texts. Raises ModelRefused for an embedding model that would be computed wrong."""
    if settings.pooling == "none":
        return None
    if settings.pooling in ("last", "mean"):
        return "last" if settings.pooling == "last" else "mean"
    return _declared(Path(settings.model))


def _declared(path: Path) -> Pooling | None:
    """What modules.json says; None without one."""
    file = path / "modules.json"
    modules = read_json_list(file)
    if not modules:
        return None
    folders: dict[str, str] = {}
    for module in modules:
        if not isinstance(module, dict):
            raise ModelError(f"{file}: holds a {type(module).__name__}; expected a list of objects; fetch it again")
        folders[str(module.get("type", "")).rpartition(".")[2]] = str(module.get("path", ""))
    foreign = sorted(folders.keys() - {"Transformer", "Pooling", "Normalize"})
    if foreign or "Pooling" not in folders:
        raise ModelRefused(
            f"{file}: its embeddings go through {', '.join(foreign) or 'no pooling'}; only pooling and normalising are "
            "served. --pooling none serves the model as a language model"
        )
    config_file = path / folders["Pooling"] / "config.json"
    config = read_json(config_file)
    modes = [name.removeprefix(_FLAG) for name, value in config.items() if name.startswith(_FLAG) and value is True]
    modes = modes or ([str(config["pooling_mode"])] if "pooling_mode" in config else [])
    kind = _KINDS.get(modes[0]) if len(modes) == 1 else None
    if kind is None:
        raise ModelRefused(
            f"{config_file}: pooling {', '.join(modes) or 'of no kind'}; only lasttoken and mean_tokens are served"
        )
    return kind
