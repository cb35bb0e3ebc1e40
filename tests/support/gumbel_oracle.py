"""What the Triton sampler must draw, in numpy and float64: thresholds by sorting, noise by the textbook's Philox."""

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)


def gumbel(seed: int, position: int, vocab: int) -> Floats:
    """Noise of tokens 0 .. vocab - 1."""
    quads = np.arange(-(-vocab // 4), dtype=np.uint64)
    a, b, c, d = quads, np.full_like(quads, position % 2**31), np.full_like(quads, position >> 31), np.zeros_like(quads)
    k0, k1 = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for _ in range(10):
        p0, p1 = _M0 * a, _M1 * c
        a, b, c, d = (
            (p1 >> np.uint64(32)) ^ b ^ np.uint64(k0),
            p1 & _LOW,
            (p0 >> np.uint64(32)) ^ d ^ np.uint64(k1),
            p0 & _LOW,
        )
        k0, k1 = (k0 + _W0) & 0xFFFFFFFF, (k1 + _W1) & 0xFFFFFFFF
    words = np.stack([a, b, c, d], axis=1).reshape(-1)[:vocab].astype(np.float64)
    v = np.minimum((words + 0.5) / 2.0**32, 0.99999994)
    return -np.log(-np.log1p(-v))


def shaped(logits: Floats, temperature: float, penalties: dict[str, Any] | None, row: int) -> Floats:
    """Penalised logits over the temperature."""
    x = np.where(np.isnan(logits), -np.inf, logits)
    if penalties is not None:
        counts = penalties["output_counts"][row].numpy()
        seen = (counts > 0) | (penalties["prompt_seen"][row].numpy() > 0)
        factor = float(penalties["repetition"][row])
        x = np.where(seen, np.where(x > 0, x / factor, x * factor), x)
        x = x - float(penalties["frequency"][row]) * counts - float(penalties["presence"][row]) * (counts > 0)
    return x / temperature if temperature > 0 else x


def kept(x: Floats, top_k: int, top_p: float, min_p: float) -> npt.NDArray[np.bool_]:
    """Which tokens may be drawn: top-k, then top-p of what is left, then min-p; ties at a threshold stay."""
    order = np.sort(x)[::-1]
    low = order[top_k - 1] if 0 < top_k < x.shape[0] else -np.inf
    if top_p < 1.0:
        left = order[order >= low]
        share = np.cumsum(np.exp(left - left[0]))
        low = max(low, left[min(int(np.searchsorted(share, top_p * share[-1])), left.shape[0] - 1)])
    if min_p > 0.0:
        low = max(low, order[0] + np.log(min_p))
    return x >= low
