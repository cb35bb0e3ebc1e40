"""Attention written down plainly, over several sequences in one flat batch: what the self-test runs a model on.

softmax(scale * q·k, soft-capped, over the keys that are not in the future and within the window, joined by the head's
sink) times v; https://arxiv.org/abs/1706.03762, sinks as in https://arxiv.org/abs/2309.17453.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from pagefleet_server.models.attention_hook import LayerCall


@dataclass(slots=True)
class DenseCache:
    """K and V of every layer and sequence so far."""

    keys: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    """(layer, sequence) -> [S, Hkv, D]."""
    values: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    """(layer, sequence) -> [S, Hkv, Dv]."""

    def append(self, layer: int, sequence: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """More rows of one sequence."""
        at = (layer, sequence)
        self.keys[at] = torch.cat([self.keys[at], key]) if at in self.keys else key
        self.values[at] = torch.cat([self.values[at], value]) if at in self.values else value


@dataclass(frozen=True, slots=True)
class DenseContext:
    """An AttentionContext over one flat batch."""

    cache: DenseCache
    rows: Sequence[tuple[int, int]]
    """(sequence, rows) in the order of the batch."""

    def attend(self, call: LayerCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """query [T, Hq, D], key [T, Hkv, D], value [T, Hkv, Dv] -> [T, Hq, Dv]."""
        answers, first = [], 0
        for sequence, count in self.rows:
            own = slice(first, first + count)
            self.cache.append(call.layer_index, sequence, key[own], value[own])
            at = (call.layer_index, sequence)
            answers.append(_attend(call, query[own], self.cache.keys[at], self.cache.values[at]))
            first += count
        return torch.cat(answers)


def _attend(call: LayerCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The last rows of one sequence: query [T, Hq, D] over key [S, Hkv, D], value [S, Hkv, Dv]."""
    num_rows, num_heads = query.shape[:2]
    per_group = num_heads // key.shape[1]
    scores = torch.einsum("thd,shd->hts", query.float(), key.float().repeat_interleave(per_group, 1)) * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    positions = torch.arange(key.shape[0])
    distance = positions[-num_rows:, None] - positions[None, :]
    hidden = distance < 0
    if call.sliding_window is not None:
        hidden |= distance >= call.sliding_window
    scores = scores.masked_fill(hidden, float("-inf"))
    if call.sinks is not None:
        sinks = call.sinks.float().view(-1, 1, 1).expand(num_heads, num_rows, 1)
        scores = torch.cat([scores, sinks], dim=2)
    weights = scores.softmax(dim=2)[:, :, : key.shape[0]]
    return torch.einsum("hts,shd->thd", weights, value.float().repeat_interleave(per_group, 1)).to(query.dtype)
