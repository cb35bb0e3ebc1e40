import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from pagefleet_server.core.sampling_params import SamplingParams
from pagefleet_server.core.step import ScheduledRequest, TokenHistory
from pagefleet_server.runner.counter_rng import uniform
from pagefleet_server.runner.distribution import BLOCK, Distribution, distribution
from pagefleet_server.runner.rows import Row
from pagefleet_server.runner.sampler import sample
from support.transformers_sampling import transformers_probabilities

VOCAB = 3000


def logits_of(seed: int, vocab: int = VOCAB, spread: float = 3.0) -> Row:
    row: Row = (torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread).numpy()
    return row


def params_of(**fields: object) -> SamplingParams:
    return SamplingParams(max_tokens=1, **fields)  # type: ignore[arg-type]


def request_of(params: SamplingParams, start: int = 0, name: str = "r") -> ScheduledRequest:
    return ScheduledRequest(name, (1,), start, (1,), True, params)


def probabilities(logits: Row, params: SamplingParams) -> torch.Tensor:
    kept = distribution(logits, params)
    full = np.zeros(logits.shape[0])
    full[slice(None) if kept.ids is None else kept.ids] = kept.weights / kept.weights.sum(dtype=np.float64)
    return torch.from_numpy(full)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    list(itertools.product([0.3, 1.0, 2.5], [0, 1, 50, VOCAB, 10 * VOCAB], [1e-9, 0.1, 0.95, 1.0], [0.0, 0.2, 1.0])),
)
def test_distribution_equals_transformers(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    params = params_of(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for seed in range(2):
        logits = logits_of(seed)
        got, want = probabilities(logits, params), transformers_probabilities(logits, params)
        assert torch.equal(got > 0, want > 0)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


EXTREMES = [5e-324, 1e-320, 1e-46, 1e-45, 1e-38, 1e-9]
"""Positive, and next to nothing or nothing at all in float32."""


@pytest.mark.parametrize("temperature", EXTREMES)
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (3, 1.0, 0.0), (0, 1e-320, 0.0), (0, 1.0, 1e-320)]
)
@pytest.mark.parametrize("scale", [1.0, 1e30])
def test_the_coldest_draws_are_greedy(temperature: float, top_k: int, top_p: float, min_p: float, scale: float) -> None:
    logits = logits_of(3) * np.float32(scale)
    logits[::7] = -np.inf
    params = params_of(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert {distribution(logits, params).draw(number) for number in (0.0, 0.5, 1 - 2**-53)} == {int(logits.argmax())}


@pytest.mark.parametrize("penalty", [*EXTREMES, 0.01, 100.0])
@pytest.mark.parametrize("temperature", [0.0, *EXTREMES, 1.0, 100.0])
def test_every_penalty_leaves_something_to_draw(penalty: float, temperature: float) -> None:
    logits = logits_of(4)
    logits[:3] = 0.0, 1e30, -1e30
    request = request_of(params_of(repetition_penalty=penalty, temperature=temperature, top_p=0.9))
    history = TokenHistory(token_ids=(0, 1, 2, 5), num_prompt=1)
    token = sample(torch.from_numpy(logits)[None], [replace(request, history=history)]).sampled["r"]
    assert 0 <= token < VOCAB


@pytest.mark.parametrize("spread", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("top_p", [0.2, 0.8, 0.9999])
def test_flat_and_steep_distributions_find_their_nucleus(spread: float, top_p: float) -> None:
    logits, params = logits_of(5, spread=spread), params_of(top_p=top_p)
    got, want = probabilities(logits, params), transformers_probabilities(logits, params)
    # At the edge, transformers sums in float32: one token more or less is a rounding of its sum.
    assert int((got > 0).ne(want > 0).sum()) <= 1
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6 + 1.5 * float(want[want > 0].min()))


def test_ties_at_the_edge_of_top_k_are_all_kept() -> None:
    kept = distribution(np.array([1.0, 2.0, 1.0, 0.0], dtype=np.float32), params_of(top_k=2))
    assert kept.ids is not None and kept.ids.tolist() == [0, 1, 2]


def test_ties_at_the_edge_of_top_p_keep_lower_ids() -> None:
    kept = distribution(np.zeros(4, dtype=np.float32), params_of(top_p=0.5))
    assert kept.ids is not None and kept.ids.tolist() == [0, 1]


ALMOST_ONE = 1 - 2**-53


@pytest.mark.parametrize("vocab", [50, BLOCK, 4 * BLOCK + 3])
def test_forbidden_tokens_are_never_drawn(vocab: int) -> None:
    logits = np.full(vocab, -np.inf, dtype=np.float32)
    logits[[7, 9]] = 0.0
    for fields in ({}, {"top_k": 30}, {"top_p": 0.99}, {"top_k": 5, "top_p": 0.2}, {"min_p": 0.5}):
        kept = distribution(logits, params_of(**fields))
        assert {kept.draw(number) for number in (0.0, 0.49, 0.51, ALMOST_ONE)} <= {7, 9}


def test_draw_inverts_the_running_sum() -> None:
    kept = Distribution(ids=None, weights=np.array([1.0, 0.5, 0.5], dtype=np.float32))
    assert [kept.draw(number) for number in (0.0, 0.49, 0.51, 0.74, 0.76, ALMOST_ONE)] == [0, 0, 1, 1, 2, 2]


def test_draw_over_many_blocks_equals_one_long_sum() -> None:
    kept = distribution(logits_of(3, 5 * BLOCK + 17), params_of())
    sums = np.cumsum(kept.weights, dtype=np.float64)
    numbers = np.random.default_rng(0).random(2000)
    want = np.searchsorted(sums, numbers * sums[-1], side="right")
    assert [kept.draw(float(number)) for number in numbers] == want.tolist()


def test_draws_follow_the_distribution() -> None:
    """Chi-square over 100,000 draws of one row at consecutive positions."""
    logits = np.array([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5, -2.0, -9.0], dtype=np.float32)
    params = params_of(temperature=0.8, top_k=9, seed=11)
    draws = 100_000
    kept = distribution(logits, params)
    tokens = torch.tensor([kept.draw(uniform(params.seed, position)) for position in range(draws)])
    counts = tokens.bincount(minlength=10).double()
    assert counts[9] == 0
    expected = probabilities(logits, params)[:9] * draws
    assert float(((counts[:9] - expected) ** 2 / expected).sum()) < 26.1  # 99.9 % point for 8 degrees of freedom


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    logits = torch.zeros(2, 49152)
    logits[0, 40_000] = logits[0, 12_345] = logits[0, 12_346] = 4.0
    requests = [request_of(params_of(temperature=0.0), name=name) for name in "ab"]
    assert sample(logits.bfloat16(), requests).sampled == {"a": 12_345, "b": 0}


def test_mixed_rows_are_drawn_each_by_its_own_rule() -> None:
    logits = [logits_of(seed) for seed in range(4)]
    params = [
        params_of(seed=1),
        params_of(temperature=0.0),
        params_of(top_k=1, seed=2),
        params_of(temperature=0.0, logit_bias=((77, 100.0),)),
    ]
    requests = [request_of(p, start=i, name=str(i)) for i, p in enumerate(params)]
    got = sample(torch.from_numpy(np.stack(logits)), requests).sampled
    assert got["0"] == distribution(logits[0], params[0]).draw(uniform(1, 1))
    assert got["1"] == int(logits[1].argmax())
    assert got["2"] == int(logits[2].argmax())
    assert got["3"] == 77


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_fail_their_request_alone(bad: float) -> None:
    logits = torch.zeros(3, 30)
    logits[1, 4] = bad
    result = sample(logits, [request_of(params_of(seed=seed), name=name) for seed, name in enumerate("abc")])
    assert list(result.sampled) == ["a", "c"]
    assert list(result.failed) == ["b"] and str(bad) in result.failed["b"]


def test_logits_that_are_all_forbidden_by_the_model_fail_their_request() -> None:
    result = sample(torch.full((1, 30), -torch.inf), [request_of(params_of())])
    assert list(result.failed) == ["r"] and not result.sampled


@pytest.mark.parametrize("num_top", [0, 1, 5, VOCAB + 9])
def test_logprobs_equal_log_softmax(num_top: int) -> None:
    logits = torch.from_numpy(logits_of(8))
    params = params_of(temperature=0.7, top_k=20, seed=4, logprobs=num_top, presence_penalty=1.0)
    request = ScheduledRequest("r", (1,), 0, (1,), True, params, history=TokenHistory([5, 6], 1))
    result = sample(logits.unsqueeze(0), [request])
    want = logits.double().log_softmax(-1)
    got, token = result.logprobs["r"], result.sampled["r"]
    assert got.logprob == pytest.approx(float(want[token]), abs=1e-6)
    assert got.rank == int((want > want[token]).sum()) + 1
    ids = [index for index, _ in got.top]
    assert ids == want.argsort(descending=True, stable=True)[:num_top].tolist()
    assert [value for _, value in got.top] == pytest.approx(want[ids].tolist(), abs=1e-6)


def test_logprobs_come_only_for_those_who_ask() -> None:
    requests = [request_of(params_of(), name="a"), request_of(params_of(logprobs=0), name="b")]
    assert list(sample(torch.zeros(2, 30), requests).logprobs) == ["b"]
