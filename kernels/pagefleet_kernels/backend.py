"""The contract of a kernel backend: it owns the KV layout; callers know block ids only."""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch

from pagefleet_kernels.batch import AttentionBatch, KVShape
from pagefleet_kernels.sampling_batch import SamplingBatch


class KVCache(Protocol):
    """One layer's K and V for all blocks, laid out as its backend likes. Block 0 is the null block: never written."""

    @property
    def shape(self) -> KVShape:
        """The layer's heads."""

    @property
    def num_blocks(self) -> int:
        """Blocks including the null block."""

    @property
    def block_size(self) -> int:
        """Tokens in a block."""

    @property
    def num_bytes(self) -> int:
        """Bytes held."""

    @property
    def dtype(self) -> torch.dtype:
        """What is stored: rows come in it, or, for a quantised one, in any float dtype."""

    @property
    def device(self) -> torch.device:
        """Where it lies."""


class Backend(Protocol):
    """One implementation of every op. Checks of arguments live in `ops`, not here."""

    name: str

    def allocate(
        self, shape: KVShape, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> KVCache:
        """Zeroed KV memory of one layer."""

    def bytes_per_block(self, shape: KVShape, *, block_size: int, dtype: torch.dtype) -> int:
        """Bytes that one block of one layer takes, padding included."""

    def write_kv(self, cache: KVCache, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store key [T, Hkv, D] and value [T, Hkv, Dv] at their slots; slot -1 is skipped."""

    def paged_attention(
        self,
        query: torch.Tensor,
        cache: KVCache,
        batch: AttentionBatch,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal attention of query [T, Hq, D] over the cache -> [T, Hq, Dv], in the query's dtype.

        sliding_window w: a row at position p sees keys k with p - k < w. softcap c: scores become c * tanh(s / c).
        sinks [Hq]: one extra logit per head that joins the softmax and carries no value. Hq is a multiple of Hkv.
        """

    def copy_blocks(self, cache: KVCache, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination) each; destinations are distinct and are no sources."""


LinearFunction = Callable[[torch.Tensor], torch.Tensor]
"""x [..., K] -> x @ weight.T + bias, [..., N], in x's dtype unless it was packed for another."""


@runtime_checkable
class LinearInto(Protocol):
    """A linear that can write its result where it is wanted. Optional."""

    def into(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """x [T, K] -> out [T, N], both of the weight's dtype."""


@runtime_checkable
class LinearPacker(Protocol):
    """A backend that also offers linears with weights laid out for it. Optional: see `ops.pack_linear`."""

    def pack_linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, out_dtype: torch.dtype | None = None
    ) -> LinearFunction | None:
        """weight [N, K] and bias [N] or None -> the linear, holding its own packed copy; None: no gain here."""


class Program(Protocol):
    """A step's ops, recorded once and run for any number of rows up to max_rows.

    Every tensor that an op is given has max_rows rows and the program's dtype; a run works on the first rows of all.
    What an op writes shares no memory with what it reads. Recording raises BackendUnavailable for what the backend
    cannot run this way.
    """

    max_rows: int

    def buffer(self, width: int) -> torch.Tensor:
        """Uninitialised [max_rows, width]."""

    def linear(self, linear: LinearFunction, x: torch.Tensor, out: torch.Tensor) -> None:
        """out [R, N] = linear(x [R, K]), packed by the same backend."""

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
        """h = residual + x * x_scale (residual becomes h, rounded; None: h = x); out = norm(h) * (weight +
        weight_offset) + bias, RMS norm or (centred) LayerNorm; out None: only the sum."""

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
        """Norms per head, rotation, KV write; the turned query [R, Hq * D]. cos_sin fp32 [positions, rotary width]."""

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
        """Paged attention of query [R, Hq, D] into out [R, Hq * Dv]."""

    def activate(self, x: torch.Tensor, out: torch.Tensor, *, activation: str, gated: bool) -> None:
        """out [R, N] = activation(x[:, :N]) * x[:, N:], or activation(x) when not gated; silu or gelu_tanh."""

    def call(self, function: Callable[[int], None]) -> None:
        """function(rows) at this place, for what is no op: sums over ranks."""

    def run(self, batch: AttentionBatch, positions: torch.Tensor) -> None:
        """All ops in order on the batch's rows; positions int64 [T]."""


@runtime_checkable
class TokenSampler(Protocol):
    """A backend that draws tokens where the logits are. Optional."""

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """logits [B, V] -> tokens int64 [B], on the same device. A draw depends on (seed, position) and its own row; a
        row without any number gives any token."""


@runtime_checkable
class Capturable(Protocol):
    """A backend whose ops and programs a CUDA graph can hold: they read no tensor on the host. Optional."""

    def capture_lengths(self, longest: int) -> tuple[int, ...]:
        """Bounds of max_seq_len, rising, the last one `longest`: between two of them the launches of a decode step are
        the same, so one graph, captured at the upper, serves all."""


@runtime_checkable
class ProgramMaker(Protocol):
    """A backend that records programs. Optional."""

    def program(self, *, dtype: torch.dtype, device: torch.device, max_rows: int) -> Program:
        """An empty one. Raises BackendUnavailable for a dtype or device that it does not hold."""
