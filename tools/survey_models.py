"""Tests every causal language model of the installed transformers and writes the list of what can be served.

    python tools/survey_models.py            # minutes: architectures.json and docs/models.md
    python tools/survey_models.py --page     # the page alone, from architectures.json
    python tools/survey_models.py llama mamba  # only says what comes out for these

Each architecture runs in a process of its own, with a time limit, on a shrunken copy of its default configuration (see
pagefleet_server.models.self_test) and of those in TYPICAL.
"""

import argparse
import multiprocessing
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pagefleet_server.model_errors import ModelError
from pagefleet_server.models.self_test import self_test
from pagefleet_server.models.verification import TABLE_FILE, Architecture, ArchitectureTable, class_name, fingerprint

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
SECONDS = 120.0
"""For one architecture."""

_YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 4096}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.1] * 48,
    "long_factor": [2.0] * 48,
    "original_max_position_embeddings": 4096,
}
TYPICAL: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "deepseek_v2": (
        {"num_experts_per_tok": 6, "n_group": 8, "topk_group": 3, "topk_method": "group_limited_greedy"},
        {"num_experts_per_tok": 6, "q_lora_rank": None},
    ),
    "deepseek_v3": ({}, {"q_lora_rank": None}),
    "dots1": ({"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "head_dim": 128},),
    "gemma4_text": (
        {},
        {"num_kv_shared_layers": 10},
        {"attention_k_eq_v": True, "num_global_key_value_heads": 4},
        {"attention_k_eq_v": True, "num_global_key_value_heads": 4, "use_bidirectional_attention": "vision"},
    ),
    "hunyuan_v1_dense": ({"head_dim": 128},),
    "hunyuan_v1_moe": ({"head_dim": 128, "num_experts": 8, "moe_topk": 2},),
    "lfm2_moe": ({"layer_types": ["full_attention"] * 4, "num_hidden_layers": 4},),
    "llama": ({}, {"rope_parameters": _LLAMA3}, {"attention_bias": True}),
    "ministral": ({"head_dim": 128},),
    "mistral": ({}, {"sliding_window": None}),
    "olmo2": ({}, {"rope_parameters": _YARN}),
    "phi3": ({}, {"sliding_window": 2047}, {"rope_parameters": _LONGROPE, "max_position_embeddings": 131072}),
    "qwen2": ({}, {"use_sliding_window": True, "max_window_layers": 14}, {"rope_parameters": _YARN}),
    "qwen3": ({}, {"rope_parameters": _YARN}),
    "qwen3_moe": ({}, {"decoder_sparse_step": 2, "mlp_only_layers": [0]}, {"norm_topk_prob": True}),
    "starcoder2": ({}, {"sliding_window": 4096}),
}
"""Configurations as in released checkpoints: where a class's defaults are no model, or leave a feature out."""
ATTENTION_ONLY = "only configurations without convolution layers"
NOTES = {"lfm2": ATTENTION_ONLY, "lfm2_moe": ATTENTION_ONLY}


def survey_one(model_type: str) -> Architecture:
    """Every tested configuration must pass; the worst error counts."""
    name = str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    errors, switches = [], []
    note = NOTES.get(model_type, "")
    try:
        for changes in TYPICAL.get(model_type, ({},)):
            config = AutoConfig.for_model(model_type, **changes)
            assert isinstance(config, PreTrainedConfig)
            name = class_name(config)
            if config.get_text_config(decoder=True) is not config:
                note = "text only"
            errors.append(self_test(config).relative_error)
            switches.append(fingerprint(config))
    except ModelError as error:
        return Architecture(model_class=name, reason=str(error))
    except Exception as error:  # noqa: BLE001 - foreign code: whatever it raises, this architecture is not verified
        return Architecture(model_class=name, reason=f"no configuration of it can be made: {str(error)[:150]}")
    return Architecture(
        model_class=name, relative_error=float(f"{max(errors):.1e}"), note=note, switches=tuple(dict.fromkeys(switches))
    )


def survey_apart(model_type: str) -> Architecture:
    """In a child process: a crash or a hang is this architecture's own."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_report, args=(model_type, there))
    child.start()
    there.close()
    try:
        answer = here.recv_bytes() if here.poll(SECONDS) else None
    except EOFError:
        answer = None
    child.kill()
    child.join()
    if answer is None:
        name = str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
        return Architecture(model_class=name, reason=f"its self-test crashed, or took more than {SECONDS:g} s")
    return msgspec.json.decode(answer, type=Architecture)


def _report(model_type: str, out: Connection) -> None:
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    out.send_bytes(msgspec.json.encode(survey_one(model_type)))


HEAD = """# Which models can be served

Generated by `tools/survey_models.py` from the list that the server ships; transformers {transformers}, torch {torch}.

Any decoder that transformers can load, from a Hugging Face directory with safetensors. Before an architecture counts
as verified, a small random copy of it has run on our attention in chunked, mixed batches, beyond two attention windows,
and every logit was compared with transformers' own eager attention in float32; the error is a part of the largest
logit.

**{verified} of {total} architectures are verified.** For one that is not on the list, with other switches in its
configuration than were tested, or with another version of transformers, the server makes the same test at its start (a
second, remembered in its cache folder), and ends with exit code 3 and the reason when it fails.
`--trust-unverified-model` serves it nevertheless and says so loudly; it cannot help where the paged cache has no place
for what a layer keeps.

## Verified

| model_type | class | error | |
|---|---|---|---|
"""
REFUSED_HEAD = """
## Refused

| model_type | class | because |
|---|---|---|
"""


def render(table: ArchitectureTable) -> str:
    """docs/models.md."""
    entries = sorted(table.architectures.items())
    verified = [(name, entry) for name, entry in entries if entry.is_verified]
    refused = [(name, entry) for name, entry in entries if not entry.is_verified]
    head = HEAD.format(
        transformers=table.transformers_version,
        torch=table.torch_version,
        verified=len(verified),
        total=len(entries),
    )
    good = "".join(f"| {name} | {e.model_class} | {e.relative_error:.0e} | {e.note} |\n" for name, e in verified)
    bad = "".join(f"| {name} | {e.model_class} | {_cell(e.reason)} |\n" for name, e in refused)
    return head + good + REFUSED_HEAD + bad


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model_types", nargs="*", help="only these; nothing is written")
    parser.add_argument("--page", action="store_true", help="only write the page from the list as it is")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # and so no thread pool that a fork would break
    if arguments.page:
        table = msgspec.json.decode(TABLE_FILE.read_bytes(), type=ArchitectureTable)
        PAGE.write_text(render(table), encoding="utf-8")
        return
    found: dict[str, Architecture] = {}
    for model_type in arguments.model_types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        entry = found[model_type] = survey_apart(model_type)
        said = f"verified, {entry.relative_error:.1e}" if entry.relative_error is not None else entry.reason
        sys.stdout.write(f"{model_type}: {said}\n")
        sys.stdout.flush()
    if not arguments.model_types:
        table = ArchitectureTable(transformers.__version__, torch.__version__.partition("+")[0], found)
        document = msgspec.json.format(msgspec.json.encode(table), indent=1)
        TABLE_FILE.write_bytes(document + b"\n")
        PAGE.write_text(render(table), encoding="utf-8")


if __name__ == "__main__":
    main()
