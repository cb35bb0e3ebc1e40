"""Planning the row-wise ops."""

import torch

from pagefleet_kernels.triton.configs import pow2
from pagefleet_kernels.triton.kernels import pointwise as pointwise_kernels
from pagefleet_kernels.triton.launch import Launch

SILU_BLOCK = 1024
"""Columns of one program."""


def plan_add_rms_norm(
    out: torch.Tensor,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    *,
    epsilon: float,
    weight_offset: float,
) -> Launch:
    """x [T, N]; residual, where given, becomes x + residual; out = norm of that."""
    block = pow2(x.shape[1])
    return Launch(
        kernel=pointwise_kernels.add_rms_norm,
        grid=(x.shape[0],),
        arguments={
            "out": out,
            "x": x,
            "residual": residual,
            "weight": weight,
            "eps": epsilon,
            "weight_offset": weight_offset,
            "stride_out": out.stride(0),
            "stride_x": x.stride(0),
            "stride_residual": residual.stride(0) if residual is not None else 0,
        },
        constants={"N": x.shape[1], "BLOCK": block},
        # 8 to 32 elements per thread, by the width alone.
        num_warps=min(16, max(4, block // 1024)),
        num_stages=1,
    )


def plan_silu_mul(out: torch.Tensor, x: torch.Tensor) -> Launch:
    """x [T, 2 N] -> out [T, N]."""
    columns = out.shape[1]
    return Launch(
        kernel=pointwise_kernels.silu_mul,
        grid=(x.shape[0], -(-columns // SILU_BLOCK)),
        arguments={"out": out, "x": x, "stride_out": out.stride(0), "stride_x": x.stride(0)},
        constants={"N": columns, "BLOCK": SILU_BLOCK},
        num_warps=4,
        num_stages=1,
    )
