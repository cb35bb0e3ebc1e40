"""Our attention in transformers' AttentionInterface: every layer of a compliant model calls it on flattened tokens.

The step's context travels as a keyword argument of the model's call, which transformers hands down to the attention
function; there is no global state. The mask registry knows no mask for our name, so masks arrive as None and causality
and windows are the context's duty.
"""

import torch
from transformers import AttentionInterface

from pagefleet_server.model_errors import ModelRefused
from pagefleet_server.models.layer_call import AttentionContext as AttentionContext
from pagefleet_server.models.layer_call import LayerCall as LayerCall

IMPLEMENTATION = "pagefleet_paged"
"""The name under which our function is registered."""
CONTEXT_ARGUMENT = "paged_context"
"""Keyword argument of the model's call that carries the step's AttentionContext."""


HARMLESS_ARGUMENTS = frozenset(
    {
        "cache",
        "cache_position",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "dropout",
        "is_causal",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""Keyword arguments that reach attention functions and change nothing for causal inference."""


def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    paged_context: AttentionContext | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """query [1, Hq, T, D], key and value [1, Hkv, T, D] -> ([1, T, Hq, Dv], no weights)."""
    if paged_context is None:
        raise ModelRefused("its layers do not hand keyword arguments down to attention; paged attention needs that")
    layer_index = getattr(module, "layer_idx", None)
    if not isinstance(layer_index, int):
        raise ModelRefused(f"{type(module).__name__} has no layer_idx; paged attention cannot tell its layers apart")
    unknown = {name: value for name, value in kwargs.items() if value is not None and name not in HARMLESS_ARGUMENTS}
    if attention_mask is not None:
        unknown["attention_mask"] = attention_mask
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        unknown["is_causal"] = False
    call = LayerCall(
        layer_index=layer_index,
        scale=query.shape[3] ** -0.5 if scaling is None else float(scaling),
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
        unknown=unknown,
    )
    rows = paged_context.attend(call, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    return rows.unsqueeze(0), None


def register() -> None:
    """Make IMPLEMENTATION known to transformers; doing it again changes nothing."""
    AttentionInterface.register(IMPLEMENTATION, paged_attention_forward)
