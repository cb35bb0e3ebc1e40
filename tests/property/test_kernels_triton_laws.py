"""Laws of the Triton attention over random batches, interpreted on CPU."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagefleet_kernels.batch import AttentionBatch, KVShape
from support import triton_door_work as door
from support import triton_work as work
from support.attention_oracle import Case
from support.hostile import NUMBERS, batches
from support.triton_interpreter import Interpreter, interpreter

__all__ = ["interpreter"]

FEW = settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
MANY = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Ragged batches around block and tile edges, with and without every feature."""
    edges = st.one_of(st.integers(1, 40), st.sampled_from([15, 16, 17, 63, 64, 65, 128, 129]))
    decodes = draw(st.lists(st.tuples(st.just(1), st.one_of(edges, st.just(0))), max_size=3))
    prompts = []
    for length in draw(st.lists(edges, max_size=3)):
        rows = draw(st.integers(0, min(length, 20)))
        prompts.append((rows, length if rows else 0))
    kv_heads = draw(st.integers(1, 2))
    return Case(
        tuple(decodes + prompts),
        KVShape(kv_heads, draw(st.sampled_from([8, 16, 24])), draw(st.sampled_from([8, 16, 40]))),
        num_q_heads=kv_heads * draw(st.sampled_from([1, 2, 3, 5])),
        block_size=draw(st.sampled_from([8, 16, 32, 64, 128, 256])),
        sliding_window=draw(st.one_of(st.none(), st.integers(1, 70))),
        softcap=draw(st.one_of(st.none(), st.just(3.0))),
        with_sinks=draw(st.booleans()),
        shared_prefix_blocks=draw(st.integers(0, 2)),
    )


def assert_matches(interpreter: Interpreter, case: Case) -> None:
    out, want = interpreter.run(work.attend, case, torch.float32)
    assert not bool(out.isnan().any())
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)


@FEW
@given(case=cases())
def test_any_batch_matches_the_oracle(interpreter: Interpreter, case: Case) -> None:
    """Unwritten slots are NaN, table entries past the end out of range: reading either would show."""
    assert_matches(interpreter, case)


@pytest.mark.long
@pytest.mark.timeout(3600)
@MANY
@given(case=cases())
def test_many_batches_match_the_oracle(interpreter: Interpreter, case: Case) -> None:
    assert_matches(interpreter, case)


@FEW
@given(
    cuts=st.lists(st.integers(1, 89), unique=True, max_size=3),
    window=st.one_of(st.none(), st.integers(1, 90)),
)
def test_chunking_changes_no_bit(interpreter: Interpreter, cuts: list[int], window: int | None) -> None:
    """Tiles lie at absolute positions and masked keys add exact zeros, so a prompt row's sum has one order however the
    prompt is cut. (On a device the two loops must also be contracted alike; the GPU benchmark reports that.)"""
    whole, pieces = interpreter.run(work.whole_and_chunks, 90, sorted(cuts), window)
    assert torch.equal(whole, pieces)


@FEW
@given(batch=batches())
def test_any_batch_is_refused_or_computed(interpreter: Interpreter, batch: AttentionBatch) -> None:
    """Interpreted kernels read real memory: an access far outside would end the worker."""
    assert interpreter.run(door.attend_whatever, batch) in ("refused", "computed")


@FEW
@given(
    logits=st.lists(NUMBERS, min_size=1, max_size=6),
    rule=st.lists(NUMBERS, min_size=3, max_size=3),
    top_k=st.sampled_from([-(2**31), -1, 0, 1, 5, 2**31 - 1]),
    position=st.sampled_from([-(2**63), -1, 0, 2**63 - 1]),
)
def test_a_draw_with_any_numbers_is_a_token(
    interpreter: Interpreter, logits: list[float], rule: list[float], top_k: int, position: int
) -> None:
    token = interpreter.run(door.draw_whatever, logits, rule, top_k, position)
    assert 0 <= token < len(logits)
