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
    """Stands where an nn.Linear stood. It has no `weight`: a parent that reads it fails in the dry run, not later."""

    def __init__(self, source: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features = source.in_features
        self.out_features = source.out_features
        self._source: torch.nn.Linear | None
        # Out of the module tree, so that its parameters are not the model's.
        object.__setattr__(self, "_source", source)
        self._function: LinearFunction | None = None
        self.num_bytes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] -> [..., N]."""
        if self._function is not None:
            return self._function(x)
        assert self._source is not None
        return functional.linear(x, self._source.weight, self._source.bias)

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

    The dry run must pass with the swapped modules before any weight is let go; when it does not (a parent reads a
    child's weight), everything is put back and 0 comes back, with a warning. Weights are packed one at a time: the peak
    is one weight above the model.
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
    try:
        dry_run()
    except AttributeError as error:
        _logger.warning("linears stay as they are: the model reads their weights itself (%s)", str(error)[:200])
        for parent, name, child in places:
            setattr(parent, name, child)
        return 0
    num_bytes = num_packed = 0
    num_linears = len(swapped)
    while places:
        # Forgotten one by one: nothing here keeps a weight alive once it is packed.
        parent, name, source = places.pop()
        packed = swapped.pop(id(source), None)
        if packed is None:
            continue
        plain = packed.pack(pack, out_dtype=torch.float32 if source is logits_from else None)
        if plain is not None:
            setattr(parent, name, plain)
            continue
        num_packed += 1
        num_bytes += packed.num_bytes
    _logger.info("%d of %d linears packed, %d bytes", num_packed, num_linears, num_bytes)
    return num_bytes
