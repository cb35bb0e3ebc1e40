"""Which executor runs a model: the fused decoder for what its table holds, transformers for everything else.

transformers is imported only when it is chosen: its import costs as much as all the rest of a start.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from pagefleet_kernels.backend import Backend
from pagefleet_server.model_errors import ModelError, ModelRefused
from pagefleet_server.models.checkpoint import Checkpoint, open_checkpoint
from pagefleet_server.models.dtype import DTYPES, resolve_device, resolve_dtype
from pagefleet_server.models.eos import eos_token_ids
from pagefleet_server.models.fused.decoder import FusedDecoder
from pagefleet_server.models.fused.families import read_spec
from pagefleet_server.models.fused.grouped_reader import grouped_bytes, grouped_reader
from pagefleet_server.models.fused.sharding import Group, ShardedSource, shard_spec
from pagefleet_server.models.fused.spec import DecoderSpec, NotFused
from pagefleet_server.models.fused.weight_sources import WeightSource, open_source
from pagefleet_server.models.fused.weights import read_weights
from pagefleet_server.models.gguf_llama import llama_values
from pagefleet_server.models.layer_call import StepContext
from pagefleet_server.models.layer_spec import LayerSpec
from pagefleet_server.models.load_progress import LoadProgress, tell_nobody
from pagefleet_server.models.pooling import Pooling, pooling_of
from pagefleet_server.models.weight_memory import check_weights_fit
from pagefleet_server.settings import ModelSettings
from pagefleet_server.tokenizer import read_json

_logger = logging.getLogger(__name__)


class Executor(Protocol):
    """A model that is ready to run on flattened tokens."""

    @property
    def executor(self) -> str:
        """fused or transformers."""

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """By layer index."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""

    @property
    def max_positions(self) -> int:
        """Tokens of one sequence at most."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text."""

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and states."""

    @property
    def device(self) -> torch.device:
        """Where it runs."""

    @property
    def pooling(self) -> Pooling | None:
        """It makes embeddings so, and no logits; None: logits."""

    @property
    def num_weight_bytes(self) -> int:
        """Bytes of everything that was loaded."""

    def shallow(self) -> "Executor":
        """One whose steps take as much memory beside the KV as this one's, and less time where layers can be left
        out."""

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, context: StepContext, logit_rows: torch.Tensor
    ) -> torch.Tensor:
        """token_ids and positions int64 [T], logit_rows int64 [N] -> logits [N, vocab_size], floating."""

    def hidden(self, token_ids: torch.Tensor, positions: torch.Tensor, context: StepContext) -> torch.Tensor:
        """token_ids and positions int64 [T] -> the last layer's states, normed, [T, H]."""


class OpenedModel(Protocol):
    """A model whose shape is known: enough to choose the kernel backend that its weights are laid out for."""

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """By layer index."""

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and KV."""

    @property
    def device(self) -> torch.device:
        """Where it will run."""

    def load(self, backend: Backend, tell: LoadProgress = tell_nobody) -> tuple[Executor, bool]:
        """The model, and whether the backend computes its linears. Raises ModelError."""


def open_model(settings: ModelSettings, group: Group | None = None, tell: LoadProgress = tell_nobody) -> OpenedModel:
    """Choose by --executor and the configuration, and log why; of a group, this rank's part. `tell`: transformers loads
    here already. Raises ModelError, ModelRefused."""
    if settings.load_format not in ("auto", "dummy"):
        raise ModelError(f"--load-format {settings.load_format!r}: expected auto or dummy")
    if settings.quantization not in ("none", "gguf", "q8_0", "q4_1"):
        raise ModelError(f"--quantization {settings.quantization!r}: expected none, gguf, q8_0 or q4_1")
    if settings.executor not in ("auto", "fused", "transformers"):
        raise ModelError(f"--executor {settings.executor!r}: expected auto, fused or transformers")
    reason = "--executor transformers asks for it"
    if settings.executor != "transformers":
        try:
            opened = _open_fused(settings, group)
        except NotFused as answer:
            reason = f"the fused decoder does not serve it: {answer}"
            if settings.executor == "fused":
                raise ModelRefused(
                    f"{settings.model}: {reason}; use --executor auto or --executor transformers"
                ) from answer
        else:
            _logger.info("executor fused: %s is in its table", opened.spec.architecture)
            return opened
    if settings.quantization != "none":
        raise ModelRefused(
            f"{settings.model}: --quantization {settings.quantization}: only the fused decoder keeps weights in small "
            f"integers, and {reason}; use --quantization none"
        )
    if group is not None:
        raise ModelRefused(
            f"{settings.model}: --tensor-parallel-size {group.size}: only the fused decoder can be split over ranks, "
            f"and {reason}"
        )
    _logger.info("executor transformers: %s", reason)
    from pagefleet_server.models.transformers_model import open_transformers

    return open_transformers(settings, tell)


@dataclass(frozen=True, slots=True)
class _OpenedFused:
    settings: ModelSettings
    spec: DecoderSpec
    source: WeightSource
    dtype: torch.dtype
    device: torch.device
    eos: tuple[int, ...]
    group: Group | None

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        return self.spec.layer_specs

    def load(self, backend: Backend, tell: LoadProgress = tell_nobody) -> tuple[Executor, bool]:
        form = self.settings.quantization
        weights = read_weights(
            self.spec,
            self.source,
            backend=backend,
            dtype=self.dtype,
            device=self.device,
            tell=tell,
            grouped=None if form == "none" else grouped_reader(self.source, form),
        )
        wanted = self.settings.max_model_len or self.spec.max_positions
        decoder = FusedDecoder(
            spec=self.spec,
            weights=weights,
            eos_token_ids=self.eos,
            dtype=self.dtype,
            device=self.device,
            group=self.group,
            num_positions=max(1, min(wanted, self.spec.max_positions)),
        )
        return decoder, weights.packed


def _open_fused(settings: ModelSettings, group: Group | None) -> _OpenedFused:
    """Raises NotFused for what the table does not hold, ModelError for what is broken."""
    dummy = settings.load_format == "dummy"
    checkpoint = open_checkpoint(settings.model, need_weights=not dummy)
    if pooling_of(settings) is not None:
        raise NotFused("it makes embeddings")
    values = _configuration(checkpoint)
    spec = read_spec(values)
    if settings.max_model_len is not None and settings.max_model_len > spec.max_positions:
        raise ModelError(  # before the weights are read
            f"--max-model-len {settings.max_model_len}: the model's own limit is {spec.max_positions}; lower it"
        )
    device = resolve_device(settings.device)
    stored = None if checkpoint.gguf is not None else _stored_dtype(values)
    source = open_source(checkpoint, spec, dummy=dummy)
    if group is not None:
        source = ShardedSource(source, spec, group.rank, group.size)
        spec = shard_spec(spec, group.size)
        device = torch.device("cuda", group.rank) if device.type == "cuda" else device
    dtype = resolve_dtype(settings.dtype, stored, device)
    if settings.quantization == "none":
        needed = sum(math.prod(shape) for shape in source.shapes().values()) * dtype.itemsize
    elif device.type == "cpu":
        needed = grouped_bytes(source, spec, settings.quantization, dtype)
    else:
        raise ModelRefused(
            f"--quantization {settings.quantization}: only the CPU kernels multiply by such weights; use --device cpu "
            "or --quantization none"
        )
    check_weights_fit(checkpoint.path, needed, dtype, device)
    return _OpenedFused(
        settings=settings,
        spec=spec,
        source=source,
        dtype=dtype,
        device=device,
        eos=eos_token_ids(checkpoint, spec.eos_token_ids),
        group=group,
    )


def _configuration(checkpoint: Checkpoint) -> Mapping[str, object]:
    if checkpoint.gguf is None:
        return read_json(checkpoint.directory / "config.json")
    values = llama_values(checkpoint.gguf)
    if values is None:
        raise NotFused("it is no plain Llama file")
    return {"model_type": "llama", **values}


def _stored_dtype(values: Mapping[str, object]) -> torch.dtype:
    """float32 where the configuration says nothing, as transformers takes it."""
    name = values.get("dtype") or values.get("torch_dtype")
    return DTYPES.get(str(name), torch.float32)
