"""Linears of a loaded model, handed to a function that lays their weights out for the machine."""

import logging
from collections.abc import Callable
from typing import Protocol

import torch
from torch.nn import functional

_logger = logging.getLogger(__name__)

LinearFunction = Callable[[torch.Tensor], torch.Tensor]
"""x [..., K] -> [..., N]."""


class Pack(Protocol):
    """Lays a weight out for the machine."""

    def __call__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, out_dtype: torch.dtype | None = None
    ) -> LinearFunction | None:
        """weight [N, K] and bias -> the linear with its own copy of them, its result in out_dtype (None: the input's);
        None: there is no better one."""


class PackedLinear(torch.nn.Module):
    """Stands where an nn.Linear stood. Until it is packed a parent may read its weight, and that is noted: such a
    linear is not packed."""

    def __init__(self, source: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features = source.in_features
        self.out_features = source.out_features
        self._source: torch.nn.Linear | None
        # Out of the module tree, so that its parameters are not the model's.
        object.__setattr__(self, "_source", source)
        self._function: LinearFunction | None = None
        self.num_bytes = 0
        self.is_read = False
        """Somebody read the weight or the bias itself."""

    @property
    def weight(self) -> torch.Tensor:
        """[N, K]. Raises AttributeError once it is packed."""
        return self._read().weight

    @property
    def bias(self) -> torch.Tensor | None:
        """[N]. Raises AttributeError once it is packed."""
        return self._read().bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] -> [..., N]."""
        if self._function is not None:
            return self._function(x)
        source = self._source
        assert source is not None
        return functional.linear(x, source.weight, source.bias)

    @property
    def is_packed(self) -> bool:
        """The weight is gone."""
        return self._function is not None

    def _read(self) -> torch.nn.Linear:
        if self._source is None:
            raise AttributeError("a packed linear has no weight of its own any more")
        self.is_read = True
        return self._source

    def pack(self, pack: Pack, *, out_dtype: torch.dtype | None = None) -> torch.nn.Linear | None:
        """Take the packed form and let the weight go; the source itself when there is no packed form."""
        assert self._source is not None
        source = self._source
        function = pack(source.weight, source.bias, out_dtype=out_dtype)
        if function is None:
            return source
        self._function = function
        self.num_bytes = source.weight.nbytes + (0 if source.bias is None else source.bias.nbytes)
        object.__setattr__(self, "_source", None)
        return None


def pack_linears(
    module: torch.nn.Module, pack: Pack, dry_run: Callable[[], object], *, logits_from: torch.nn.Module | None = None
) -> int:
    """Swap the nn.Linear modules below `module`; returns the bytes of weights that are held packed.

    logits_from is the one whose result stays in float32: rounded to bfloat16, the best logits are often equal, and a
    greedy choice among them is arbitrary.

    The dry run passes with the swapped modules before any weight is let go; those whose weight a parent reads itself
    (a router that asks for its dtype) are put back. Weights are packed one at a time: the peak is one weight above the
    model.
    """
    places = [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent.named_children()
        if type(child) is torch.nn.Linear
    ]
    swapped: dict[int, PackedLinear] = {}
    for parent, name, child in places:
        setattr(parent, name, swapped.setdefault(id(child), PackedLinear(child)))
    dry_run()
    num_bytes = num_packed = 0
    num_linears = len(swapped)
    while places:
        # Forgotten one by one: nothing here keeps a weight alive once it is packed.
        parent, name, source = places.pop()
        packed = swapped[id(source)]
        if packed.is_packed:
            continue
        plain = (
            source if packed.is_read else packed.pack(pack, out_dtype=torch.float32 if source is logits_from else None)
        )
        if plain is not None:
            setattr(parent, name, plain)
            continue
        num_packed += 1
        num_bytes += packed.num_bytes
    _logger.info("%d of %d linears packed, %d bytes", num_packed, num_linears, num_bytes)
    return num_bytes
