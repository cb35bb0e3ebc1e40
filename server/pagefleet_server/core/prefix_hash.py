"""Names for the content of full blocks: a chain of sha256, so that equal names mean equal tokens from position 0 on."""

import hashlib
from array import array
from collections.abc import Sequence
from typing import NewType

BlockHash = NewType("BlockHash", bytes)
"""Names a full block's tokens together with all tokens before them, and the salt: 32 bytes."""


def chain_root(tenant: str, salt: str) -> BlockHash:
    """The parent of a sequence's first block. Only sequences of one tenant with one salt can share blocks."""
    parts = [text.encode("utf-8", "surrogatepass") for text in (tenant, salt)]
    return BlockHash(hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).digest())


def chain_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """The hash of one full block after `parent`. Token ids fit 64 bits; every block of a cache has the same length,
    so that the encoding is unambiguous."""
    return BlockHash(hashlib.sha256(parent + array("q", token_ids).tobytes()).digest())
