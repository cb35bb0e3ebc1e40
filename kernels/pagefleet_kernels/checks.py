"""Checks of arguments: what was wrong, the value, the bound."""

import numpy as np
import torch

from pagefleet_kernels.batch import AttentionBatch, KVShape
from pagefleet_kernels.errors import KernelArgumentError

ROW_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Of queries, keys and values; a cache of one of these takes rows of its own dtype."""
QUANTISED_KV_DTYPES = (torch.float8_e4m3fn,)
"""What a cache may hold instead, where its backend can: rows of any of QUANTISED_ROW_DTYPES are converted."""
QUANTISED_ROW_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KV_DTYPES = ROW_DTYPES + QUANTISED_KV_DTYPES
INT32_MAX = 2**31 - 1
FLOAT32_MIN, FLOAT32_MAX = 2.0**-126, 2.0**127
"""Factors within these stay themselves in float32, in which the kernels take them."""
MAX_KV_WIDTH = 65536
"""KV heads of a layer, and elements of one's keys or values."""
MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 8, 256


def refuse(argument: str, value: object, bound: str) -> KernelArgumentError:
    """The error for an argument out of bounds; the caller raises it."""
    return KernelArgumentError(f"{argument} is {value}; it must be {bound}")


def check_integer(argument: str, value: int) -> int:
    """The value; refuse what is no whole number: a library would cut a fraction off, and take True for 1."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise refuse(argument, value, "a whole number")
    return int(value)


def check_positive(argument: str, value: int, most: int = INT32_MAX) -> None:
    """Refuse what is no whole number in [1, most]."""
    if not 1 <= check_integer(argument, value) <= most:
        raise refuse(argument, value, f"in [1, {most}]")


def check_factor(argument: str, value: float, otherwise: str = "") -> None:
    """Refuse what is no positive number, or one that float32 cannot hold. otherwise: what else the argument may be."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise refuse(argument, f"a {type(value).__name__}", f"a number{otherwise}")
    if not FLOAT32_MIN <= value <= FLOAT32_MAX:
        raise refuse(argument, value, f"positive and finite in float32{otherwise}")


def check_score_rule(scale: float, sliding_window: int | None, softcap: float | None) -> None:
    """Refuse what attention cannot do with its scores."""
    check_factor("scale", scale)
    if sliding_window is not None and not 1 <= check_integer("sliding_window", sliding_window) <= INT32_MAX:
        raise refuse("sliding_window", sliding_window, f"in [1, {INT32_MAX}], or None for no window")
    if softcap is not None:
        check_factor("softcap", softcap, ", or None for no cap")


def check_rank(argument: str, tensor: torch.Tensor, form: str) -> None:
    """Refuse what is no tensor of as many dimensions as form names: "[T, Hq, D]"."""
    if not isinstance(tensor, torch.Tensor):
        raise refuse(argument, f"a {type(tensor).__name__}", f"a tensor {form}")
    if tensor.dim() != form.count(",") + 1:
        raise refuse(argument, f"of shape {tuple(tensor.shape)}", form)


def check_plain(argument: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that shows other numbers than lie in its memory, one after the other."""
    if tensor.layout != torch.strided:
        raise refuse(argument, f"of layout {tensor.layout}", "dense (to_dense())")
    if not torch.compiler.is_compiling() and tensor.is_neg():  # a graph resolves it
        raise refuse(argument, "a view that negates its memory", "a tensor of its own (resolve_neg())")


def check_tensor(
    argument: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Refuse a tensor of another shape, dtype or device, one whose last dimension is not contiguous, and one that shows
    other numbers than lie in its memory."""
    if not isinstance(tensor, torch.Tensor):
        raise refuse(argument, f"a {type(tensor).__name__}", f"a tensor of shape {shape}")
    if tensor.shape != shape:
        raise refuse(argument, f"of shape {tuple(tensor.shape)}", f"of shape {shape}")
    if tensor.dtype != dtype:
        raise refuse(argument, f"of dtype {tensor.dtype}", f"of dtype {dtype}")
    if tensor.device != device:
        raise refuse(argument, f"on device {tensor.device}", f"on device {device}")
    check_plain(argument, tensor)
    if tensor.numel() > 1 and tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
        raise refuse(argument, f"strided {tensor.stride()}", "contiguous in its last dimension (stride 1)")


def check_apart(argument: str, written: torch.Tensor, **read: torch.Tensor | None) -> None:
    """Refuse a tensor to write to in whose memory an input lies, in part or whole: rows are written while others are
    still read. Tensors that have no memory yet (torch.compile's) pass: schemas keep those apart."""
    if torch.compiler.is_compiling():
        return
    start, end = _extent(written)
    for name, tensor in read.items():
        if tensor is not None:
            other_start, other_end = _extent(tensor)
            if start < other_end and other_start < end:
                raise refuse(argument, f"in the memory of {name}", "apart from it")


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of its first byte and of the one after its last."""
    if tensor.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def check_row_dtype(argument: str, rows: torch.Tensor, stored: torch.dtype) -> torch.dtype:
    """The dtype that goes with a cache of dtype `stored`: its own, or, for a quantised one, that of the rows."""
    if stored not in QUANTISED_KV_DTYPES:
        return stored
    if rows.dtype not in QUANTISED_ROW_DTYPES:
        names = ", ".join(str(dtype) for dtype in QUANTISED_ROW_DTYPES)
        raise refuse(argument, f"of dtype {rows.dtype}", f"of {names} for a cache of {stored}")
    return rows.dtype


def check_kv_shape(shape: KVShape) -> None:
    """Refuse widths out of [1, MAX_KV_WIDTH]."""
    check_positive("shape.num_kv_heads", shape.num_kv_heads, MAX_KV_WIDTH)
    check_positive("shape.head_dim", shape.head_dim, MAX_KV_WIDTH)
    check_positive("shape.v_head_dim", shape.v_head_dim, MAX_KV_WIDTH)


def check_block_geometry(block_size: int, dtype: torch.dtype) -> None:
    """Refuse a block size that is no power of two in 8..256, and a dtype that no KV cache holds."""
    if not MIN_BLOCK_SIZE <= check_integer("block_size", block_size) <= MAX_BLOCK_SIZE or block_size & (block_size - 1):
        raise refuse("block_size", block_size, f"a power of two in [{MIN_BLOCK_SIZE}, {MAX_BLOCK_SIZE}]")
    if dtype not in KV_DTYPES:
        raise refuse("dtype", dtype, f"one of {', '.join(str(known) for known in KV_DTYPES)}")


def check_batch_form(batch: AttentionBatch, num_rows: int, device: torch.device) -> None:
    """Shapes, dtypes and devices of a batch of num_rows rows; reads no tensor."""
    check_rank("batch.seq_lens", batch.seq_lens, "[S]")
    num_seqs = batch.seq_lens.shape[0]
    check_tensor("batch.seq_lens", batch.seq_lens, (num_seqs,), torch.int32, device)
    check_tensor("batch.query_starts", batch.query_starts, (num_seqs + 1,), torch.int32, device)
    check_rank("batch.block_tables", batch.block_tables, "[S, max_blocks]")
    check_tensor("batch.block_tables", batch.block_tables, (num_seqs, batch.block_tables.shape[1]), torch.int32, device)
    check_tensor("batch.slot_mapping", batch.slot_mapping, (num_rows,), torch.int64, device)
    for name, most in (("max_query_len", batch.max_query_len), ("max_seq_len", batch.max_seq_len)):
        if check_integer(f"batch.{name}", most) > INT32_MAX:
            raise refuse(f"batch.{name}", most, f"<= {INT32_MAX}")
    if not 0 <= check_integer("batch.num_decodes", batch.num_decodes) <= min(num_seqs, num_rows):
        raise refuse("batch.num_decodes", batch.num_decodes, f"in [0, {min(num_seqs, num_rows)}]")


def check_slots(slot_mapping: torch.Tensor, num_blocks: int, block_size: int) -> None:
    """Refuse slots below -1, in the null block, or past the last block. Reads the tensor."""
    slots = slot_mapping.cpu().numpy()
    if slots.size == 0:
        return
    low, high = int(slots.min()), int(slots.max())
    if low < -1:
        raise refuse("slot_mapping", f"{low} at its lowest", ">= -1")
    if high >= num_blocks * block_size:
        raise refuse("slot_mapping", f"{high} at its highest", f"< {num_blocks * block_size}")
    if bool(((slots >= 0) & (slots < block_size)).any()):
        raise refuse("slot_mapping", "a slot of the null block 0", f"-1 or >= {block_size}")


def check_batch(batch: AttentionBatch, *, num_blocks: int, block_size: int) -> None:
    """Values of a batch against a cache of num_blocks blocks; once a step. Reads the tensors (syncs a GPU).

    Raises KernelArgumentError for offsets that decrease or miss rows, lengths shorter than their rows, tables too short
    for their sequence, block ids out of range (only entries that will be read count), wrong maxima.
    """
    num_rows = batch.slot_mapping.shape[0]
    check_batch_form(batch, num_rows, batch.slot_mapping.device)
    # In numpy: its calls on small arrays cost a fraction of torch's, and this is every step's.
    starts = batch.query_starts.cpu().numpy().astype(np.int64)
    lens = batch.seq_lens.cpu().numpy().astype(np.int64)
    query_lens = starts[1:] - starts[:-1]
    if int(starts[0]) != 0 or int(starts[-1]) != num_rows:
        raise refuse("batch.query_starts", f"from {int(starts[0])} to {int(starts[-1])}", f"from 0 to {num_rows}")
    if lens.size == 0:
        return
    if int(query_lens.min()) < 0:
        raise refuse("batch.query_starts", "decreasing", "non-decreasing")
    if batch.num_decodes and not bool((query_lens[: batch.num_decodes] == 1).all()):
        raise refuse("batch.num_decodes", batch.num_decodes, "a count of leading sequences with exactly one row each")
    longest_query, longest = int(query_lens.max()), int(lens.max())
    if longest_query > batch.max_query_len:
        raise refuse("batch.max_query_len", batch.max_query_len, f">= {longest_query}")
    if longest > batch.max_seq_len:
        raise refuse("batch.max_seq_len", batch.max_seq_len, f">= {longest}")
    # A sequence of length 0 is padding: its rows read nothing.
    short = (lens > 0) & (lens < query_lens)
    if int(lens.min()) < 0 or bool(short.any()):
        index = int(np.argmax(short | (lens < 0)))
        raise refuse(f"batch.seq_lens[{index}]", int(lens[index]), f">= its {int(query_lens[index])} rows (0: padding)")
    capacity = batch.block_tables.shape[1] * block_size
    if longest > capacity:
        raise refuse("batch.seq_lens", f"{longest} at its longest", f"<= {capacity}, what block_tables can hold")
    tables = batch.block_tables.cpu().numpy()
    read = np.arange(tables.shape[1]) * block_size < lens[:, np.newaxis]
    bad = read & ((tables < 1) | (tables >= num_blocks))
    if bool(bad.any()):
        row, column = (int(index) for index in np.argwhere(bad)[0])
        raise refuse(f"batch.block_tables[{row}, {column}]", int(tables[row, column]), f"in [1, {num_blocks})")
    check_slots(batch.slot_mapping, num_blocks, block_size)
