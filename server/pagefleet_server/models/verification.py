"""Whether an architecture is known to run right: by the shipped list, by an earlier self-test, by one made now.

The list (architectures.json) holds for one version of transformers, and for configurations whose switches are set as in
one that was tested; docs/models.md is made from it. For everything else the self-test runs once; its pass is remembered
on disk by class, version and the small configuration that was tested.
"""

import functools
import hashlib
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig

from pagefleet_kernels.cpu.build import cache_dir
from pagefleet_server.model_errors import ModelRefused, ModelUnverified
from pagefleet_server.models.self_test import self_test
from pagefleet_server.models.shrunken import shrink

_logger = logging.getLogger(__name__)

_NO_SWITCHES = frozenset(
    {
        "_name_or_path",
        "dtype",
        "finetuning_task",
        "output_attentions",
        "output_hidden_states",
        "problem_type",
        "return_dict",
        "tie_word_embeddings",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
"""Names and switches that choose nothing between tokens and logits, or only share weights."""
TABLE_FILE = Path(__file__).with_name("architectures.json")


class Architecture(msgspec.Struct, frozen=True, omit_defaults=True):
    """One entry of the shipped list."""

    model_class: str
    """transformers' class."""
    relative_error: float | None = None
    """Of the self-test; None for a refused one."""
    reason: str = ""
    """Why it is refused; empty for a verified one."""
    note: str = ""
    """What a reader should know besides."""
    switches: tuple[str, ...] = ()
    """Fingerprints of the tested configurations' switches."""

    @property
    def is_verified(self) -> bool:
        """It passed."""
        return self.relative_error is not None


class ArchitectureTable(msgspec.Struct, frozen=True):
    """The shipped list; made by tools/survey_models.py."""

    transformers_version: str
    torch_version: str
    architectures: dict[str, Architecture]
    """By model_type."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a model may be served."""

    by: Literal["list", "memory", "self-test", "trust"]


@functools.cache
def shipped_table() -> ArchitectureTable:
    """The list as shipped."""
    return msgspec.json.decode(TABLE_FILE.read_bytes(), type=ArchitectureTable)


def verify(config: PreTrainedConfig, *, trust: bool, remembered: Path | None = None) -> Verdict:
    """Raises ModelRefused when it cannot run, ModelUnverified when nothing shows that it runs right and `trust` is off.
    remembered: folder of earlier passes, the cache's by default."""
    if _is_listed(config):
        return Verdict("list")
    note = _note_of(config, remembered if remembered is not None else cache_dir() / "self-tests")
    if note is not None and note.is_file():
        return Verdict("memory")
    try:
        result = self_test(config)
    except ModelUnverified as error:
        distrust(error, trust=trust)
        return Verdict("trust")
    _logger.info(
        "self-test of a small %s: %d layers, off by %.1e of the largest logit",
        config.model_type,
        result.num_layers,
        result.relative_error,
    )
    if note is not None:
        _remember(note)
    return Verdict("self-test")


def distrust(error: ModelUnverified, *, trust: bool) -> None:
    """Raise it, or say loudly that it was overridden."""
    if not trust:
        raise ModelUnverified(f"{error} (--trust-unverified-model serves it nevertheless)") from error
    _logger.warning(
        "--trust-unverified-model: THIS MODEL'S ANSWERS MAY BE WRONG. It would be refused, because %s", error
    )


def fingerprint(config: PreTrainedConfig) -> str:
    """Of everything in the configuration that is on or off, or a name, and so may choose other code. Sizes and numbers
    are not in it."""
    text = config.get_text_config(decoder=True).to_dict()
    switches = {
        name: value
        for name, value in sorted(text.items())
        if (value is None or isinstance(value, bool | str)) and name not in _NO_SWITCHES and not name.endswith("_id")
    }
    rope = text.get("rope_parameters")
    kinds = {
        name: sorted({str(item) for item in value})
        for name, value in text.items()
        if name.endswith("_types") and isinstance(value, list)
    }
    document = json.dumps([switches, kinds, rope.get("rope_type") if isinstance(rope, dict) else None], sort_keys=True)
    return hashlib.sha256(document.encode()).hexdigest()[:16]


def _is_listed(config: PreTrainedConfig) -> bool:
    table = shipped_table()
    entry = table.architectures.get(config.model_type)
    return (
        transformers.__version__ == table.transformers_version
        and entry is not None
        and entry.is_verified
        and entry.model_class == class_name(config)
        and fingerprint(config) in entry.switches
    )


def class_name(config: PreTrainedConfig) -> str:
    """transformers' class for it. Raises ModelRefused when there is none."""
    found = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if found is None:
        raise ModelRefused(f"{config.model_type} is no causal language model that transformers knows")
    return str(getattr(found, "__name__", found))


def _note_of(config: PreTrainedConfig, folder: Path) -> Path | None:
    """File of an earlier pass. None when no small copy can be made: the self-test will say why."""
    try:
        small = json.dumps(shrink(config).to_dict(), sort_keys=True, default=str)
    except Exception:  # noqa: BLE001 - foreign code, any configuration; the self-test meets it again and reports it
        return None
    digest = hashlib.sha256(small.encode()).hexdigest()[:16]
    return folder / f"{class_name(config)}-{transformers.__version__}-{digest}"


def _remember(note: Path) -> None:
    """Best effort: without the note the test runs again at the next start."""
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        scratch = note.with_name(f"{note.name}.{os.getpid()}")
        scratch.write_text("passed\n", encoding="utf-8")
        scratch.replace(note)
    except OSError as error:
        _logger.info("the pass of the self-test is not remembered: %s: %s", note, error.strerror or error)
