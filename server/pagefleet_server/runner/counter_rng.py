"""Random numbers by counting: the same (seed, position) gives the same number in any batch, process or order.

Philox 4x32 with 10 rounds, from J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Words = tuple[int, int, int, int]


def philox_4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Four 32-bit words in, four out."""
    a, b, c, d = counter
    key_0, key_1 = key
    for _ in range(_ROUNDS):
        product_0, product_1 = _MULTIPLIERS[0] * a, _MULTIPLIERS[1] * c
        a, b, c, d = (product_1 >> 32) ^ b ^ key_0, product_1 & _MASK, (product_0 >> 32) ^ d ^ key_1, product_0 & _MASK
        key_0, key_1 = (key_0 + _WEYL[0]) & _MASK, (key_1 + _WEYL[1]) & _MASK
    return a, b, c, d


def uniform(seed: int, position: int) -> float:
    """In [0, 1), 53 random bits. seed: its low 64 bits count; position: of the token drawn, 0 .. 2**64 - 1."""
    low, high, _, _ = philox_4x32((position & _MASK, position >> 32, 0, 0), (seed & _MASK, (seed >> 32) & _MASK))
    return ((high << 32 | low) >> 11) * 2.0**-53
