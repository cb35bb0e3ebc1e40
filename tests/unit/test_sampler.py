import itertools

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from pagefleet_server.core.sampling_params import SamplingParams
from pagefleet_server.core.step import ScheduledRequest
from pagefleet_server.runner import sampler
from pagefleet_server.runner.counter_rng import uniform
from pagefleet_server.runner.sampler import distribution, draw, sample

VOCAB = 3000


def logits_of(seed: int, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 3.0


def params_of(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0) -> SamplingParams:
    return SamplingParams(max_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)


def request_of(params: SamplingParams, start: int = 0) -> ScheduledRequest:
    return ScheduledRequest("r", (1,), start, (1,), True, params)


def probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    ids, weights = distribution(logits, params)
    full = torch.zeros(logits.shape[0], dtype=torch.float64)
    full[slice(None) if ids is None else ids] = weights / weights.sum()
    return full


def transformers_probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    processors = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        processors.append(TopPLogitsWarper(params.top_p))
    scores = processors(torch.tensor([[1]]), logits.unsqueeze(0).clone())  # type: ignore[arg-type]
    return scores[0].double().softmax(-1)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    list(itertools.product([0.3, 1.0, 2.5], [0, 1, 2, 50, VOCAB, 10 * VOCAB], [1e-9, 0.1, 0.9, 0.999, 1.0])),
)
def test_distribution_equals_transformers(temperature: float, top_k: int, top_p: float) -> None:
    params = params_of(temperature, top_k, top_p)
    for seed in range(3):
        logits = logits_of(seed)
        got, want = probabilities(logits, params), transformers_probabilities(logits, params)
        assert torch.equal(got > 0, want > 0)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


def test_flat_distribution_needs_more_than_the_first_candidates() -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(5)) * 0.01
    params = params_of(top_p=0.8)
    got = probabilities(logits, params)
    assert int((got > 0).sum()) > sampler.FIRST_CANDIDATES
    torch.testing.assert_close(got, transformers_probabilities(logits, params), rtol=0, atol=1e-6)


def test_ties_at_the_edge_of_top_k_are_all_kept() -> None:
    ids, _ = distribution(torch.tensor([1.0, 2.0, 1.0, 0.0]), params_of(top_k=2))
    assert ids is not None and ids.tolist() == [0, 1, 2]


def test_ties_at_the_edge_of_top_p_keep_lower_ids() -> None:
    ids, _ = distribution(torch.zeros(4), params_of(top_p=0.5))
    assert ids is not None and ids.tolist() == [0, 1]


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = torch.full((50,), -torch.inf)
    logits[[7, 9]] = 0.0
    for params in (params_of(), params_of(top_k=30), params_of(top_p=0.99), params_of(top_k=5, top_p=0.2)):
        assert {draw(logits, params, number) for number in (0.0, 0.49, 0.51, 1 - 2**-53)} <= {7, 9}


def test_draw_inverts_the_running_sum() -> None:
    logits = torch.tensor([0.5, 0.25, 0.25]).log()
    numbers = (0.0, 0.49, 0.51, 0.74, 0.76, 1 - 2**-53)
    assert [draw(logits, params_of(), number) for number in numbers] == [0, 0, 1, 1, 2, 2]


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    logits = torch.zeros(2, 49152)
    logits[0, 40_000] = logits[0, 12_345] = logits[0, 12_346] = 4.0
    assert sample(logits.bfloat16(), [request_of(params_of(temperature=0.0))] * 2) == [12_345, 0]


def test_mixed_rows_are_drawn_each_by_its_own_rule() -> None:
    logits = torch.stack([logits_of(seed) for seed in range(4)])
    params = [params_of(seed=1), params_of(0.0), params_of(top_k=1, seed=2), params_of(seed=1)]
    got = sample(logits, [request_of(p, start=i) for i, p in enumerate(params)])
    want = [draw(logits[i], p, uniform(p.seed, i + 1)) for i, p in enumerate(params)]
    want[1] = int(logits[1].argmax())
    assert got == want
    assert got[2] == int(logits[2].argmax())


def test_draws_follow_the_distribution() -> None:
    """Chi-square over 100,000 draws of one row at consecutive positions."""
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5, -2.0, -9.0])
    params = params_of(temperature=0.8, top_k=9, seed=11)
    want = probabilities(logits, params)
    draws = 100_000
    numbers = [uniform(params.seed, position) for position in range(draws)]
    ids, weights = distribution(logits, params)
    assert ids is not None
    sums = weights.cumsum(0)
    tokens = ids[torch.searchsorted(sums, torch.tensor(numbers, dtype=torch.float64) * sums[-1], right=True)]
    assert tokens[:50].tolist() == [draw(logits, params, number) for number in numbers[:50]]
    counts = tokens.bincount(minlength=10).double()
    assert counts[9] == 0
    expected = want[:9] * draws
    assert float(((counts[:9] - expected) ** 2 / expected).sum()) < 26.1  # 99.9 % point for 8 degrees of freedom
