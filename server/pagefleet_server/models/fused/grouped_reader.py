"""Weights that stay in small integers with their own scales: a .gguf file's as they are, others rounded at load."""

import math
from collections.abc import Callable

import torch

from pagefleet_kernels.grouped import GroupedWeight
from pagefleet_server.model_errors import ModelRefused
from pagefleet_server.models.fused import weight_names
from pagefleet_server.models.fused.spec import DecoderSpec
from pagefleet_server.models.fused.weight_sources import GgufSource, WeightSource
from pagefleet_server.models.gguf_groups import bytes_per_weight
from pagefleet_server.models.round_to_groups import GROUP, round_to_groups

GroupedReader = Callable[[str], GroupedWeight | None]
"""A matrix by its name; None: it has no scales of its own and is taken as it is."""
_ROUNDED_BYTES = {"q8_0": 1.0 + 2 / 32, "q4_1": 0.5 + 4 / 32}
"""Of a weight, with its part of scale and minimum."""


def grouped_reader(source: WeightSource, form: str) -> GroupedReader:
    """form: gguf, q8_0 or q4_1, see --quantization. Raises ModelRefused."""
    if form == "gguf":
        if not isinstance(source, GgufSource):
            raise ModelRefused(
                "--quantization gguf keeps the scales of a .gguf file on one rank; this model's weights are not read "
                "that way; use --quantization q8_0 or q4_1, which round, or none"
            )
        return source.read_grouped
    return lambda name: round_to_groups(source.read(name, torch.float32), _rounded_form(name, form))


def grouped_bytes(source: WeightSource, spec: DecoderSpec, form: str, dtype: torch.dtype) -> int:
    """Of all weights once loaded; the embedding's rows stay in dtype."""
    total = 0.0
    for name, shape in source.shapes().items():
        elements = math.prod(shape)
        looked_up = name == f"{weight_names.EMBEDDING}.weight"
        if looked_up or len(shape) != 2:
            total += elements * dtype.itemsize
        if len(shape) == 2 and (not looked_up or spec.tied):
            total += elements * (_bytes_per_weight(source, name, shape, form) or dtype.itemsize)
    return math.ceil(total)


def _bytes_per_weight(source: WeightSource, name: str, shape: tuple[int, ...], form: str) -> float | None:
    if form == "gguf":
        return bytes_per_weight(source.kind(name)) if isinstance(source, GgufSource) else None
    return _ROUNDED_BYTES[_rounded_form(name, form)] if shape[1] % GROUP == 0 else None


def _rounded_form(name: str, form: str) -> str:
    """Logits are the most sensitive to rounding: their matrix gets eight bits, as ggml's own mixtures give it."""
    return "q8_0" if name in (f"{weight_names.EMBEDDING}.weight", f"{weight_names.HEAD}.weight") else form
