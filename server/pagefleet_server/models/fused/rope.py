"""Tables of rotary angles. Sources: RoFormer (2104.09864), YaRN (2309.00071), LongRoPE (2402.13753), and for llama3 the
description of Llama 3.1's configuration.

Angles are computed in float32 as transformers computes them: position times inverse frequency, both in float32.
"""

import math
from collections.abc import Callable, Mapping

import torch

from pagefleet_server.models.fused.spec import NotFused, RopeSpec

Check = Callable[[Mapping[str, object], int], None]


def cos_sin(spec: RopeSpec, num_positions: int) -> torch.Tensor:
    """float32 [num_positions, rotary_dim]: cosines of rotary_dim / 2 angles, then their sines, scaling included."""
    frequencies, scale = inverse_frequencies(spec)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return torch.cat((angles.cos() * scale, angles.sin() * scale), dim=1)


def inverse_frequencies(spec: RopeSpec) -> tuple[torch.Tensor, float]:
    """float32 [rotary_dim / 2], and the factor on cosines and sines. Within the length up to which no rescaling by the
    longest sequence sets in (dynamic, longrope): see rope_config.Ropes."""
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32) / spec.rotary_dim
    plain = 1.0 / spec.theta**exponents
    match spec.kind:
        case "linear":
            return plain / _number(spec.parameters, "factor"), 1.0
        case "llama3":
            return _llama3(spec, plain), 1.0
        case "yarn":
            return _yarn(spec, exponents)
        case "longrope":
            short = torch.tensor(_numbers(spec.parameters, "short_factor"), dtype=torch.float32)
            return 1.0 / (short * spec.theta**exponents), _longrope_scale(spec.parameters)
        case _:
            return plain, 1.0


def _llama3(spec: RopeSpec, plain: torch.Tensor) -> torch.Tensor:
    """Long waves are stretched by factor, short ones are left, those between are blended."""
    values = spec.parameters
    factor, low = _number(values, "factor"), _number(values, "low_freq_factor")
    high, original = _number(values, "high_freq_factor"), _number(values, "original_max_position_embeddings")
    waves = 2 * math.pi / plain
    blend = (original / waves - low) / (high - low)
    blended = (1 - blend) * plain / factor + blend * plain
    stretched = torch.where(waves > original / low, plain / factor, blended)
    return torch.where(waves < original / high, plain, stretched)


def _yarn(spec: RopeSpec, exponents: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Elements that turn often keep their frequency, those that turn rarely are stretched, with a ramp between."""
    values, dim = spec.parameters, spec.rotary_dim
    original = _number(values, "original_max_position_embeddings")
    factor = _optional(values, "factor") or _number(values, "max_position_embeddings") / original
    fast, slow = _optional(values, "beta_fast") or 32.0, _optional(values, "beta_slow") or 1.0

    def element(turns: float) -> float:
        """The one that turns so often within the original length."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = element(fast), element(slow)
    if values.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    keep = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    periods = spec.theta**exponents
    return 1.0 / (factor * periods) * (1 - keep) + 1.0 / periods * keep, _yarn_scale(values, factor)


def _yarn_scale(values: Mapping[str, object], factor: float) -> float:
    given = _optional(values, "attention_factor")
    if given is not None:
        return given

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    one, all_dims = _optional(values, "mscale"), _optional(values, "mscale_all_dim")
    return scale(one) / scale(all_dims) if one and all_dims else scale(1.0)


def _longrope_scale(values: Mapping[str, object]) -> float:
    given = _optional(values, "attention_factor")
    if given is not None:
        return given
    original = _number(values, "original_max_position_embeddings")
    factor = _optional(values, "factor") or _number(values, "max_position_embeddings") / original
    return 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))


def _check_keys(needed: tuple[str, ...], optional: tuple[str, ...] = ()) -> Check:
    known = {*needed, *optional, "max_position_embeddings", "original_max_position_embeddings"}

    def check(values: Mapping[str, object], rotary_dim: int) -> None:
        for key in needed:
            _number(values, key)
        unknown = sorted(key for key in values if key not in known and values[key] is not None)
        if unknown:
            raise NotFused(f"its RoPE has {', '.join(unknown)}")

    return check


def _check_longrope(values: Mapping[str, object], rotary_dim: int) -> None:
    _check_keys(("original_max_position_embeddings",), ("short_factor", "long_factor", "factor", "attention_factor"))(
        values, rotary_dim
    )
    if len(_numbers(values, "short_factor")) != rotary_dim // 2:
        raise NotFused(f"short_factor does not have {rotary_dim // 2} numbers")


CHECKS: Mapping[str, Check] = {
    "default": _check_keys((), ("factor",)),
    "linear": _check_keys(("factor",)),
    "dynamic": _check_keys(("factor",)),
    "llama3": _check_keys(("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")),
    "yarn": _check_keys(
        ("original_max_position_embeddings",),
        ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": _check_longrope,
}
"""Kind -> refuses (NotFused) parameters that are missing or that we do not know."""


def _number(values: Mapping[str, object], key: str) -> float:
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise NotFused(f"RoPE's {key} is {value!r}")
    return float(value)


def _optional(values: Mapping[str, object], key: str) -> float | None:
    return None if values.get(key) is None else _number(values, key)


def _numbers(values: Mapping[str, object], key: str) -> list[float]:
    value = values.get(key)
    if not isinstance(value, list) or not all(isinstance(item, int | float) for item in value):
        raise NotFused(f"RoPE's {key} is no list of numbers")
    return [float(item) for item in value]
