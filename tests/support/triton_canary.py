"""A kernel that shows whether the interpreter's bf16 is to be trusted. Imported in the interpreting process only."""

import torch
import triton
import triton.language as tl


@triton.jit
def round_trip(out, x, product, a, N: tl.constexpr):
    lanes = tl.arange(0, N)
    tl.store(out + lanes, tl.load(x + lanes).to(tl.bfloat16).to(tl.float32))
    tile = tl.load(a + lanes[:, None] * N + lanes[None, :])
    tl.store(product + lanes[:, None] * N + lanes[None, :], tl.dot(tile, tile))


def canary(values: list[float]) -> tuple[list[float], float]:
    """(values rounded to bf16 by a kernel, largest error of a bf16 dot of small integers)."""
    size = 16
    x = torch.zeros(size)
    x[: len(values)] = torch.tensor(values)
    out = torch.empty(size)
    product = torch.empty(size, size)
    a = torch.randint(-8, 8, (size, size), generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    round_trip[(1,)](out, x, product, a, N=size)
    return out[: len(values)].tolist(), float((product - a.float() @ a.float()).abs().max())
