"""Names and shapes of a checkpoint's tensors: the same as transformers' modules."""

from collections.abc import Iterator, Mapping

from pagefleet_server.models.fused.spec import DecoderSpec

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens", "model.norm", "lm_head"
IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".masked_bias", ".attention.bias")
"""Tensors that older tools wrote and that follow from the configuration."""

Shape = tuple[int, ...]


def layer(index: int, part: str) -> str:
    """`model.layers.3.mlp.up_proj`."""
    return f"model.layers.{index}.{part}"


def attention_norm(spec: DecoderSpec) -> str | None:
    """In front of attention."""
    return "input_layernorm" if spec.pre_norm else None


def mlp_norm(spec: DecoderSpec) -> str | None:
    """In front of the MLP."""
    if not spec.pre_norm:
        return None
    return "pre_feedforward_layernorm" if spec.post_norm else "post_attention_layernorm"


def attention_post_norm(spec: DecoderSpec) -> str | None:
    """Of attention's result."""
    return "post_attention_layernorm" if spec.post_norm else None


def mlp_post_norm(spec: DecoderSpec) -> str | None:
    """Of the MLP's result."""
    return "post_feedforward_layernorm" if spec.post_norm else None


def qkv(spec: DecoderSpec) -> dict[str, int]:
    """Linears whose rows, one after the other, give query, key and value -> rows of each."""
    if spec.merged_weights:
        return {"self_attn.qkv_proj": spec.q_width + 2 * spec.kv_width}
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    return dict(zip(names, (spec.q_width, spec.kv_width, spec.kv_width), strict=True))


def mlp_in(spec: DecoderSpec) -> dict[str, int]:
    """Linears into the MLP: gates, then ups -> rows of each."""
    width = spec.intermediate_size
    if not spec.gated:
        return {"mlp.c_fc": width}
    if spec.merged_weights:
        return {"mlp.gate_up_proj": 2 * width}
    return {"mlp.gate_proj": width, "mlp.up_proj": width}


def mlp_out(spec: DecoderSpec) -> str:
    """The linear out of the MLP."""
    return "mlp.down_proj" if spec.gated else "mlp.c_proj"


ATTENTION_OUT = "self_attn.o_proj"
QUERY_NORM, KEY_NORM = "self_attn.q_norm", "self_attn.k_norm"


def expected(spec: DecoderSpec) -> Mapping[str, Shape]:
    """Every tensor that the checkpoint must hold -> shape."""
    return dict(_expected(spec))


def _expected(spec: DecoderSpec) -> Iterator[tuple[str, Shape]]:
    hidden = spec.hidden_size
    yield f"{EMBEDDING}.weight", (spec.vocab_size, hidden)
    yield from _norm(spec, FINAL_NORM, hidden)
    if not spec.tied:
        yield f"{HEAD}.weight", (spec.vocab_size, hidden)
    norms = [f(spec) for f in (attention_norm, mlp_norm, attention_post_norm, mlp_post_norm)]
    for index in range(len(spec.layers)):
        for name in norms:
            if name is not None:
                yield from _norm(spec, layer(index, name), hidden)
        if spec.head_norm or spec.width_norm:
            widths = (spec.head_dim, spec.head_dim) if spec.head_norm else (spec.q_width, spec.kv_width)
            for name, width in zip((QUERY_NORM, KEY_NORM), widths, strict=True):
                yield f"{layer(index, name)}.weight", (width,)
        for part, rows in qkv(spec).items():
            yield from _linear(layer(index, part), rows, hidden, bias=spec.qkv_bias)
        yield from _linear(layer(index, ATTENTION_OUT), hidden, spec.q_width, bias=spec.output_bias)
        for part, rows in mlp_in(spec).items():
            yield from _linear(layer(index, part), rows, hidden, bias=spec.mlp_bias)
        yield from _linear(layer(index, mlp_out(spec)), hidden, spec.intermediate_size, bias=spec.mlp_bias)


def _norm(spec: DecoderSpec, name: str, width: int) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (width,)
    if spec.centred_norm:
        yield f"{name}.bias", (width,)


def _linear(name: str, rows: int, columns: int, *, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)
