"""The sampler in Triton, interpreted on CPU, against float64, and against the samplers of the CPU."""

from typing import Any

import pytest
import torch

from pagefleet_server.core.sampling_params import SamplingParams
from pagefleet_server.runner.counter_rng import uniform
from pagefleet_server.runner.distribution import distribution
from support import triton_work as work
from support.cpu_kernels import backend as cpu_backend
from support.draw_oracle import may_draw
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


def penalised(logits: torch.Tensor, penalties: dict[str, torch.Tensor] | None, row: int) -> torch.Tensor:
    """float64 [V]."""
    x = logits[row].double()
    if penalties is not None:
        counts = penalties["output_counts"][row]
        seen = (counts > 0) | (penalties["prompt_seen"][row] > 0)
        factor = float(penalties["repetition"][row])
        x = torch.where(seen, torch.where(x > 0, x / factor, x * factor), x)
        taken = float(penalties["presence"][row]) + float(penalties["frequency"][row]) * counts
        x = torch.where(counts > 0, x - taken, x)
    return x


def check(tokens: torch.Tensor, logits: torch.Tensor, batch: dict[str, torch.Tensor], penalties: Any = None) -> None:
    """Each token is where the running sum passes the number of (seed, position), within float32's rounding."""
    assert tokens.dtype == torch.int64
    for row, token in enumerate(tokens.tolist()):
        heat = float(batch["temperature"][row])
        x = penalised(logits, penalties, row)
        if heat == 0.0:
            assert x[token] >= x.max() - 1e-5 * abs(float(x.max()))
            continue
        number = uniform(int(batch["seeds"][row]), int(batch["positions"][row]))
        rules = int(batch["top_k"][row]), float(batch["top_p"][row]), float(batch["min_p"][row])
        assert may_draw(token, x, heat, *rules, number), f"row {row}: token {token}"


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


def same_draws(interpreter: Interpreter, logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> None:
    """By Triton, by the CPU library and by the server's own sampler: equal, or at a border that rounding may move."""
    rows = logits.shape[0]
    numbers = [uniform(int(batch["seeds"][row]), int(batch["positions"][row])) for row in range(rows)]
    rules = {name: batch[name] for name in ("temperature", "top_k", "top_p", "min_p")}
    library = cpu_backend().row_ops.sample(logits, uniform=torch.tensor(numbers, dtype=torch.float64), **rules)
    triton = interpreter.run(work.sample, logits, batch, None)
    apart = 0
    for row in range(rows):
        heat, top_k, top_p, min_p = (float(rules[name][row]) for name in rules)
        params = SamplingParams(max_tokens=1, temperature=heat, top_k=int(top_k), top_p=top_p, min_p=min_p)
        x = logits[row].float()
        own = int(x.argmax()) if heat == 0.0 else distribution(x.numpy(), params).draw(numbers[row])
        drawn = {int(triton[row]), int(library[row]), own}
        if len(drawn) > 1:
            apart += 1
            assert heat > 0.0
            assert all(may_draw(token, x, heat, int(top_k), top_p, min_p, numbers[row]) for token in drawn)
    assert apart <= max(1, rows // 50)


def many_rows(rows: int, seed: int) -> dict[str, torch.Tensor]:
    """Settings of every kind."""
    generator = torch.Generator().manual_seed(seed)

    def some(values: torch.Tensor, off: float) -> list[float]:
        """Half of them, else switched off."""
        return torch.where(torch.rand(rows, generator=generator) < 0.5, values, off).tolist()

    return sampling(
        temperature=some(0.2 + 1.8 * torch.rand(rows, generator=generator), 0.0 if seed % 2 else 1.0),
        top_k=[int(value) for value in some(torch.randint(1, 300, (rows,), generator=generator).double(), 0.0)],
        top_p=some(0.05 + 0.9 * torch.rand(rows, generator=generator), 1.0),
        min_p=some(0.2 * torch.rand(rows, generator=generator), 0.0),
        seeds=torch.randint(-(2**62), 2**62, (rows,), generator=generator).tolist(),
        positions=torch.randint(0, 2**40, (rows,), generator=generator).tolist(),
    )


def test_cpu_and_gpu_draw_the_same_tokens(interpreter: Interpreter) -> None:
    same_draws(interpreter, logits_of(16, seed=3), many_rows(16, 3))


def test_and_where_many_logits_are_equal(interpreter: Interpreter) -> None:
    """Coarse logits in bfloat16: thresholds fall on ties, of which top-p keeps the lower ids."""
    coarse = (logits_of(16, seed=4) * 2).round().div(2).to(torch.bfloat16)
    same_draws(interpreter, coarse, many_rows(16, 4))


def test_rules_keep_their_order(interpreter: Interpreter) -> None:
    """top-p's share is of what top-k left, min-p comes last: another order would keep other tokens."""
    weights = torch.tensor([[0.4, 0.2, 0.15, 0.12, 0.08, 0.05]]).repeat(40, 1)
    batch = sampling(top_k=[4] * 40, top_p=[0.85] * 40)  # of 0.87; of the whole it would be all four
    assert set(interpreter.run(work.sample, weights.log(), batch, None).tolist()) == {0, 1, 2}
    batch = sampling(top_p=[0.7] * 40, min_p=[0.3] * 40)  # were min-p first, 0.7 of 0.75 would be the first two
    assert set(interpreter.run(work.sample, weights.log(), batch, None).tolist()) == {0, 1, 2}
    same_draws(interpreter, weights.log(), batch)


@pytest.mark.long
def test_the_same_tokens_over_many_rows(interpreter: Interpreter) -> None:
    for seed in range(10, 20):
        logits = logits_of(60, 9001, seed)
        same_draws(interpreter, logits if seed % 2 else logits.to(torch.bfloat16), many_rows(60, seed))


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
