import numpy as np
import pytest
import torch

from pagefleet_server.core.sampling_params import SamplingParams
from pagefleet_server.core.step import TokenHistory
from pagefleet_server.runner.logit_rules import apply_rules
from pagefleet_server.runner.rows import Row

VOCAB = 500
HISTORY = TokenHistory([3, 9, 9, 27, 81, 81, 81, 40, 9], num_prompt=4)


def logits_of(seed: int) -> Row:
    row: Row = (torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 2.0).numpy()
    return row


def test_rules_leave_the_row_they_were_given() -> None:
    logits = logits_of(0)
    before = logits.copy()
    apply_rules(logits, SamplingParams(max_tokens=1, logit_bias=((1, 5.0),), allowed_token_ids=(1,)), None)
    assert np.array_equal(logits, before)


@pytest.mark.parametrize(
    ("fields", "left"),
    [
        ({"allowed_token_ids": (7,), "stop_token_ids": (7,), "min_tokens": 9}, {7}),
        ({"allowed_token_ids": (7, 8), "bad_words": ((7,), (8,))}, {7, 8}),
        ({"allowed_token_ids": (7, 8), "stop_token_ids": (7,), "min_tokens": 9, "bad_words": ((8,),)}, {8}),
    ],
)
def test_a_rule_that_would_leave_nothing_is_not_applied(fields: dict[str, object], left: set[int]) -> None:
    params = SamplingParams(max_tokens=20, **fields)  # type: ignore[arg-type]
    row = apply_rules(logits_of(1), params, HISTORY)
    assert set(np.flatnonzero(np.isfinite(row)).tolist()) == left


def test_stop_ids_are_open_once_min_tokens_are_there() -> None:
    params = SamplingParams(max_tokens=20, stop_token_ids=(5,), min_tokens=5)
    assert np.isfinite(apply_rules(logits_of(2), params, HISTORY)[5])
    shorter = TokenHistory(HISTORY.token_ids[:-1], HISTORY.num_prompt)
    assert not np.isfinite(apply_rules(logits_of(2), params, shorter)[5])


def test_penalties_of_output_do_not_touch_the_prompt() -> None:
    params = SamplingParams(max_tokens=20, presence_penalty=1.0, frequency_penalty=0.5)
    change = logits_of(3) - apply_rules(logits_of(3), params, HISTORY)
    touched = {int(index): round(float(change[index]), 4) for index in np.flatnonzero(np.abs(change) > 1e-6)}
    assert touched == {81: 2.5, 40: 1.5, 9: 1.5}


@pytest.mark.parametrize(
    ("fields", "needs_history", "changes_logits"),
    [
        ({}, False, False),
        ({"temperature": 0.0, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "logprobs": 3}, False, False),
        ({"logit_bias": ((1, 1.0),)}, False, True),
        ({"allowed_token_ids": ()}, False, True),
        ({"min_tokens": 3}, False, False),
        ({"min_tokens": 3, "stop_token_ids": (1,)}, True, True),
        ({"repetition_penalty": 0.9}, True, True),
        ({"presence_penalty": -1.0}, True, True),
        ({"frequency_penalty": 0.1}, True, True),
        ({"bad_words": ((1,),)}, True, True),
    ],
)
def test_parameters_know_what_they_need(fields: dict[str, object], needs_history: bool, changes_logits: bool) -> None:
    params = SamplingParams(max_tokens=1, **fields)  # type: ignore[arg-type]
    assert (params.needs_history, params.changes_logits) == (needs_history, changes_logits)
