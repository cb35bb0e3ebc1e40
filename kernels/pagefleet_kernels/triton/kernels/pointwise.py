"""Row-wise neighbours of attention: add + RMS norm, SiLU(gate) * up. One row's bits depend on that row alone."""

import triton
import triton.language as tl


@triton.jit
def add_rms_norm(
    out,  # [T, N]
    x,  # [T, N]
    residual,  # [T, N] or None; becomes x + residual
    weight,  # [N]
    eps,
    weight_offset,
    stride_out,
    stride_x,
    stride_residual,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """h = x + residual; out = h / sqrt(mean(h^2) + eps) * (weight + weight_offset), in fp32. Grid (T,)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    ok = column < N
    h = tl.load(x + row * stride_x + column, mask=ok, other=0.0).to(tl.float32)
    if residual is not None:
        h += tl.load(residual + row * stride_residual + column, mask=ok, other=0.0).to(tl.float32)
        stored = h.to(residual.dtype.element_ty)
        tl.store(residual + row * stride_residual + column, stored, mask=ok)
        h = stored.to(tl.float32)  # the norm sees what the next layer will see
    inverse = tl.rsqrt(tl.sum(h * h, axis=0) / N + eps)
    w = tl.load(weight + column, mask=ok, other=0.0).to(tl.float32) + weight_offset
    tl.store(out + row * stride_out + column, (h * inverse * w).to(out.dtype.element_ty), mask=ok)


@triton.jit
def silu_mul(out, x, stride_out, stride_x, N: tl.constexpr, BLOCK: tl.constexpr):
    """out [T, N] = silu(x[:, :N]) * x[:, N:]. Grid (T, pieces of a row)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = column < N
    gate = tl.load(x + row * stride_x + column, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(x + row * stride_x + N + column, mask=ok, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * stride_out + column, result.to(out.dtype.element_ty), mask=ok)
