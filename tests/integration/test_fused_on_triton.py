"""The fused decoder as it runs on a GPU: its program of Triton launches, interpreted on CPU tensors, against eager
transformers in float32."""

from pathlib import Path
from typing import Any

import pytest
import torch

from support import triton_server as work
from support.fused_cases import FUSED_CASES
from support.tiny_models import eager, eager_logits, write_tiny
from support.triton_interpreter import Interpreter, interpreter

__all__ = ["interpreter"]

LENGTHS = (3, 18)
SHORT = ("gemma3", "granite", "smollm3", "starcoder2")
"""Together they have every op and every option: GELU, windows, caps, scales, biases, head norms, LayerNorm, no rope."""
LONG = tuple(sorted(set(FUSED_CASES) - set(SHORT)))


def check(interpreter: Interpreter, tmp_path: Path, case: str) -> None:
    model_type, changes = FUSED_CASES[case]
    path = write_tiny(tmp_path, model_type, **changes)
    got = interpreter.run(work.mixed_logits, path, "float32", LENGTHS)
    oracle = eager(path)
    for logits, tokens in zip(got, work.prompts_of(oracle.config.vocab_size, LENGTHS), strict=True):
        assert float((logits - eager_logits(oracle, tokens)).abs().max()) <= 1e-4


@pytest.mark.parametrize("case", SHORT)
def test_a_family_equals_transformers(interpreter: Interpreter, tmp_path: Path, case: str) -> None:
    check(interpreter, tmp_path, case)


@pytest.mark.long
@pytest.mark.parametrize("case", LONG)
def test_every_other_family_does(interpreter: Interpreter, tmp_path: Path, case: str) -> None:
    check(interpreter, tmp_path, case)


def test_tokens_drawn_on_the_device_are_the_cpus(interpreter: Interpreter) -> None:
    """Rows whose rules the device knows stay there; broken rows fail alone, with the same words."""
    there, here, num_plain = interpreter.run(work.drawn_both_ways, 601)
    assert num_plain == 8
    assert there == here
    assert len(there["further"]["6"]) == 2, "both guesses were right"
    assert set(there["failed"]) == {"8", "9"}


def test_captured_steps_give_the_eager_tokens(interpreter: Interpreter, tmp_path: Path) -> None:
    """A Triton program on buffers that stay, as a CUDA graph has it, with the backend's own bounds on length."""
    captured, alone, replayed = interpreter.run(
        work.greedy_with_graphs, write_tiny(tmp_path, "gemma", num_hidden_layers=1)
    )
    assert captured == alone
    assert replayed == 4


def distance(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    return float((torch.cat(got) - torch.cat(want)).norm() / torch.cat(want).norm())


def test_fp8_kv_serves_both_executors(interpreter: Interpreter, tmp_path: Path) -> None:
    """Half the bytes; logits as near as 3 bits of mantissa allow, and not the same as without."""
    path = write_tiny(tmp_path, "qwen3")
    oracle = eager(path)
    want = [eager_logits(oracle, tokens) for tokens in work.prompts_of(oracle.config.vocab_size, LENGTHS)]
    fused = interpreter.run(work.mixed_logits, path, "float32", LENGTHS, 1, "fp8")
    general = interpreter.run(work.eager_through_transformers, path, LENGTHS, "fp8_e4m3")
    assert 1e-3 < distance(fused, want) < 0.1
    assert 1e-3 < distance(general, want) < 0.1
    assert distance(fused, general) < 0.05  # a key may round to another of its neighbours
    sizes = [interpreter.run(work.block_bytes, path, kv) for kv in ("auto", "fp8")]
    assert sizes[0] == 2 * sizes[1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"width": 65537}, "65536 at most"),
        ({"activation": "relu"}, "no activation relu"),
        ({"dtype": torch.float64}, "no rows in torch.float64"),
        ({"foreign": True}, "x is of dtype torch.bfloat16"),
        ({"rows": 9}, "batch is of 9 rows"),
    ],
)
def test_what_does_not_fit_is_refused(interpreter: Interpreter, change: dict[str, Any], said: str) -> None:
    assert said in interpreter.run(work.refusal_of_program, change)


@pytest.mark.long
def test_bfloat16_is_near_to_float32(interpreter: Interpreter, tmp_path: Path) -> None:
    model_type, changes = FUSED_CASES["gemma2"]
    path = write_tiny(tmp_path, model_type, **changes)
    oracle = eager(path)
    exact = torch.cat([eager_logits(oracle, tokens) for tokens in work.prompts_of(oracle.config.vocab_size, LENGTHS)])
    got = torch.cat(interpreter.run(work.mixed_logits, path, "bfloat16", LENGTHS))
    assert float((got - exact).square().mean().sqrt()) <= 0.05 * float(exact.square().mean().sqrt())
