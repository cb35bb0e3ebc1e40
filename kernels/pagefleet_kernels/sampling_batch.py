"""How a step's rows of logits want their tokens drawn: value objects for backends that draw on their device."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Penalties:
    """What rows have already said; all on the logits' device."""

    repetition: torch.Tensor
    """fp32 [B], > 0: logits of tokens seen in prompt or output are divided by it if positive, else multiplied."""
    presence: torch.Tensor
    """fp32 [B]: subtracted once from each generated token."""
    frequency: torch.Tensor
    """fp32 [B]: subtracted for each time a token was generated."""
    output_counts: torch.Tensor
    """int32 [B, V], contiguous."""
    prompt_seen: torch.Tensor
    """int8 [B, V], contiguous: 1 where a token is in the prompt."""


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How each row of logits wants its token drawn; all on the logits' device."""

    temperature: torch.Tensor
    """fp32 [B], >= 0; 0 is greedy (highest logit, lowest id among equals)."""
    top_k: torch.Tensor
    """int32 [B]; 0 keeps all. Ties with the k-th stay."""
    top_p: torch.Tensor
    """fp32 [B] in (0, 1]; applied to what top_k left: the likeliest tokens, lower ids first among equals, until their
    share reaches it; at least one."""
    min_p: torch.Tensor
    """fp32 [B] in [0, 1]: keeps tokens at least so probable relative to the likeliest; 0 keeps all."""
    seeds: torch.Tensor
    """int64 [B]: the request's 64-bit seed."""
    positions: torch.Tensor
    """int64 [B], >= 0: position of the token to draw in its sequence. (seed, position) is never used twice."""
    penalties: Penalties | None = None
