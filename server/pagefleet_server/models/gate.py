"""Which models this server can run: what would give wrong answers in silence is refused with the reason.

Many architectures accept a foreign attention function and then compute part of their mixing elsewhere (recurrent
layers, masks that encode chunks, two attention calls per layer). Flags alone do not tell; a dry run does.
"""

import inspect

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from pagefleet_server.model_errors import ModelRefused, ModelUnverified
from pagefleet_server.models.attention_hook import CONTEXT_ARGUMENT, IMPLEMENTATION
from pagefleet_server.models.probe import LayerSpec, ProbeContext

ALLOWED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
"""Values of config.layer_types whose meaning reaches attention as arguments."""
PROBE_TOKENS = 4


def check_config(config: PreTrainedConfig) -> None:
    """Refuse by configuration alone, before weights are read. Raises ModelRefused; ModelUnverified for layer types that
    may or may not reach attention as arguments."""
    if getattr(config, "is_encoder_decoder", False):
        raise ModelRefused("it is an encoder-decoder; only causal decoders are served")
    text = config.get_text_config(decoder=True)
    if getattr(text, "is_causal", True) is False or getattr(text, "use_bidirectional_attention", None) in (
        True,
        "all",  # "vision" is about the tokens of one image, and there are none
    ):
        raise ModelRefused("its tokens attend to later ones; only causal decoders are served")
    foreign = sorted({str(kind) for kind in getattr(text, "layer_types", None) or ()} - ALLOWED_LAYER_TYPES)
    if foreign:
        raise ModelUnverified(
            f"it has layers of type {', '.join(foreign)}; only {' and '.join(sorted(ALLOWED_LAYER_TYPES))} run on a "
            "paged KV cache"
        )


def keeps_logit_rows(module: PreTrainedModel) -> bool:
    """It computes the logits of chosen rows only, given as logits_to_keep."""
    return "logits_to_keep" in inspect.signature(module.forward).parameters


@torch.inference_mode()
def check_module(module: PreTrainedModel) -> tuple[LayerSpec, ...]:
    """Dry run of a loaded module; returns its layers in order. Raises ModelRefused."""
    if getattr(module, "_is_stateful", False):
        raise ModelRefused("it keeps recurrent state between steps; only attention models are served")
    text = module.config.get_text_config(decoder=True)
    if text._attn_implementation != IMPLEMENTATION:
        raise ModelRefused(f"{type(module).__name__} does not dispatch its attention through AttentionInterface")
    context = ProbeContext(PROBE_TOKENS)
    device = module.device
    token_ids = torch.arange(PROBE_TOKENS, device=device).remainder(text.vocab_size)
    module(
        input_ids=token_ids.unsqueeze(0),
        position_ids=torch.arange(PROBE_TOKENS, device=device).unsqueeze(0),
        use_cache=False,
        **{CONTEXT_ARGUMENT: context},
    )
    want = list(range(int(text.num_hidden_layers)))
    if sorted(context.layers) != want:
        missing = sorted(set(want) ^ set(context.layers))
        raise ModelRefused(
            f"{type(module).__name__} has {len(want)} layers, but layers {missing[:8]} do not call attention as such"
        )
    return tuple(context.layers[index] for index in want)
