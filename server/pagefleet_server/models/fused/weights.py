"""A decoder's weights as the machine wants them: merged, laid out by the kernel backend, one layer at a time."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.nn import functional

from pagefleet_kernels import ops
from pagefleet_kernels.backend import Backend, LinearFunction, LinearPacker
from pagefleet_kernels.grouped import GroupedWeight, join, pack_grouped
from pagefleet_server.model_errors import ModelRefused
from pagefleet_server.models.fused import weight_names
from pagefleet_server.models.fused.grouped_reader import GroupedReader
from pagefleet_server.models.fused.spec import DecoderSpec
from pagefleet_server.models.fused.weight_sources import WeightSource
from pagefleet_server.models.load_progress import LoadProgress, tell_nobody


@dataclass(frozen=True, slots=True)
class Norm:
    """Of rows, or of heads."""

    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; None where the architecture has nothing there."""

    attention_norm: Norm | None
    attention_post_norm: Norm | None
    mlp_norm: Norm | None
    mlp_post_norm: Norm | None
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    qkv: LinearFunction
    """[T, H] -> queries, keys, values side by side."""
    attention_out: LinearFunction
    mlp_in: LinearFunction
    """[T, H] -> gates and ups side by side."""
    mlp_out: LinearFunction


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """The whole model."""

    embedding: torch.Tensor
    """[V, H]."""
    layers: tuple[LayerWeights, ...]
    final_norm: Norm
    head: LinearFunction
    """[N, H] -> logits [N, V]; in float32 where the backend offers it."""
    num_bytes: int
    """Of all tensors, those in the backend's layout included."""
    packed: bool
    """The backend laid the linears out."""


def read_weights(
    spec: DecoderSpec,
    source: WeightSource,
    *,
    backend: Backend,
    dtype: torch.dtype,
    device: torch.device,
    tell: LoadProgress = tell_nobody,
    grouped: GroupedReader | None = None,
) -> DecoderWeights:
    """Read a checked source (weight_sources.open_source) tensor by tensor; with `grouped`, matrices in their own scales
    where they have some. Raises ModelError."""
    reader = _Reader(spec, source, backend, dtype, device, tell, grouped)
    embedding = reader.tensor(f"{weight_names.EMBEDDING}.weight")
    layers = tuple(_layer(reader, spec, index) for index in range(len(spec.layers)))
    head = reader.tied_head(embedding) if spec.tied else reader.linear([weight_names.HEAD], bias=False, wide=True)
    return DecoderWeights(
        embedding=embedding,
        layers=layers,
        final_norm=reader.norm(weight_names.FINAL_NORM),
        head=head,
        num_bytes=reader.num_bytes,
        packed=reader.packed,
    )


def _layer(reader: "_Reader", spec: DecoderSpec, index: int) -> LayerWeights:
    def norm(part: str | None) -> Norm | None:
        return None if part is None else reader.norm(weight_names.layer(index, part))

    def linear(parts: Iterable[str], *, bias: bool) -> LinearFunction:
        return reader.linear([weight_names.layer(index, part) for part in parts], bias=bias)

    normed = spec.head_norm or spec.width_norm
    query_norm, key_norm = norm(weight_names.QUERY_NORM if normed else None), None
    if normed:
        key_norm = norm(weight_names.KEY_NORM)
    return LayerWeights(
        attention_norm=norm(weight_names.attention_norm(spec)),
        attention_post_norm=norm(weight_names.attention_post_norm(spec)),
        mlp_norm=norm(weight_names.mlp_norm(spec)),
        mlp_post_norm=norm(weight_names.mlp_post_norm(spec)),
        query_norm=None if query_norm is None else query_norm.weight,
        key_norm=None if key_norm is None else key_norm.weight,
        qkv=linear(weight_names.qkv(spec), bias=spec.qkv_bias),
        attention_out=linear([weight_names.ATTENTION_OUT], bias=spec.output_bias),
        mlp_in=linear(weight_names.mlp_in(spec), bias=spec.mlp_bias),
        mlp_out=linear([weight_names.mlp_out(spec)], bias=spec.mlp_bias),
    )


class _Reader:
    """Reads, merges, packs; counts bytes."""

    def __init__(
        self,
        spec: DecoderSpec,
        source: WeightSource,
        backend: Backend,
        dtype: torch.dtype,
        device: torch.device,
        tell: LoadProgress,
        grouped: GroupedReader | None,
    ) -> None:
        self._source = source
        self._has_norm_bias = spec.centred_norm
        self._backend = backend
        self._dtype = dtype
        self._device = device
        self._shapes = source.shapes()
        self._tell = tell
        self._grouped = grouped
        self._done_bytes = 0
        self._total_bytes = sum(math.prod(self._shapes[name]) for name in weight_names.expected(spec)) * dtype.itemsize
        self._scratch = torch.empty(0, dtype=dtype, device=device)
        self.num_bytes = 0
        self.packed = False

    def tensor(self, name: str) -> torch.Tensor:
        """On the device."""
        tensor = self._read(name).to(self._device)
        self.num_bytes += tensor.nbytes
        return tensor

    def norm(self, name: str) -> Norm:
        """Weight, and bias where the norms have one (norms of heads never do)."""
        has_bias = self._has_norm_bias and f"{name}.bias" in self._shapes
        return Norm(self.tensor(f"{name}.weight"), self.tensor(f"{name}.bias") if has_bias else None)

    def linear(self, names: list[str], *, bias: bool, wide: bool = False) -> LinearFunction:
        """One linear of several, their outputs side by side."""
        in_groups = self._read_grouped(names)
        if in_groups is not None:
            biases = [self.tensor(f"{name}.bias") for name in names] if bias else []
            return self._pack_grouped(in_groups, torch.cat(biases) if biases else None, wide=wide)
        shapes = [self._shapes[f"{name}.weight"] for name in names]
        weight = self._room(sum(rows for rows, _ in shapes), shapes[0][1])
        for name, part in zip(names, torch.split(weight, [rows for rows, _ in shapes]), strict=True):
            part.copy_(self._read(f"{name}.weight"))
        biases = [self.tensor(f"{name}.bias") for name in names] if bias else []
        return self.pack(weight, torch.cat(biases) if biases else None, wide=wide)

    def tied_head(self, embedding: torch.Tensor) -> LinearFunction:
        """Of the embedding's own numbers."""
        in_groups = self._read_grouped([weight_names.EMBEDDING])
        if in_groups is not None:
            return self._pack_grouped(in_groups, None, wide=True)
        return self.pack(embedding, None, wide=True)

    def _read(self, name: str) -> torch.Tensor:
        tensor = self._source.read(name, self._dtype)
        self._count(tensor.numel())
        return tensor

    def _read_grouped(self, names: list[str]) -> GroupedWeight | None:
        """None where one of them has no scales of its own."""
        parts: list[GroupedWeight] = []
        for name in names:
            part = None if self._grouped is None else self._grouped(f"{name}.weight")
            if part is None:
                return None
            parts.append(part)
        for part in parts:
            self._count(part.codes.numel())
        return join(parts)

    def _count(self, elements: int) -> None:
        self._done_bytes = min(self._done_bytes + elements * self._dtype.itemsize, self._total_bytes)
        self._tell(self._done_bytes, self._total_bytes)

    def _pack_grouped(self, weight: GroupedWeight, bias: torch.Tensor | None, *, wide: bool) -> LinearFunction:
        packed = pack_grouped(self._backend, weight, bias, dtype=self._dtype, wide=wide)
        if packed is None:
            raise ModelRefused(
                f"--quantization: the {self._backend.name} kernels do not multiply {self._dtype} by such weights; they "
                "need the built CPU kernels, in bfloat16 or float32; use --quantization none"
            )
        self.num_bytes += weight.num_bytes
        self.packed = True
        return packed

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None, *, wide: bool) -> LinearFunction:
        """In the backend's layout, or as it is. wide: results in float32 where the backend offers that."""
        self.num_bytes += weight.nbytes
        packed = ops.pack_linear(self._backend, weight, bias, out_dtype=torch.float32 if wide else None)
        if packed is None:
            return PlainLinear(weight.clone() if self._owns(weight) else weight, bias)
        self.packed = True
        return packed

    def _room(self, rows: int, columns: int) -> torch.Tensor:
        """[rows, columns]: the same memory every time where the backend copies it, for fresh memory takes longer to get
        than to fill."""
        if not isinstance(self._backend, LinearPacker):
            return torch.empty(rows, columns, dtype=self._dtype, device=self._device)
        if self._scratch.numel() < rows * columns:
            self._scratch = torch.empty(rows * columns, dtype=self._dtype, device=self._device)
        return self._scratch[: rows * columns].view(rows, columns)

    def _owns(self, weight: torch.Tensor) -> bool:
        return weight.data_ptr() == self._scratch.data_ptr()


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """torch's own."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K] -> [T, N]."""
        return functional.linear(x, self.weight, self.bias)

    def into(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """x [T, K] -> out [T, N]."""
        if self.bias is None:
            torch.mm(x, self.weight.t(), out=out)
        else:
            torch.addmm(self.bias, x, self.weight.t(), out=out)
