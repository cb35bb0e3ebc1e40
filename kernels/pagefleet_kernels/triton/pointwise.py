"""Planning the row-wise ops."""

import torch

from pagefleet_kernels.triton.configs import pow2
from pagefleet_kernels.triton.kernels import pointwise as pointwise_kernels
from pagefleet_kernels.triton.launch import Launch

GATE_BLOCK = 1024
"""Columns of one program."""


def plan_add_norm(
    out: torch.Tensor | None,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    *,
    epsilon: float,
    weight_offset: float = 0.0,
    bias: torch.Tensor | None = None,
    centred: bool = False,
    x_scale: float = 1.0,
) -> Launch:
    """x [T, N]; residual, where given, becomes residual + x * x_scale; out = norm of that (None: only the sum)."""
    block = pow2(x.shape[1])
    return Launch(
        kernel=pointwise_kernels.add_norm,
        grid=(x.shape[0],),
        arguments={
            "out": out,
            "x": x,
            "residual": residual,
            "weight": weight,
            "bias": bias,
            "eps": epsilon,
            "weight_offset": weight_offset,
            "x_scale": x_scale,
            "stride_out": out.stride(0) if out is not None else 0,
            "stride_x": x.stride(0),
            "stride_residual": residual.stride(0) if residual is not None else 0,
        },
        constants={"N": x.shape[1], "BLOCK": block, "CENTRED": centred},
        # 8 to 32 elements per thread, by the width alone.
        num_warps=min(16, max(4, block // 1024)),
        num_stages=1,
    )


def plan_activate(out: torch.Tensor, x: torch.Tensor, *, activation: str = "silu", gated: bool = True) -> Launch:
    """x [T, 2 N], or [T, N] when not gated -> out [T, N]. activation: silu or gelu_tanh."""
    columns = out.shape[1]
    return Launch(
        kernel=pointwise_kernels.activate,
        grid=(x.shape[0], -(-columns // GATE_BLOCK)),
        arguments={"out": out, "x": x, "stride_out": out.stride(0), "stride_x": x.stride(0)},
        constants={"N": columns, "BLOCK": GATE_BLOCK, "GELU": activation == "gelu_tanh", "GATED": gated},
        num_warps=4,
        num_stages=1,
    )
