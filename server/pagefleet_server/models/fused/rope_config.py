"""Rotary settings from a configuration, in the forms that checkpoints have had over the years."""

from dataclasses import dataclass

from pagefleet_server.models.fused.config_reader import ConfigReader
from pagefleet_server.models.fused.rope import CHECKS
from pagefleet_server.models.fused.spec import NotFused, RopeSpec

DEFAULT_THETA = 10_000.0
GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0
"""Of full and of sliding layers, where they differ (Gemma 3)."""


@dataclass(frozen=True, slots=True)
class Ropes:
    """A model's rotary embeddings."""

    full: RopeSpec
    sliding: RopeSpec
    max_positions: int
    """Tokens of one sequence at most: kinds that rescale beyond a length, by the longest sequence of the batch, are
    held below it, for there one request would change its neighbours."""

    def of(self, window: int | None) -> RopeSpec:
        """The one of a layer with such a window."""
        return self.full if window is None else self.sliding


def one_rope(config: ConfigReader, head_dim: int) -> Ropes:
    """The same in every layer: rope_parameters, or the older rope_theta and rope_scaling."""
    limit = config.integer("max_position_embeddings")
    original = config.integer_or_none("original_max_position_embeddings")
    theta, partial = config.number_or_none("rope_theta"), config.number_or_none("partial_rotary_factor")
    scaling, parameters = config.mapping("rope_scaling"), config.mapping("rope_parameters")
    spec = _spec(dict(scaling or parameters), theta or DEFAULT_THETA, partial, head_dim, limit, original)
    return Ropes(spec, spec, _limit(limit, spec))


def ropes_by_layer_type(config: ConfigReader, head_dim: int) -> Ropes:
    """One of full layers, which may be scaled, and one of sliding layers."""
    limit = config.integer("max_position_embeddings")
    theta, local = config.number_or_none("rope_theta"), config.number_or_none("rope_local_base_freq")
    scaling, both = config.mapping("rope_scaling"), config.mapping("rope_parameters")
    if set(both) - {"full_attention", "sliding_attention"}:
        raise NotFused(f"rope_parameters has {', '.join(sorted(both))}")
    full, sliding = both.get("full_attention") or {}, both.get("sliding_attention") or {}
    if not isinstance(full, dict) or not isinstance(sliding, dict):
        raise NotFused("rope_parameters holds no objects")
    of_full = _spec({**full, **scaling}, theta or GLOBAL_THETA, None, head_dim, limit, None)
    of_sliding = _spec(dict(sliding), local or LOCAL_THETA, None, head_dim, limit, None)
    return Ropes(of_full, of_sliding, min(_limit(limit, of_full), _limit(limit, of_sliding)))


def _spec(
    values: dict[str, object], theta: float, partial: float | None, head_dim: int, limit: int, original: int | None
) -> RopeSpec:
    kind = values.pop("rope_type", None) or values.get("type") or "default"
    values.pop("type", None)
    if kind == "su" or (kind == "yarn" and "short_factor" in values):
        kind = "longrope"  # Phi-3's older names for it
    if kind not in CHECKS:
        raise NotFused(f"its RoPE is of type {kind}")
    theta = _number(values.pop("rope_theta", theta), "rope_theta")
    factor = _number(values.pop("partial_rotary_factor", partial or 1.0), "partial_rotary_factor")
    if original is not None:
        values["original_max_position_embeddings"] = original
    elif kind in ("llama3", "yarn", "longrope"):
        values.setdefault("original_max_position_embeddings", limit)
    values["max_position_embeddings"] = limit
    rotary_dim = int(head_dim * factor)
    if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
        raise NotFused(f"{rotary_dim} of {head_dim} elements turn")
    CHECKS[str(kind)](values, rotary_dim)
    return RopeSpec(kind=str(kind), theta=theta, rotary_dim=rotary_dim, parameters=values)


def _limit(limit: int, spec: RopeSpec) -> int:
    original = spec.parameters.get("original_max_position_embeddings")
    rescales = spec.kind in ("dynamic", "longrope")
    return min(limit, original) if rescales and isinstance(original, int) else limit


def _number(value: object, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise NotFused(f"{key} is {value!r}")
    return float(value)
