"""Launches over tensors without storage: planned as the backend would, for the compile checks."""

import torch

from pagefleet_kernels.batch import KVShape
from pagefleet_kernels.sampling_batch import Penalties, SamplingBatch
from pagefleet_kernels.triton.attention import Operands, plan_decode, plan_prefill
from pagefleet_kernels.triton.cache import FP8, allocate
from pagefleet_kernels.triton.launch import Device, Launch
from pagefleet_kernels.triton.memory import KVTarget, Rotation, plan_copy, plan_rope_write, plan_write
from pagefleet_kernels.triton.pointwise import plan_activate, plan_add_norm
from pagefleet_kernels.triton.sampling import plan_sample

META = torch.device("meta")


def operands(
    *,
    group: int = 4,
    head_dim: int = 128,
    v_head_dim: int | None = None,
    kv_heads: int = 8,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    window: int = 0,
    softcap: float = 0.0,
    sinks: bool = False,
    decodes: int = 64,
    prompts: int = 2,
    query_dtype: torch.dtype | None = None,
) -> Operands:
    """One layer of a Llama-3-8B-like model by default; some decodes, some prompts of 1024 rows."""
    v_width = v_head_dim or head_dim
    query_dtype = query_dtype or (torch.bfloat16 if dtype == FP8 else dtype)
    rows = decodes + 1024 * prompts
    shape = KVShape(num_kv_heads=kv_heads, head_dim=head_dim, v_head_dim=v_width)
    cache = allocate(shape, num_blocks=4096, block_size=block_size, dtype=dtype, device=META)
    num_seqs = decodes + prompts
    return Operands(
        out=torch.empty(rows, kv_heads * group, v_width, dtype=query_dtype, device=META),
        query=torch.empty(rows, kv_heads * group, head_dim, dtype=query_dtype, device=META),
        keys=cache.keys,
        values=cache.values,
        key_scales=cache.key_scales,
        value_scales=cache.value_scales,
        query_starts=torch.empty(num_seqs + 1, dtype=torch.int32, device=META),
        seq_lens=torch.empty(num_seqs, dtype=torch.int32, device=META),
        block_tables=torch.empty(num_seqs, 512, dtype=torch.int32, device=META),
        sinks=torch.empty(kv_heads * group, dtype=query_dtype, device=META) if sinks else None,
        num_decodes=decodes,
        max_query_len=1024,
        max_seq_len=8192,
        scale=head_dim**-0.5,
        window=window,
        softcap=softcap,
    )


def decode(device: Device, made: Operands) -> Launch:
    """The attention launch of the decode rows."""
    return plan_decode(made, device)[0]


def combine(device: Device, made: Operands) -> Launch:
    """The launch that merges their splits."""
    return plan_decode(made, device)[1]


def prefill(device: Device, made: Operands) -> Launch:
    """The launch of the prompt rows."""
    return plan_prefill(made, device)[0]


def _target(made: Operands) -> KVTarget:
    slots = torch.empty(made.query.shape[0], dtype=torch.int64, device=META)
    return KVTarget(made.keys, made.values, made.key_scales, made.value_scales, slots)


def _rows(made: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    rows, heads = made.query.shape[0], made.keys.shape[2]
    key = torch.empty(rows, heads, made.keys.shape[3], dtype=made.query.dtype, device=META)
    value = torch.empty(rows, heads, made.values.shape[3], dtype=made.query.dtype, device=META)
    return key, value


def write(made: Operands) -> Launch:
    """Storing the rows' keys and values."""
    return plan_write(_target(made), *_rows(made))


def rope_write(made: Operands, *, rotary: int | None = None, interleaved: bool = False, norms: bool = False) -> Launch:
    """The same with the rotation in front."""
    width = made.query.shape[2]
    norm = torch.empty(width, dtype=made.query.dtype, device=META) if norms else None
    rotation = Rotation(
        positions=torch.empty(made.query.shape[0], dtype=torch.int64, device=META),
        cos_sin=torch.empty(8192, rotary or width, device=META),
        interleaved=interleaved,
        query_norm=norm,
        key_norm=norm,
        epsilon=1e-6,
    )
    return plan_rope_write(_target(made), rotation, torch.empty_like(made.query), made.query, *_rows(made))


def copy(made: Operands) -> Launch:
    """Copying whole blocks."""
    row = made.keys.stride(0)
    memory = torch.empty(made.keys.shape[0], row, dtype=made.keys.dtype, device=META)
    return plan_copy(memory, torch.empty(3, 2, dtype=torch.int64, device=META))


def pointwise() -> dict[str, Launch]:
    """Norm and gate at the widths of an 8B model."""
    x = torch.empty(64, 4096, dtype=torch.bfloat16, device=META)
    weight = torch.empty(4096, dtype=torch.bfloat16, device=META)
    gated = torch.empty(64, 2 * 14336, dtype=torch.bfloat16, device=META)
    half = torch.empty(64, 14336, dtype=torch.bfloat16, device=META)
    return {
        "add_rms_norm": plan_add_norm(x, x, torch.empty_like(x), weight, epsilon=1e-5, weight_offset=0.0),
        "rms_norm": plan_add_norm(x, x, None, weight, epsilon=1e-5, weight_offset=0.0),
        "sum alone": plan_add_norm(None, x, torch.empty_like(x), None, epsilon=0.0, x_scale=0.5),
        "layer_norm": plan_add_norm(x, x, torch.empty_like(x), weight, epsilon=1e-5, bias=weight, centred=True),
        "silu_mul": plan_activate(half, gated),
        "gelu": plan_activate(half, half, activation="gelu_tanh", gated=False),
    }


def sampler() -> dict[str, Launch]:
    """All of its kernels, over a vocabulary of 128256, with penalties."""
    rows, vocab = 64, 128256

    def floats(*size: int) -> torch.Tensor:
        return torch.empty(size or (rows,), device=META)

    def integers(dtype: torch.dtype, *size: int) -> torch.Tensor:
        return torch.empty(size or (rows,), dtype=dtype, device=META)

    penalties = Penalties(
        repetition=floats(),
        presence=floats(),
        frequency=floats(),
        output_counts=integers(torch.int32, rows, vocab),
        prompt_seen=integers(torch.int8, rows, vocab),
    )
    batch = SamplingBatch(
        temperature=floats(),
        top_k=integers(torch.int32),
        top_p=floats(),
        min_p=floats(),
        seeds=integers(torch.int64),
        positions=integers(torch.int64),
        penalties=penalties,
    )
    logits = torch.empty(rows, vocab, dtype=torch.bfloat16, device=META)
    names = ("shape_logits", "find_threshold", "sum_chunks", "pick_token")
    return dict(zip(names, plan_sample(integers(torch.int64), logits, batch), strict=True))
