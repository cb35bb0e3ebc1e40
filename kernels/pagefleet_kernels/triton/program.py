"""A step as a list of Triton launches and cuBLAS products, planned anew for each step's rows (see backend.Program).

Nothing here reads a tensor or waits for the device, and every result goes into a buffer of the program: so a step can
be captured as a CUDA graph.
"""

import torch

from pagefleet_kernels.backend import KVCache, LinearFunction, LinearInto
from pagefleet_kernels.batch import AttentionBatch
from pagefleet_kernels.checks import check_apart, check_rank, check_score_rule, check_tensor, refuse
from pagefleet_kernels.errors import BackendUnavailable
from pagefleet_kernels.torch_program import TorchProgram
from pagefleet_kernels.triton.attention import Operands, plan_attention
from pagefleet_kernels.triton.cache import own_cache
from pagefleet_kernels.triton.door import MAX_NORM_WIDTH
from pagefleet_kernels.triton.launch import Device, run
from pagefleet_kernels.triton.memory import KVTarget, Rotation, plan_rope_write
from pagefleet_kernels.triton.pointwise import plan_activate, plan_add_norm

ACTIVATIONS = ("silu", "gelu_tanh")


class TritonProgram(TorchProgram):
    """Six launches a layer, beside its four products; shapes and dtypes are checked when an op is recorded."""

    def linear(self, linear: LinearFunction, x: torch.Tensor, out: torch.Tensor) -> None:
        """See backend.Program."""
        target: object = linear
        check_apart("out", out, x=x)
        if isinstance(target, LinearInto):
            self._steps.append(lambda rows, batch, positions: target.into(x[:rows], out[:rows]))
        else:
            super().linear(linear, x, out)

    def norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        out: torch.Tensor | None,
        weight: torch.Tensor | None,
        *,
        bias: torch.Tensor | None = None,
        epsilon: float = 0.0,
        weight_offset: float = 0.0,
        centred: bool = False,
        x_scale: float = 1.0,
    ) -> None:
        """See backend.Program."""
        check_rank("x", x, "[R, N]")
        width = x.shape[1]
        if width > MAX_NORM_WIDTH:
            raise BackendUnavailable(f"a norm over {width} elements: one Triton program holds {MAX_NORM_WIDTH} at most")
        for name, rows in (("x", x), ("residual", residual), ("out", out)):
            if rows is not None:
                self._check(name, rows, width)
        if residual is not None:
            check_apart("residual", residual, x=x)
        if out is not None:
            check_apart("out", out, x=x, residual=residual)
        for name, row in (("weight", weight), ("bias", bias)):
            if row is not None:
                check_tensor(name, row, (width,), self._dtype, self._device)

        def step(rows: int, batch: AttentionBatch, positions: torch.Tensor) -> None:
            launch = plan_add_norm(
                None if out is None or weight is None else out[:rows],
                x[:rows],
                None if residual is None else residual[:rows],
                weight,
                epsilon=epsilon,
                weight_offset=weight_offset,
                bias=bias,
                centred=centred,
                x_scale=x_scale,
            )
            run(launch, self._device)

        self._steps.append(step)

    def rope_write_kv(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: KVCache,
        turned: torch.Tensor,
        *,
        cos_sin: torch.Tensor,
        query_norm: torch.Tensor | None = None,
        key_norm: torch.Tensor | None = None,
        epsilon: float = 0.0,
        norm_offset: float = 0.0,
    ) -> None:
        """See backend.Program."""
        own = own_cache(cache)
        check_rank("query", query, "[R, Hq, D]")
        shape, heads = own.shape, query.shape[1]
        self._check("turned", turned, heads * shape.head_dim)
        for name, rows, form in (
            ("query", query, (heads, shape.head_dim)),
            ("key", key, (shape.num_kv_heads, shape.head_dim)),
            ("value", value, (shape.num_kv_heads, shape.v_head_dim)),
        ):
            check_tensor(name, rows, (self.max_rows, *form), self._dtype, self._device)
        check_apart("turned", turned, query=query, key=key, value=value)
        if cos_sin.dtype != torch.float32 or cos_sin.shape[1] % 2 or cos_sin.shape[1] > shape.head_dim:
            raise refuse("cos_sin", f"{cos_sin.dtype} {tuple(cos_sin.shape)}", f"float32 [P, R], R <= {shape.head_dim}")
        turned_heads = turned.view(self.max_rows, heads, shape.head_dim)

        def step(rows: int, batch: AttentionBatch, positions: torch.Tensor) -> None:
            target = KVTarget(own.keys, own.values, own.key_scales, own.value_scales, batch.slot_mapping)
            rotation = Rotation(positions, cos_sin, False, query_norm, key_norm, epsilon, norm_offset)
            launch = plan_rope_write(target, rotation, turned_heads[:rows], query[:rows], key[:rows], value[:rows])
            run(launch, self._device)

        self._steps.append(step)

    def attention(
        self,
        query: torch.Tensor,
        cache: KVCache,
        out: torch.Tensor,
        *,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> None:
        """See backend.Program."""
        own = own_cache(cache)
        check_rank("query", query, "[R, Hq, D]")
        check_score_rule(scale, sliding_window, softcap)
        heads, shape = query.shape[1], own.shape
        check_tensor("query", query, (self.max_rows, heads, shape.head_dim), self._dtype, self._device)
        self._check("out", out, heads * shape.v_head_dim)
        check_apart("out", out, query=query)
        out_heads = out.view(self.max_rows, heads, shape.v_head_dim)

        def step(rows: int, batch: AttentionBatch, positions: torch.Tensor) -> None:
            operands = Operands(
                out=out_heads[:rows],
                query=query[:rows],
                keys=own.keys,
                values=own.values,
                key_scales=own.key_scales,
                value_scales=own.value_scales,
                query_starts=batch.query_starts,
                seq_lens=batch.seq_lens,
                block_tables=batch.block_tables,
                sinks=None,
                num_decodes=batch.num_decodes,
                max_query_len=batch.max_query_len,
                max_seq_len=batch.max_seq_len,
                scale=scale,
                window=sliding_window or 0,
                softcap=softcap or 0.0,
            )
            for launch in plan_attention(operands, Device.of(self._device)):
                run(launch, self._device)

        self._steps.append(step)

    def activate(self, x: torch.Tensor, out: torch.Tensor, *, activation: str, gated: bool) -> None:
        """See backend.Program."""
        if activation not in ACTIVATIONS:
            raise BackendUnavailable(f"the Triton kernels have no activation {activation}")
        check_rank("out", out, "[R, N]")
        self._check("out", out, out.shape[1])
        self._check("x", x, out.shape[1] * (2 if gated else 1))
        check_apart("out", out, x=x)

        def step(rows: int, batch: AttentionBatch, positions: torch.Tensor) -> None:
            run(plan_activate(out[:rows], x[:rows], activation=activation, gated=gated), self._device)

        self._steps.append(step)

    def run(self, batch: AttentionBatch, positions: torch.Tensor) -> None:
        """See backend.Program."""
        if positions.shape[0] > self.max_rows:
            raise refuse("batch", f"of {positions.shape[0]} rows", f"of {self.max_rows} at most")
        super().run(batch, positions)

    def _check(self, name: str, rows: torch.Tensor, width: int) -> None:
        check_tensor(name, rows, (self.max_rows, width), self._dtype, self._device)
