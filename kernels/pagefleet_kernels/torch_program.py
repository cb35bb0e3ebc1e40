"""Programs (see backend.Program) of plain torch and a backend's own ops: for every backend, device and dtype.

Everything is computed in float32 (float64 stays) and rounded once, as in the backends' own kernels.
"""

from collections.abc import Callable

import torch
from torch.nn import functional

from pagefleet_kernels import ops
from pagefleet_kernels.backend import Backend, KVCache, LinearFunction
from pagefleet_kernels.batch import AttentionBatch

_Step = Callable[[int, AttentionBatch, torch.Tensor], None]


class TorchProgram:
    """Keeps what it is told to do as a list of functions of (rows, batch, positions)."""

    def __init__(self, backend: Backend, *, dtype: torch.dtype, device: torch.device, max_rows: int) -> None:
        self.max_rows = max_rows
        self._backend = backend
        self._dtype = dtype
        self._device = device
        self._steps: list[_Step] = []

    def buffer(self, width: int) -> torch.Tensor:
        """Uninitialised [max_rows, width]."""
        return torch.empty(self.max_rows, width, dtype=self._dtype, device=self._device)

    def linear(self, linear: LinearFunction, x: torch.Tensor, out: torch.Tensor) -> None:
        """See backend.Program."""

        def step(rows: int, batch: AttentionBatch, positions: torch.Tensor) -> None:
            out[:rows] = linear(x[:rows])

        self._steps.append(step)

    def norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        out: torch.Tensor | None,
        weight: torch.Tensor | None,
        *,
        bias: torch.Tensor | None = None,
        epsilon: float = 0.0,
        weight_offset: float = 0.0,
        centred: bool = False,
        x_scale: float = 1.0,
    ) -> None:
        """See backend.Program."""

        def step(rows: int, batch: AttentionBatch, positions: torch.Tensor) -> None:
            h = x[:rows]
            if residual is not None:
                residual[:rows] = _wide(residual[:rows]) + _wide(h) * x_scale
                h = residual[:rows]
            if out is None or weight is None:
                return
            wide = _wide(h)
            if centred:
                wide = wide - wide.mean(-1, keepdim=True)
            normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
            normed = normed * (_wide(weight) + weight_offset)
            out[:rows] = normed if bias is None else normed + _wide(bias)

        self._steps.append(step)

    def rope_write_kv(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: KVCache,
        turned: torch.Tensor,
        *,
        cos_sin: torch.Tensor,
        query_norm: torch.Tensor | None = None,
        key_norm: torch.Tensor | None = None,
        epsilon: float = 0.0,
        norm_offset: float = 0.0,
    ) -> None:
        """See backend.Program."""

        def turn(heads: torch.Tensor, norm: torch.Tensor | None, table: torch.Tensor) -> torch.Tensor:
            wide = _wide(heads)
            if norm is not None:
                wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * (_wide(norm) + norm_offset)
            half = cos_sin.shape[1] // 2
            cosines, sines = table[:, None, :half], table[:, None, half:]
            a, b, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
            return torch.cat((a * cosines - b * sines, b * cosines + a * sines, rest), dim=-1).to(heads.dtype)

        def step(rows: int, batch: AttentionBatch, positions: torch.Tensor) -> None:
            table = cos_sin.index_select(0, positions)
            turned[:rows] = turn(query[:rows], query_norm, table).flatten(1)
            turned_key = turn(key[:rows], key_norm, table)
            ops.write_kv(self._backend, cache, turned_key, value[:rows], batch.slot_mapping, check_bounds=False)

        self._steps.append(step)

    def attention(
        self,
        query: torch.Tensor,
        cache: KVCache,
        out: torch.Tensor,
        *,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> None:
        """See backend.Program."""

        def step(rows: int, batch: AttentionBatch, positions: torch.Tensor) -> None:
            attended = ops.paged_attention(
                self._backend,
                query[:rows],
                cache,
                batch,
                scale=scale,
                sliding_window=sliding_window,
                softcap=softcap,
                check_bounds=False,
            )
            out[:rows] = attended.flatten(1)

        self._steps.append(step)

    def activate(self, x: torch.Tensor, out: torch.Tensor, *, activation: str, gated: bool) -> None:
        """See backend.Program."""
        width = out.shape[1]

        def step(rows: int, batch: AttentionBatch, positions: torch.Tensor) -> None:
            gates = _wide(x[:rows, :width])
            active = functional.silu(gates) if activation == "silu" else functional.gelu(gates, approximate="tanh")
            out[:rows] = active * _wide(x[:rows, width:]) if gated else active

        self._steps.append(step)

    def call(self, function: Callable[[int], None]) -> None:
        """See backend.Program."""
        self._steps.append(lambda rows, batch, positions: function(rows))

    def run(self, batch: AttentionBatch, positions: torch.Tensor) -> None:
        """See backend.Program."""
        for step in self._steps:
            step(positions.shape[0], batch, positions)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
