"""Row-wise neighbours of attention: add + norm, activation and gate. One row's bits depend on that row alone."""

import triton
import triton.language as tl


@triton.jit
def add_norm(
    out,  # [T, N]; None: only the sum
    x,  # [T, N]
    residual,  # [T, N] or None; becomes residual + x * x_scale
    weight,  # [N]; None where out is
    bias,  # [N] or None
    eps,
    weight_offset,
    x_scale,
    stride_out,
    stride_x,
    stride_residual,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    CENTRED: tl.constexpr,
):
    """h = residual + x * x_scale; out = h / sqrt(mean(h^2) + eps) * (weight + weight_offset) + bias, in fp32.

    CENTRED takes the mean of h off first (LayerNorm). Grid (T,).
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    ok = column < N
    h = tl.load(x + row * stride_x + column, mask=ok, other=0.0).to(tl.float32)
    if residual is not None:
        h = tl.load(residual + row * stride_residual + column, mask=ok, other=0.0).to(tl.float32) + h * x_scale
        stored = h.to(residual.dtype.element_ty)
        tl.store(residual + row * stride_residual + column, stored, mask=ok)
        h = stored.to(tl.float32)  # the norm sees what the next layer will see
    if out is not None:
        if CENTRED:
            h = tl.where(ok, h - tl.sum(h, axis=0) / N, 0.0)
        inverse = tl.rsqrt(tl.sum(h * h, axis=0) / N + eps)
        result = h * inverse * (tl.load(weight + column, mask=ok, other=0.0).to(tl.float32) + weight_offset)
        if bias is not None:
            result += tl.load(bias + column, mask=ok, other=0.0).to(tl.float32)
        tl.store(out + row * stride_out + column, result.to(out.dtype.element_ty), mask=ok)


@triton.jit
def activate(
    out, x, stride_out, stride_x, N: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr, GATED: tl.constexpr
):
    """out [T, N] = f(x[:, :N]), times x[:, N:] where GATED; f: SiLU, or GELU in its tanh form. Grid (T, pieces)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = column < N
    gate = tl.load(x + row * stride_x + column, mask=ok, other=0.0).to(tl.float32)
    steepness = gate
    if GELU:  # 0.5 (1 + tanh(u)) = 1 / (1 + e^-2u), u = sqrt(2 / pi) (g + 0.044715 g^3)
        steepness = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    result = gate / (1.0 + tl.exp(-steepness))
    if GATED:
        result *= tl.load(x + row * stride_x + N + column, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + row * stride_out + column, result.to(out.dtype.element_ty), mask=ok)
