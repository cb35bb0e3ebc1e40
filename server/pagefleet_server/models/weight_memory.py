"""Whether a model's weights can fit at all: asked from the files' headers, before a byte of them is read.

Host memory ends with a kill, not an error, so nobody would be told afterwards.
"""

import math
from pathlib import Path

import torch

from pagefleet_server import host_memory
from pagefleet_server.model_errors import ModelError
from pagefleet_server.models.checkpoint import Checkpoint, weight_files
from pagefleet_server.models.safetensors_table import FLOAT_BYTES, read_tensor_table


def check_weights_fit(path: Path, needed: int, dtype: torch.dtype, device: torch.device) -> None:
    """needed: bytes of the weights in `dtype`. Raises ModelError with the numbers when less memory is left."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        where, left = f"the device has {total} and {free} of them free", free
    else:
        limit, resident = host_memory.limit_bytes(), host_memory.resident_bytes()
        where, left = f"the limit (machine or container) is {limit} and the process holds {resident}", limit - resident
    if needed > left:
        name = str(dtype).removeprefix("torch.")
        raise ModelError(
            f"{path}: its weights take {needed} bytes in {name}; {where}; give more memory, or serve a "
            "smaller or quantised model"
        )


def weight_bytes(checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    """Bytes of all tensors once loaded: floats in `dtype`, everything else (quantised checkpoints) as stored."""
    if checkpoint.gguf is not None:
        return sum(math.prod(tensor.dims) for tensor in checkpoint.gguf.tensors.values()) * dtype.itemsize
    total = 0
    for file in weight_files(checkpoint.directory):
        for entry in read_tensor_table(file).values():
            total += math.prod(entry.shape) * dtype.itemsize if entry.dtype in FLOAT_BYTES else entry.num_bytes
    return total
