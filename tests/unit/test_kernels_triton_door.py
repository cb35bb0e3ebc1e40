"""Wrong arguments of the fused ops: an error that names argument, value and bound, before anything is touched."""

from typing import Any

import pytest
import torch

from support import triton_door_work as work
from support.triton_interpreter import Interpreter, interpreter

__all__ = ["interpreter"]

NEAR = torch.zeros(48)
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("rope_write_kv", {"query": torch.zeros(2, 32)}, "query is of shape (2, 32)"),
    ("rope_write_kv", {"query": torch.zeros(2, 2, 16, dtype=torch.float16)}, "query is of dtype torch.float16"),
    ("rope_write_kv", {"key": torch.zeros(2, 1, 16)}, "key is of shape (2, 1, 16)"),
    ("rope_write_kv", {"key": torch.zeros(2, 16, 2).transpose(1, 2)}, "key is strided"),
    ("rope_write_kv", {"value": torch.zeros(3, 2, 16)}, "value is of shape (3, 2, 16)"),
    ("rope_write_kv", {"slot_mapping": torch.zeros(2, dtype=torch.int32)}, "slot_mapping is of dtype torch.int32"),
    ("rope_write_kv", {"positions": torch.zeros(1, dtype=torch.int64)}, "positions is of shape (1,)"),
    ("rope_write_kv", {"cos_sin": torch.zeros(4, 15)}, "cos_sin is of shape (4, 15)"),
    ("rope_write_kv", {"cos_sin": torch.zeros(4, 32)}, "cos_sin is of shape (4, 32)"),
    ("rope_write_kv", {"cos_sin": torch.zeros(8, 16)[::2]}, "cos_sin is strided"),
    ("rope_write_kv", {"cos_sin": torch.zeros(4, 16, dtype=torch.float64)}, "cos_sin is of dtype torch.float64"),
    ("rope_write_kv", {"query_norm": torch.zeros(8)}, "query_norm is of shape (8,)"),
    ("add_rms_norm", {"x": torch.zeros(2, 2, 16)}, "x is of shape (2, 2, 16)"),
    ("add_rms_norm", {"x": torch.zeros(2, 16, dtype=torch.float64)}, "x is of dtype torch.float64"),
    ("add_rms_norm", {"x": torch.zeros(16, 2).T}, "x is strided"),
    ("add_rms_norm", {"weight": torch.zeros(8)}, "weight is of shape (8,)"),
    ("add_rms_norm", {"residual": torch.zeros(1, 16)}, "residual is of shape (1, 16)"),
    ("add_rms_norm", {"residual": torch.zeros(1, 16).expand(2, 16)}, "residual is strided (0, 1)"),
    ("add_rms_norm", {"residual": NEAR[16:].view(2, 16), "x": NEAR[:32].view(2, 16)}, "residual is in the memory of x"),
    ("add_rms_norm", {"x": torch.zeros(1, 70000), "weight": torch.zeros(70000)}, "x is of width 70000"),
    ("silu_mul", {"x": torch.zeros(2, 15)}, "x is of width 15"),
    ("silu_mul", {"x": torch.zeros(16)}, "x is of shape (16,)"),
    ("sample", {"logits": torch.zeros(2, 0)}, "logits is without a vocabulary"),
    ("sample", {"logits": torch.zeros(3, 16)}, "temperature is of shape (2,)"),
    ("sample", {"top_k": torch.zeros(2, dtype=torch.int64)}, "top_k is of dtype torch.int64"),
    ("sample", {"seeds": torch.zeros(4, dtype=torch.int64)[::2]}, "seeds is strided"),
]


@pytest.mark.parametrize(("op", "change", "want"), WRONG, ids=[f"{op}: {want}" for op, _, want in WRONG])
def test_wrong_arguments_are_named(interpreter: Interpreter, op: str, change: dict[str, Any], want: str) -> None:
    assert interpreter.run(work.refusal_at_the_door, op, {}) == ""
    message = interpreter.run(work.refusal_at_the_door, op, change)
    assert message.startswith(want)
    assert "it must be" in message


def test_a_program_writes_nothing_that_it_reads(interpreter: Interpreter) -> None:
    refusals = interpreter.run(work.refusals_of_shared_memory)
    assert refusals == ["out is in the memory of x; it must be apart from it"] * 3 + [
        "residual is in the memory of x; it must be apart from it",
        "out is in the memory of query; it must be apart from it",
        "turned is in the memory of query; it must be apart from it",
        "scale is nan; it must be positive and finite in float32",
    ]


def test_a_position_outside_the_table_is_nan_not_memory(interpreter: Interpreter) -> None:
    turned = interpreter.run(work.rope_outside_its_table)
    assert [bool(row.isnan().all()) for row in turned] == [True, False, True]
    assert not bool(turned[1].isnan().any())
