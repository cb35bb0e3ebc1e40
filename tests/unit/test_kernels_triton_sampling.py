"""The seeded Gumbel sampler in Triton, interpreted on CPU, against numpy."""

from typing import Any

import numpy as np
import pytest
import torch

from support import triton_work as work
from support.gumbel_oracle import gumbel, kept, shaped
from support.triton_interpreter import Interpreter, interpreter

__all__ = ["interpreter"]

VOCAB = 5003
"""Two chunks, the second not full, no multiple of 4."""


def sampling(**rows: list[float]) -> dict[str, torch.Tensor]:
    """Tensors of a batch from lists; what is not given keeps everything."""
    size = len(next(iter(rows.values())))
    defaults: dict[str, list[float]] = {
        "temperature": [1.0] * size,
        "top_k": [0] * size,
        "top_p": [1.0] * size,
        "min_p": [0.0] * size,
        "seeds": list(range(11, 11 + size)),
        "positions": list(range(size)),
    }
    kinds = {"top_k": torch.int32, "seeds": torch.int64, "positions": torch.int64}
    merged = defaults | rows
    return {name: torch.tensor(values, dtype=kinds.get(name, torch.float32)) for name, values in merged.items()}


def penalties_for(logits: torch.Tensor, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows, vocab = logits.shape
    counts = torch.randint(0, 40, (rows, vocab), generator=generator).sub(36).clamp(min=0).to(torch.int32)
    return {
        "repetition": torch.full((rows,), 1.3),
        "presence": torch.full((rows,), 0.4),
        "frequency": torch.full((rows,), 0.2),
        "output_counts": counts,
        "prompt_seen": (torch.rand(rows, vocab, generator=generator) < 0.1).to(torch.int8),
    }


def check(tokens: torch.Tensor, logits: torch.Tensor, batch: dict[str, torch.Tensor], penalties: Any = None) -> None:
    """Each token is the oracle's, or one whose score is the same to single precision."""
    assert tokens.dtype == torch.int64
    for row, token in enumerate(tokens.tolist()):
        heat = float(batch["temperature"][row])
        x = shaped(logits[row].double().numpy(), heat, penalties, row)
        if heat == 0.0:
            assert x[token] >= np.nanmax(x) - 1e-5 * abs(np.nanmax(x))
            continue
        mask = kept(x, int(batch["top_k"][row]), float(batch["top_p"][row]), float(batch["min_p"][row]))
        assert mask[token], f"row {row}: token {token} is not among the {int(mask.sum())} kept"
        noise = gumbel(int(batch["seeds"][row]), int(batch["positions"][row]), x.shape[0])
        score = np.where(mask, x + noise, -np.inf)
        assert score[token] >= score.max() - 1e-4


def logits_of(rows: int, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return 3.0 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def test_masks_by_threshold(interpreter: Interpreter) -> None:
    batch = sampling(
        temperature=[1.0, 0.7, 1.0, 2.0, 1.0, 0.3],
        top_k=[0, 40, 1, 3, 0, 5000],
        top_p=[1.0, 1.0, 1.0, 0.5, 0.9, 0.99],
        min_p=[0.0, 0.0, 0.0, 0.0, 0.05, 0.0],
        seeds=[0, 2**63 - 1, 5, 7, 123456789012345, 2],
        positions=[0, 1, 2**31 - 1, 2**31, 2**40, 77],
    )
    logits = logits_of(6)
    check(interpreter.run(work.sample, logits, batch, None), logits, batch)


def test_penalties_shift_logits_first(interpreter: Interpreter) -> None:
    batch = sampling(temperature=[0.0, 1.0, 1.0], top_k=[0, 20, 0], top_p=[1.0, 1.0, 0.8])
    logits = logits_of(3).to(torch.bfloat16)
    penalties = penalties_for(logits, 5)
    check(interpreter.run(work.sample, logits, batch, penalties), logits, batch, penalties)


def test_greedy_takes_the_lowest_of_equal_logits(interpreter: Interpreter) -> None:
    logits = torch.zeros(3, VOCAB)
    logits[1, [4500, 4096, 4999]] = 1.0
    logits[2, [3, 4096]] = 1.0
    tokens = interpreter.run(work.sample, logits, sampling(temperature=[0.0, 0.0, 0.0]), None)
    assert tokens.tolist() == [0, 4096, 3]


def test_ties_at_the_threshold_stay(interpreter: Interpreter) -> None:
    """top_k=1 over two equal best: either may come, by seed, and no third."""
    logits = torch.zeros(24, 64)
    logits[:, [7, 50]] = 2.0
    tokens = interpreter.run(work.sample, logits, sampling(top_k=[1] * 24), None)
    assert set(tokens.tolist()) == {7, 50}


def test_broken_logits_are_never_drawn(interpreter: Interpreter) -> None:
    """NaN and -inf are out; a row without any number gives token 0 rather than memory's contents."""
    logits = torch.full((3, VOCAB), float("-inf"))
    logits[0, 17], logits[0, 4200] = 1.0, 0.5
    logits[1] = float("nan")
    logits[1, 4999] = -50.0
    batch = sampling(temperature=[1.0, 1.0, 1.0], top_p=[0.9, 0.5, 0.5], top_k=[5, 0, 3])
    tokens = interpreter.run(work.sample, logits, batch, None).tolist()
    assert tokens[0] in (17, 4200)
    assert tokens[1:] == [4999, 0]


def test_a_draw_depends_on_its_own_row_only(interpreter: Interpreter) -> None:
    logits = logits_of(5)
    batch = sampling(top_k=[0, 9, 0, 50, 0], top_p=[1.0, 1.0, 0.7, 0.9, 1.0])
    together = interpreter.run(work.sample, logits, batch, None)
    order = [3, 1, 4]
    picked = {name: values[order] for name, values in batch.items()}
    assert torch.equal(interpreter.run(work.sample, logits[order], picked, None), together[order])


def test_draws_follow_the_distribution() -> None:
    """Of the oracle, whose noise the kernel is held to above. Chi-square over 4000 draws of 8 tokens, 7 degrees of
    freedom: 24.3 is passed once in a thousand seeds."""
    weights = np.array([0.3, 0.25, 0.15, 0.1, 0.08, 0.06, 0.04, 0.02])
    tokens = [int(np.argmax(np.log(weights) + gumbel(42, position, 8))) for position in range(4000)]
    want = 4000 * weights
    assert float(((np.bincount(tokens, minlength=8) - want) ** 2 / want).sum()) < 24.3


@pytest.mark.long
def test_masks_over_random_rows(interpreter: Interpreter) -> None:
    generator = torch.Generator().manual_seed(9)
    for seed in range(20):
        size = 6
        batch = sampling(
            temperature=(torch.rand(size, generator=generator) * 2).round(decimals=1).tolist(),
            top_k=torch.randint(0, 300, (size,), generator=generator).tolist(),
            top_p=(0.05 + 0.95 * torch.rand(size, generator=generator)).tolist(),
            min_p=(0.1 * torch.rand(size, generator=generator)).tolist(),
        )
        logits = logits_of(size, 9001, seed)
        penalties = penalties_for(logits, seed) if seed % 2 else None
        check(interpreter.run(work.sample, logits, batch, penalties), logits, batch, penalties)
