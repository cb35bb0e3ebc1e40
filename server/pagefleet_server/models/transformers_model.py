"""The transformers path behind the seam of models.executor."""

from dataclasses import dataclass
from functools import partial

import torch

from pagefleet_kernels import ops
from pagefleet_kernels.backend import Backend
from pagefleet_server.models.gate import check_module
from pagefleet_server.models.layer_spec import LayerSpec
from pagefleet_server.models.load_progress import LoadProgress, tell_nobody
from pagefleet_server.models.loading import load_model
from pagefleet_server.models.packed_linears import pack_linears
from pagefleet_server.models.paged_model import PagedModel
from pagefleet_server.settings import ModelSettings


@dataclass(frozen=True, slots=True)
class OpenedTransformers:
    """See executor.OpenedModel. The module is loaded already: only its dry run tells the layers."""

    model: PagedModel

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """By layer index."""
        return self.model.layers

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and KV."""
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.model.device

    def load(self, backend: Backend, tell: LoadProgress = tell_nobody) -> tuple[PagedModel, bool]:
        """Linears into the backend's layout; there is nothing left to tell."""
        module = self.model.module
        packed_bytes = pack_linears(
            module,
            partial(ops.pack_linear, backend),
            dry_run=partial(check_module, module),
            logits_from=module.get_output_embeddings(),  # type: ignore[no-untyped-call]
        )
        return self.model, packed_bytes > 0


def open_transformers(settings: ModelSettings, tell: LoadProgress) -> OpenedTransformers:
    """Load, gate and dry-run. Raises ModelError, ModelRefused."""
    return OpenedTransformers(load_model(settings, tell))
