"""The key-value part of a GGUF file, read through mmap without numpy: tokenizer and limits in a few ten milliseconds.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pagefleet_server.model_errors import ModelError

_T = TypeVar("_T")

LFS_POINTER = b"version https://git-lfs"
"""So begins what a clone without Git LFS holds in place of a large file."""
MAGIC = b"GGUF"
MAX_STRING_BYTES = 16 * 1024 * 1024
MAX_KEYS = 65_536
MAX_ARRAY_ITEMS = 8 * 1024 * 1024
MAX_TENSORS = 1_000_000
MAX_ARRAY_DEPTH = 4

GGUFValue = bool | int | float | str | list["GGUFValue"]

_SCALARS: Mapping[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING, _ARRAY = 8, 9
_U32, _U64 = _SCALARS[4], _SCALARS[10]

TENSOR_BLOCKS: Mapping[int, tuple[int, int]] = {
    0: (1, 4),  # F32
    1: (1, 2),  # F16
    2: (32, 18),  # Q4_0
    3: (32, 20),  # Q4_1
    6: (32, 22),  # Q5_0
    7: (32, 24),  # Q5_1
    8: (32, 34),  # Q8_0
    9: (32, 40),  # Q8_1
    10: (256, 84),  # Q2_K
    11: (256, 110),  # Q3_K
    12: (256, 144),  # Q4_K
    13: (256, 176),  # Q5_K
    14: (256, 210),  # Q6_K
    15: (256, 292),  # Q8_K
    16: (256, 66),  # IQ2_XXS
    17: (256, 74),  # IQ2_XS
    18: (256, 98),  # IQ3_XXS
    19: (256, 50),  # IQ1_S
    20: (32, 18),  # IQ4_NL
    21: (256, 110),  # IQ3_S
    22: (256, 82),  # IQ2_S
    23: (256, 136),  # IQ4_XS
    24: (1, 1),  # I8
    25: (1, 2),  # I16
    26: (1, 4),  # I32
    27: (1, 8),  # I64
    28: (1, 8),  # F64
    29: (256, 56),  # IQ1_M
    30: (1, 2),  # BF16
    34: (256, 54),  # TQ1_0
    35: (256, 66),  # TQ2_0
    39: (32, 17),  # MXFP4
    40: (64, 36),  # NVFP4
    41: (128, 18),  # Q1_0
}
"""ggml type -> (elements, bytes) of one block. A tensor of any other type is refused: its size cannot be told."""


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor's place."""

    dims: tuple[int, ...]
    """Elements per dimension, the innermost first (ggml's order, the reverse of torch's)."""
    kind: int
    """ggml type number."""
    offset: int
    """Bytes from the start of the file."""


@dataclass(frozen=True, slots=True)
class GGUFMetadata:
    """What a GGUF file says about its model."""

    path: Path
    values: Mapping[str, GGUFValue]
    tensors: Mapping[str, GGUFTensor]

    def get_str(self, key: str) -> str | None:
        """A string, None when the key is absent; ModelError for another type."""
        return self._get(key, str)

    def get_int(self, key: str) -> int | None:
        """An integer, None when the key is absent; ModelError for another type."""
        return self._get(key, int)

    def get_bool(self, key: str) -> bool | None:
        """A truth value, None when the key is absent; ModelError for another type."""
        return self._get(key, bool)

    def get_strings(self, key: str) -> list[str] | None:
        """A list of strings, None when the key is absent; ModelError for another type."""
        return self._get_list(key, str)

    def get_ints(self, key: str) -> list[int] | None:
        """A list of integers, None when the key is absent; ModelError for another type."""
        return self._get_list(key, int)

    def _get(self, key: str, kind: type[_T]) -> _T | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, kind):
            raise ModelError(f"{self.path}: {key} is a {type(value).__name__}; expected a {kind.__name__}")
        return value

    def _get_list(self, key: str, kind: type[_T]) -> list[_T] | None:
        values = self._get(key, list)
        if values is None:
            return None
        checked = [value for value in values if isinstance(value, kind)]
        if len(checked) != len(values):
            raise ModelError(f"{self.path}: {key} holds items that are no {kind.__name__}")
        return checked


def read_gguf_metadata(path: Path) -> GGUFMetadata:
    """Read keys and tensor table; check that the file holds every tensor it lists.

    Raises ModelError naming the file for one that cannot be read, is no GGUF, is truncated or is absurd.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data, path).read()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror or error}); check the path") from error
    except ValueError as error:  # mmap of an empty file
        raise ModelError(f"{path}: is empty or damaged ({error}); fetch it again") from error


class _Reader:
    """A cursor over the file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._at = 0

    def read(self) -> GGUFMetadata:
        if self._data[: len(LFS_POINTER)] == LFS_POINTER:
            raise ModelError(
                f"{self._path}: is a pointer of Git LFS, not the file itself; run `git lfs pull` beside it"
            )
        if self._take(4) != MAGIC:
            raise ModelError(f"{self._path}: is no GGUF file (it does not start with 'GGUF')")
        version = self._number(_U32)
        if version not in (2, 3):
            raise ModelError(f"{self._path}: GGUF version {version}; versions 2 and 3 are read (little-endian)")
        num_tensors = self._bounded(self._number(_U64), MAX_TENSORS, "tensors")
        num_keys = self._bounded(self._number(_U64), MAX_KEYS, "keys")
        values: dict[str, GGUFValue] = {}
        for _ in range(num_keys):
            key = self._string()
            values[key] = self._value(self._number(_U32), depth=0)
        alignment = values.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelError(f"{self._path}: general.alignment is {alignment!r}; the file is damaged")
        return GGUFMetadata(self._path, values, self._tensors(num_tensors, alignment))

    def _tensors(self, count: int, alignment: int) -> dict[str, GGUFTensor]:
        """The tensor table; every tensor lies inside the file."""
        found: list[tuple[str, tuple[int, ...], int, int]] = []
        last = 0
        for _ in range(count):
            name = self._string()
            num_dims = self._bounded(self._number(_U32), 8, "tensor dimensions")
            dims = tuple(self._number(_U64) for _ in range(num_dims))
            kind = self._number(_U32)
            offset = self._number(_U64)
            if kind not in TENSOR_BLOCKS:
                raise ModelError(
                    f"{self._path}: tensor {name[:80]} has ggml type {kind}, which is not known; fetch the model in "
                    "another quantisation"
                )
            per_block, block_bytes = TENSOR_BLOCKS[kind]
            elements = math.prod(dims)
            if not dims or elements == 0 or dims[0] % per_block:
                raise ModelError(
                    f"{self._path}: tensor {name[:80]} of shape {list(dims)} is not made of blocks of {per_block}; the "
                    "file is damaged"
                )
            last = max(last, offset + elements // per_block * block_bytes)
            found.append((name, dims, kind, offset))
        start = -(-self._at // alignment) * alignment
        if count and start + last > len(self._data):
            raise self._truncated(start + last)
        return {name: GGUFTensor(dims, kind, start + offset) for name, dims, kind, offset in found}

    def _value(self, kind: int, *, depth: int) -> GGUFValue:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            if depth == MAX_ARRAY_DEPTH:
                raise ModelError(f"{self._path}: arrays nested deeper than {MAX_ARRAY_DEPTH}; the file is damaged")
            item = self._number(_U32)
            count = self._bounded(self._number(_U64), MAX_ARRAY_ITEMS, "array items")
            if item in _SCALARS:
                form = struct.Struct(f"<{count}{_SCALARS[item].format[1:]}")
                return list(form.unpack(self._take(form.size)))
            if item == _STRING:
                return self._strings(count)
            return [self._value(item, depth=depth + 1) for _ in range(count)]
        if kind not in _SCALARS:
            raise ModelError(f"{self._path}: unknown value type {kind} at byte {self._at}; the file is damaged")
        value: bool | int | float = _SCALARS[kind].unpack(self._take(_SCALARS[kind].size))[0]
        return value

    def _strings(self, count: int) -> list[GGUFValue]:
        """As many times _string, without its calls: vocabularies have 100,000 entries twice."""
        strings: list[GGUFValue] = []
        data, at, end, length_at = self._data, self._at, len(self._data), _U64.unpack_from
        for _ in range(count):
            if at + 8 > end:
                raise self._truncated(at + 8)
            start = at + 8
            at = start + self._bounded(length_at(data, at)[0], MAX_STRING_BYTES, "string bytes")
            if at > end:
                raise self._truncated(at)
            strings.append(data[start:at].decode("utf-8", "replace"))
        self._at = at
        return strings

    def _string(self) -> str:
        length = self._bounded(self._number(_U64), MAX_STRING_BYTES, "string bytes")
        return self._take(length).decode("utf-8", errors="replace")

    def _number(self, form: struct.Struct) -> int:
        number: int = form.unpack(self._take(form.size))[0]
        return number

    def _take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._data):
            raise self._truncated(end)
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def _bounded(self, value: int, bound: int, what: str) -> int:
        if value > bound:
            raise ModelError(f"{self._path}: says {value} {what}, more than {bound}; the file is damaged")
        return value

    def _truncated(self, needed: int) -> ModelError:
        return ModelError(
            f"{self._path}: is truncated: {len(self._data)} bytes, at least {needed} needed; fetch it again"
        )
