"""The Triton attention, interpreted on CPU, against the float64 oracle."""

import pytest
import torch

from pagefleet_kernels.batch import KVShape
from support import triton_work as work
from support.attention_oracle import CASES, Case, names
from support.triton_interpreter import Interpreter, interpreter

__all__ = ["interpreter"]

TOLERANCES = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
"""Largest error allowed, with outputs of about 1: rounding of the output and of the probabilities."""

ODD_WIDTHS: dict[str, Case] = {
    "80 wide": Case(((1, 40), (1, 7), (9, 30)), KVShape(2, 80, 80), num_q_heads=4, scale=0.11),
    "96 wide": Case(((1, 40), (9, 30)), KVShape(1, 96, 96), num_q_heads=3, scale=0.1),
    "192 wide keys, 128 wide values": Case(((1, 40), (9, 30)), KVShape(1, 192, 128), num_q_heads=2, scale=0.07),
    "256 wide": Case(((1, 20), (5, 20)), KVShape(1, 256, 256), num_q_heads=2, scale=0.06),
    "blocks of 256": Case(((1, 300), (9, 30)), KVShape(1, 32, 32), num_q_heads=2, block_size=256),
    "a group of 71 query heads": Case(((1, 20), (3, 20)), KVShape(1, 16, 16), num_q_heads=71),
    "a group of 130 query heads": Case(((1, 20), (3, 20)), KVShape(1, 16, 16), num_q_heads=130),
    "long decodes over several splits": Case(
        ((1, 700), (1, 256), (1, 257), (1, 513)), KVShape(1, 16, 16), num_q_heads=3
    ),
    "windowed decodes over several splits": Case(
        ((1, 700), (1, 300), (1, 600)), KVShape(1, 16, 16), num_q_heads=3, sliding_window=300, with_sinks=True
    ),
}


def assert_close(out: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    assert out.shape == want.shape
    assert not bool(out.isnan().any())
    if out.numel():
        assert float((out.double() - want).abs().max()) <= tolerance * max(1.0, float(want.abs().max()))


@pytest.mark.parametrize("name", [name for name in names() if name != "long prompt in tiles"])
def test_matches_the_oracle(interpreter: Interpreter, name: str) -> None:
    out, want = interpreter.run(work.attend, name, torch.float32)
    assert_close(out, want, TOLERANCES[torch.float32])


@pytest.mark.parametrize("name", sorted(ODD_WIDTHS))
def test_matches_the_oracle_at_odd_widths(interpreter: Interpreter, name: str) -> None:
    out, want = interpreter.run(work.attend, ODD_WIDTHS[name], torch.float32)
    assert_close(out, want, TOLERANCES[torch.float32])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["decodes then chunks", "window, softcap and sinks", "SmolLM2 heads"])
def test_matches_the_oracle_in_16_bits(interpreter: Interpreter, name: str, dtype: torch.dtype) -> None:
    out, want = interpreter.run(work.attend, name, dtype)
    assert_close(out, want, TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name", ["decodes then chunks", "window, softcap and sinks", "V narrower than K", "everything, blocks of 64"]
)
def test_fp8_memory_attends_over_what_it_holds(interpreter: Interpreter, name: str, dtype: torch.dtype) -> None:
    """Scales differ per head and are folded out of the loop; the oracle applies them to every stored value."""
    out, want = interpreter.run(work.attend_fp8, name, dtype, 0.03, 0.007)
    assert_close(out, want, TOLERANCES[dtype])


def test_fp8_takes_queries_that_do_not_fit_16_bit_floats(interpreter: Interpreter) -> None:
    """bf16 reaches 3e38, the fp16 of the tensor cores 65504: rows are scaled first."""
    case = Case(((1, 40), (9, 30)), scale=1e-6)
    out, want = interpreter.run(work.attend_fp8_large_queries, case, 1e6)
    assert_close(out, want, TOLERANCES[torch.bfloat16])


@pytest.mark.parametrize(
    ("split", "max_splits", "window"),
    [(16, 16, None), (16, 3, None), (32, 16, None), (16, 3, 33), (16, 16, 33), (32, 3, 1)],
)
def test_splits_of_any_size_add_up(interpreter: Interpreter, split: int, max_splits: int, window: int | None) -> None:
    lengths = (0, 1, 16, 17, 48, 49, 130)
    shape = KVShape(1, 16, 16)
    case = Case(tuple((1, n) for n in lengths), shape, num_q_heads=2, sliding_window=window, with_sinks=True)
    out, want = interpreter.run(work.decode_with_small_splits, case, split, max_splits)
    assert_close(out, want, TOLERANCES[torch.float32])


def test_a_row_does_not_depend_on_its_batch(interpreter: Interpreter) -> None:
    """Splits lie at absolute positions, tiles at multiples of their size: alone or together, the same bits."""
    case = Case(((1, 300), (1, 5), (1, 700), (20, 90), (3, 3), (33, 33)), KVShape(1, 16, 16), num_q_heads=2)
    together, parts = interpreter.run(work.alone_and_together, case, torch.float32)
    assert torch.equal(together, torch.cat(parts))


@pytest.mark.parametrize(("planned", "beyond"), [(20, 257), (1000, 1025)])
def test_a_row_longer_than_planned_is_nan(interpreter: Interpreter, planned: int, beyond: int) -> None:
    """A graph replayed with a sequence of a later bucket must not write outside its workspace, nor look right."""
    out = interpreter.run(work.decode_beyond_the_plan, planned, (20, beyond))
    assert not bool(out[0].isnan().any())
    assert bool(out[1].isnan().all())


@pytest.mark.parametrize(
    ("sequences", "want_launches"),
    [
        pytest.param(((1, 20), (1, 200)), 1, id="short decodes: no combine step"),
        pytest.param(((1, 20), (1, 300)), 2, id="a long one: attend and combine"),
        pytest.param(((5, 20),), 1, id="prompts"),
        pytest.param(((1, 20), (5, 20)), 2, id="both kinds"),
        pytest.param((), 0, id="nothing"),
    ],
)
def test_launches_no_more_than_needed(
    interpreter: Interpreter, sequences: tuple[tuple[int, int], ...], want_launches: int
) -> None:
    assert interpreter.run(work.launches, Case(sequences)) == want_launches


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", sorted(CASES | ODD_WIDTHS))
def test_matches_the_oracle_in_every_dtype(interpreter: Interpreter, name: str, dtype: torch.dtype) -> None:
    case = (CASES | ODD_WIDTHS)[name]
    for seed in (1, 2):
        out, want = interpreter.run(work.attend, case, dtype, seed)
        assert_close(out, want, TOLERANCES[dtype])
    if dtype != torch.float32:
        assert_close(*interpreter.run(work.attend_fp8, case, dtype, 0.02, 0.03), TOLERANCES[dtype])
