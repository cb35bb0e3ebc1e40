"""GGUF files made by hand, so that the reader meets every type and every kind of damage."""

import struct
from collections.abc import Sequence

Item = tuple[str, int, bytes]
"""Key, type number, encoded value."""


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def strings(values: Sequence[str]) -> bytes:
    return struct.pack("<IQ", 8, len(values)) + b"".join(text(value) for value in values)


def ints(values: Sequence[int]) -> bytes:
    return struct.pack("<IQ", 5, len(values)) + struct.pack(f"<{len(values)}i", *values)


def gguf(items: Sequence[Item], *, version: int = 3, tensors: Sequence[tuple[str, tuple[int, ...], int]] = ()) -> bytes:
    """tensors: name, dims, offset (float32). The data follows, aligned to 32, zeroed."""
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(items))
    for key, kind, value in items:
        out += text(key) + struct.pack("<I", kind) + value
    end = 0
    for name, dims, offset in tensors:
        out += text(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims) + struct.pack("<IQ", 0, offset)
        size = 4
        for dim in dims:
            size *= dim
        end = max(end, offset + size)
    if tensors:
        out += b"\0" * (-len(out) % 32 + end)
    return out


def byte_level_tokenizer(*, pre: str = "gpt-2", bos: bool = False, kind: str = "gpt2") -> list[Item]:
    """Tokens a, b, Ġ, ab, Ġab and the specials <s>, </s>."""
    items: list[Item] = [
        ("tokenizer.ggml.model", 8, text(kind)),
        ("tokenizer.ggml.pre", 8, text(pre)),
        ("tokenizer.ggml.tokens", 9, strings(["<s>", "</s>", "a", "b", "Ġ", "ab", "Ġab"])),
        ("tokenizer.ggml.token_type", 9, ints([3, 3, 1, 1, 1, 1, 1])),
        ("tokenizer.ggml.merges", 9, strings(["a b", "Ġ ab"])),
        ("tokenizer.ggml.bos_token_id", 4, struct.pack("<I", 0)),
        ("tokenizer.ggml.eos_token_id", 4, struct.pack("<I", 1)),
    ]
    if bos:
        items.append(("tokenizer.ggml.add_bos_token", 7, b"\1"))
    return items
