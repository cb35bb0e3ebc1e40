"""A causal language model that runs on flattened tokens, with attention left to the step's context."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from pagefleet_server.models.attention_hook import CONTEXT_ARGUMENT, AttentionContext
from pagefleet_server.models.packed_linears import PackedLinear
from pagefleet_server.models.pooling import Pooling
from pagefleet_server.models.probe import LayerSpec


@dataclass(frozen=True, slots=True)
class PagedModel:
    """A loaded model that passed the gate."""

    module: PreTrainedModel
    layers: tuple[LayerSpec, ...]
    """By layer index."""
    vocab_size: int
    """Width of the logits."""
    max_positions: int
    """Tokens of one sequence at most."""
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    keeps_logit_rows: bool
    """The module computes the logits of chosen rows only."""
    pooling: Pooling | None = None
    """The module gives hidden states for embeddings, and no logits; None: logits."""

    @property
    def executor(self) -> str:
        """See models.executor."""
        return "transformers"

    @property
    def num_weight_bytes(self) -> int:
        """Bytes of parameters, buffers and packed linears; shared ones count once."""
        tensors = [*self.module.parameters(), *self.module.buffers()]
        packed = sum(child.num_bytes for child in self.module.modules() if isinstance(child, PackedLinear))
        return packed + sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())

    def shallow(self) -> "PagedModel":
        """All layers: what a foreign layer keeps for the next one is not known."""
        return self

    def hidden(self, token_ids: torch.Tensor, positions: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """token_ids and positions int64 [T] -> the last layer's states, normed, [T, H] in the model's dtype; only for a
        model with `pooling`."""
        output = self.module(
            input_ids=token_ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            **{CONTEXT_ARGUMENT: context},
        )
        states: torch.Tensor = output.last_hidden_state[0]
        return states

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, context: AttentionContext, logit_rows: torch.Tensor
    ) -> torch.Tensor:
        """token_ids and positions int64 [T], logit_rows int64 [N] -> logits [N, vocab_size] in the model's dtype."""
        extra: dict[str, object] = {CONTEXT_ARGUMENT: context}
        if self.keeps_logit_rows:
            extra["logits_to_keep"] = logit_rows
        output = self.module(
            input_ids=token_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, **extra
        )
        logits: torch.Tensor = output.logits[0]
        return logits if self.keeps_logit_rows else logits.index_select(0, logit_rows)
