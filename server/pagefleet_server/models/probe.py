"""A dry run: one short prompt through every layer, recording how each calls attention."""

import torch

from pagefleet_server.model_errors import ModelRefused
from pagefleet_server.models.layer_call import LayerCall
from pagefleet_server.models.layer_spec import LayerSpec as LayerSpec


class ProbeContext:
    """An AttentionContext that answers with the mean of the values seen so far and keeps notes."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self.layers: dict[int, LayerSpec] = {}

    def attend(self, call: LayerCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Refuses a second call of a layer, rows that are not the prompt's, and arguments that we do not know."""
        layer = call.layer_index
        if layer in self.layers:
            raise ModelRefused(f"layer {layer} calls attention more than once")
        if query.shape[0] != self._num_tokens or key.shape[0] != self._num_tokens:
            raise ModelRefused(
                f"layer {layer} has {query.shape[0]} rows and {key.shape[0]} keys for {self._num_tokens} tokens"
            )
        if call.unknown:
            raise ModelRefused(f"layer {layer} passes {', '.join(sorted(call.unknown))} to attention")
        if query.shape[1] % key.shape[1]:
            raise ModelRefused(f"layer {layer} has {query.shape[1]} query heads for {key.shape[1]} kv heads")
        self.layers[layer] = LayerSpec(
            num_q_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=key.shape[2],
            v_head_dim=value.shape[2],
            sliding_window=call.sliding_window,
        )
        counts = torch.arange(1, value.shape[0] + 1, device=value.device, dtype=torch.float32).view(-1, 1, 1)
        means = (value.float().cumsum(0) / counts).to(value.dtype)
        return means.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
