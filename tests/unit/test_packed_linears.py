import gc
import weakref

import pytest
import torch
from torch.nn import functional

from pagefleet_server.models.packed_linears import LinearFunction, PackedLinear, pack_linears


def copying(weight: torch.Tensor, bias: torch.Tensor | None, *, out_dtype: torch.dtype | None = None) -> LinearFunction:
    own, own_bias = weight.detach().clone(), None if bias is None else bias.detach().clone()
    return lambda x: functional.linear(x, own, own_bias).to(x.dtype if out_dtype is None else out_dtype)


def nothing(
    weight: torch.Tensor, bias: torch.Tensor | None, *, out_dtype: torch.dtype | None = None
) -> LinearFunction | None:
    return None


class Block(torch.nn.Module):
    def __init__(self, *, reads_weight: bool = False) -> None:
        super().__init__()
        self.up = torch.nn.Linear(4, 6)
        self.down = torch.nn.Linear(6, 4, bias=False)
        self.many = torch.nn.ModuleList([torch.nn.Linear(4, 4)])
        self.reads_weight = reads_weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reads_weight:
            x = x.to(self.up.weight.dtype)
        out: torch.Tensor = self.many[0](self.down(self.up(x)))
        return out


@torch.no_grad()
def test_packed_model_gives_the_same_and_lets_the_weights_go() -> None:
    block, x = Block(), torch.randn(3, 4)
    want = block(x)
    weights = [weakref.ref(parameter) for parameter in block.parameters()]
    assert pack_linears(block, copying, lambda: block(x)) == 4 * (24 + 6 + 24 + 16 + 4)
    torch.testing.assert_close(block(x), want)
    assert list(block.parameters()) == []
    gc.collect()
    assert [weight() for weight in weights] == [None] * 5


@torch.no_grad()
def test_linear_whose_weight_is_read_stays_and_the_others_are_packed() -> None:
    """Two mixture-of-experts families ask their router's weight for its dtype: one such layer kept all from packing."""
    block, x = Block(reads_weight=True), torch.randn(3, 4)
    want = block(x)
    assert pack_linears(block, copying, lambda: block(x)) == 4 * (24 + 16 + 4)
    assert type(block.up) is torch.nn.Linear
    assert isinstance(block.down, PackedLinear) and isinstance(block.many[0], PackedLinear)
    torch.testing.assert_close(block(x), want)


def test_packed_linear_has_no_weight_to_read() -> None:
    block = Block()
    pack_linears(block, copying, lambda: None)
    for name in ("weight", "bias"):
        with pytest.raises(AttributeError, match=name if name == "weight" else "bias|weight"):
            getattr(block.up, name)


def test_linears_without_a_packed_form_stay_as_they_are() -> None:
    block = Block()
    assert pack_linears(block, nothing, lambda: None) == 0
    assert type(block.up) is torch.nn.Linear


def test_weights_are_let_go_only_after_the_dry_run() -> None:
    block, seen = Block(), list[bool]()
    pack_linears(block, copying, lambda: seen.append(isinstance(block.up, PackedLinear)))
    assert seen == [True]


def test_a_linear_in_two_places_is_packed_once() -> None:
    block, calls = Block(), list[int]()
    block.many[0] = block.down = torch.nn.Linear(4, 4)
    block.up = torch.nn.Linear(4, 4)

    def pack(
        weight: torch.Tensor, bias: torch.Tensor | None, *, out_dtype: torch.dtype | None = None
    ) -> LinearFunction:
        calls.append(1)
        return copying(weight, bias)

    want = block(torch.ones(2, 4))
    pack_linears(block, pack, lambda: None)
    torch.testing.assert_close(block(torch.ones(2, 4)), want)
    assert len(calls) == 2


def test_only_the_logits_stay_wide() -> None:
    block = Block().bfloat16()
    block.many[0] = torch.nn.Linear(4, 4).bfloat16()
    pack_linears(block, copying, lambda: None, logits_from=block.many[0])
    assert block(torch.ones(2, 4, dtype=torch.bfloat16)).dtype == torch.float32
    assert block.up(torch.ones(2, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
