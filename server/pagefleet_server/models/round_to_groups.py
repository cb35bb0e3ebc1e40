"""Rounding weights to groups of small integers at load, as ggml's formats of the same names do."""

import torch

from pagefleet_kernels.grouped import GroupedWeight

GROUP = 32


def round_to_groups(weight: torch.Tensor, form: str) -> GroupedWeight | None:
    """weight [N, K] -> q8_0 or q4_1, the nearest level of each group's scale; None where K is not made of groups."""
    rows, columns = weight.shape
    if columns % GROUP:
        return None
    groups = weight.to(torch.float32).view(rows, columns // GROUP, GROUP)
    return _q8_0(groups) if form == "q8_0" else _q4_1(groups)


def _q8_0(groups: torch.Tensor) -> GroupedWeight:
    scales = (groups.abs().amax(2) / 127).to(torch.float16)
    codes = _nearest(groups, scales).clamp_(-127, 127)
    return GroupedWeight(codes=codes.to(torch.int8).flatten(1), levels=None, scales=scales)


def _q4_1(groups: torch.Tensor) -> GroupedWeight:
    lowest, highest = groups.aminmax(dim=2)
    scales, minimums = ((highest - lowest) / 15).to(torch.float16), lowest.to(torch.float16)
    codes = _nearest(groups - minimums.float().unsqueeze(2), scales).clamp_(0, 15)
    return GroupedWeight(
        codes=codes.to(torch.uint8).flatten(1), levels=tuple(range(16)), scales=scales, minimums=minimums
    )


def _nearest(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """values / scales, rounded; zero where the scale is zero."""
    wide = scales.float().unsqueeze(2)
    return torch.where(wide == 0, torch.zeros_like(values), values / torch.where(wide == 0, 1.0, wide)).round_()
