"""Where weights come from: one tensor at a time, so that the peak is the model and one tensor."""

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch

from pagefleet_kernels.grouped import GroupedWeight
from pagefleet_server.model_errors import ModelError
from pagefleet_server.models.checkpoint import Checkpoint, weight_files
from pagefleet_server.models.fused import weight_names
from pagefleet_server.models.fused.spec import DecoderSpec
from pagefleet_server.models.gguf_llama import LlamaTensors
from pagefleet_server.models.safetensors_table import read_tensor_table

Shape = tuple[int, ...]
_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Of safetensors' names."""


class WeightSource(Protocol):
    """A checkpoint's tensors, by transformers' names."""

    def shapes(self) -> Mapping[str, Shape]:
        """Of every tensor there."""

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """On the CPU. Raises ModelError naming file and tensor."""


class SafetensorsSource:
    """Files of a Hugging Face directory, read (not mapped) into fresh memory: nothing is held twice."""

    def __init__(self, directory: Path) -> None:
        self._places = {
            name: (file, entry) for file in weight_files(directory) for name, entry in read_tensor_table(file).items()
        }

    def shapes(self) -> Mapping[str, Shape]:
        """See WeightSource."""
        return {name: entry.shape for name, (_, entry) in self._places.items()}

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """See WeightSource."""
        file, entry = self._places[name]
        stored = _DTYPES.get(entry.dtype)
        if stored is None:
            raise ModelError(
                f"{file}: tensor {name} is stored as {entry.dtype}; the fused decoder reads plain floats only; use "
                "--executor transformers"
            )
        tensor = torch.empty(entry.shape, dtype=stored)
        if tensor.nbytes:
            view = memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
            with file.open("rb") as stream:
                stream.seek(entry.offset)
                if stream.readinto(view) != tensor.nbytes:
                    raise ModelError(f"{file}: ends within tensor {name}; fetch it again")
        return tensor.to(dtype)


class GgufSource:
    """A Llama-shaped .gguf file, dequantised tensor by tensor."""

    def __init__(self, tensors: LlamaTensors) -> None:
        self._tensors = tensors

    def shapes(self) -> Mapping[str, Shape]:
        """See WeightSource."""
        return self._tensors.shapes()

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """See WeightSource."""
        return self._tensors.read(name, dtype)

    def kind(self, name: str) -> int:
        """ggml type of a tensor."""
        return self._tensors.kind(name)

    def read_grouped(self, name: str) -> GroupedWeight | None:
        """A matrix in its own scales; None for a type without them."""
        return self._tensors.read_grouped(name)


class RandomSource:
    """Weights from the configuration alone, the same in every process: a tensor's numbers follow from its name."""

    def __init__(self, spec: DecoderSpec) -> None:
        self._spec = spec
        self._shapes = weight_names.expected(spec)

    def shapes(self) -> Mapping[str, Shape]:
        """See WeightSource."""
        return self._shapes

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Matrices are normal with the configuration's deviation, norms one (zero where stored so), biases zero."""
        shape = self._shapes[name]
        if len(shape) == 1:
            is_norm = name.endswith(".weight")
            return torch.full(shape, 1.0 - self._spec.norm_offset if is_norm else 0.0, dtype=dtype)
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        return torch.empty(shape).normal_(0.0, self._spec.initializer_range, generator=generator).to(dtype)


def open_source(checkpoint: Checkpoint, spec: DecoderSpec, *, dummy: bool) -> WeightSource:
    """The checkpoint's weights, checked by name and shape against the spec. Raises ModelError naming the tensors."""
    source: WeightSource
    if dummy:
        source = RandomSource(spec)
    elif checkpoint.gguf is not None:
        source = GgufSource(LlamaTensors(checkpoint.gguf))
    else:
        source = SafetensorsSource(checkpoint.directory)
    check_names(checkpoint.path, weight_names.expected(spec), source.shapes(), tied=spec.tied)
    return source


def check_names(path: Path, want: Mapping[str, Shape], found: Mapping[str, Shape], *, tied: bool) -> None:
    """Refuse missing tensors, tensors that nothing would use, and other shapes than the configuration's."""
    missing = sorted(want.keys() - found.keys())
    unused = sorted(
        name
        for name in found.keys() - want.keys()
        if not name.endswith(weight_names.IGNORED_SUFFIXES) and not (tied and name == f"{weight_names.HEAD}.weight")
    )
    if missing or unused:
        parts = [f"{word}: {_some(names)}" for word, names in (("missing", missing), ("not expected", unused)) if names]
        raise ModelError(
            f"{path}: its tensors are not those of its configuration ({'; '.join(parts)}); fetch it again, or try "
            "--executor transformers"
        )
    for name, shape in want.items():
        if found[name] != shape:
            raise ModelError(f"{path}: tensor {name} is {list(found[name])}; by the configuration it is {list(shape)}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more
