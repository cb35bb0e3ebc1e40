"""The header of a safetensors file: every tensor's place, checked against its shape and the file's size.

Format: https://huggingface.co/docs/safetensors/index#format (a JSON header behind its length, then the bytes).
"""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pagefleet_server.gguf_metadata import LFS_POINTER
from pagefleet_server.model_errors import ModelError

MAX_HEADER_BYTES = 100 * 1024 * 1024
"""The format's own bound."""
FLOAT_BYTES: Mapping[str, int] = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Types that a model computes in -> bytes of an element."""
_ELEMENT_BYTES: Mapping[str, int] = {
    **FLOAT_BYTES,
    **dict.fromkeys(("I64", "U64", "C64"), 8),
    **dict.fromkeys(("I32", "U32"), 4),
    **dict.fromkeys(("I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
}
"""Of types not in it (parts of bytes) the size is not checked."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor's place."""

    dtype: str
    """safetensors' name."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the file."""
    num_bytes: int


def read_tensor_table(file: Path) -> dict[str, TensorEntry]:
    """Name -> place; every tensor lies inside the file and has the bytes that its shape needs. Raises ModelError."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            head = stream.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            if head == LFS_POINTER[:8]:
                raise ModelError(f"{file}: is a pointer of Git LFS, not the file itself; run `git lfs pull` beside it")
            if not 2 <= length <= min(MAX_HEADER_BYTES, size):
                raise ModelError(f"{file}: is truncated or no safetensors file ({size} bytes); fetch it again")
            header = json.loads(stream.read(length))
        start = 8 + length
        table = {name: _entry(entry, start) for name, entry in header.items() if name != "__metadata__"}
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({error.strerror or error}); check the path") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise ModelError(f"{file}: its header is damaged; fetch it again") from error
    needed = max((entry.offset + entry.num_bytes for entry in table.values()), default=start)
    if size < needed:
        raise ModelError(f"{file}: is truncated: {size} bytes, {needed} needed; fetch it again")
    for name, entry in table.items():
        element = _ELEMENT_BYTES.get(entry.dtype)
        if element is not None and math.prod(entry.shape) * element != entry.num_bytes:
            raise ModelError(
                f"{file}: tensor {name[:200]} of shape {list(entry.shape)} in {entry.dtype} takes "
                f"{math.prod(entry.shape) * element} bytes, but {entry.num_bytes} are there; fetch it again"
            )
    return table


def _entry(entry: Mapping[str, object], start: int) -> TensorEntry:
    """Raises KeyError, TypeError or ValueError for what is none."""
    offsets, shape, dtype = entry["data_offsets"], entry["shape"], entry["dtype"]
    if not isinstance(offsets, list) or not isinstance(shape, list) or not isinstance(dtype, str):
        raise TypeError
    begin, end = (_size(value) for value in offsets)
    if end < begin:
        raise ValueError
    return TensorEntry(dtype, tuple(_size(value) for value in shape), start + begin, end - begin)


def _size(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError
    return value
