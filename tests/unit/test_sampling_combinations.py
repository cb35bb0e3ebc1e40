"""Every combination of sampling settings: what may be drawn, and how likely, is what transformers' processors leave."""

import itertools
import random
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch

from pagefleet_server.core.sampling_params import SamplingParams
from pagefleet_server.core.step import ScheduledRequest, TokenHistory
from pagefleet_server.runner.counter_rng import uniform
from pagefleet_server.runner.distribution import Distribution, distribution
from pagefleet_server.runner.logit_rules import apply_rules
from pagefleet_server.runner.rows import Row
from pagefleet_server.runner.sampler import sample
from support.evidence import write_evidence
from support.transformers_sampling import transformers_probabilities

VOCAB = 500
HISTORY = TokenHistory([3, 9, 9, 27, 81, 81, 81, 40, 9], num_prompt=4)
SETTINGS: dict[str, list[object]] = {
    "logit_bias": [(), ((9, 4.0), (100, -100.0), (450, 2.5))],
    "repetition_penalty": [1.0, 1.3, 0.8],
    "presence_penalty": [0.0, 1.5],
    "frequency_penalty": [0.0, -0.7],
    "allowed_token_ids": [None, (3, 9, 27, 81, 100, 101, 450)],
    "bad_words": [(), ((81,), (40, 9, 450), (9, 27), (9, 450))],
    "min_tokens": [0, 6],
    "temperature": [0.0, 0.3, 1.0, 2.5],
    "top_k": [0, 1, 30],
    "top_p": [1.0, 0.9, 1e-9],
    "min_p": [0.0, 0.05],
}
"""min_tokens 6 is above the 5 tokens that HISTORY has generated. Temperature 0 is greedy, whatever follows it."""
NUM_COMBINATIONS = int(np.prod([len(values) for values in SETTINGS.values()]))


def combination(index: int) -> SamplingParams:
    """The index-th of all, the last setting changing fastest."""
    fields: dict[str, object] = {}
    for name, values in reversed(SETTINGS.items()):
        index, which = divmod(index, len(values))
        fields[name] = values[which]
    return SamplingParams(max_tokens=20, stop_token_ids=(9, 101), **fields)  # type: ignore[arg-type]


def logits_of(seed: int, vocab: int = VOCAB) -> Row:
    row: Row = (torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 2.0).numpy()
    return row


def left_by(logits: Row, params: SamplingParams) -> Distribution:
    return distribution(apply_rules(logits, params, HISTORY), params)


def check(index: int) -> None:
    params, logits = combination(index), logits_of(index)
    if params.temperature == 0.0:
        # The processors leave the likeliest at any temperature; it is drawn through the door that the engine uses.
        request = ScheduledRequest("r", (1,), 8, (1,), True, params, history=HISTORY)
        (token,) = sample(torch.from_numpy(logits)[None], [request]).sampled.values()
        greedy = msgspec.structs.replace(params, temperature=1.0)
        assert token == int(transformers_probabilities(logits, greedy, HISTORY.token_ids, 4).argmax()), params
        return
    kept = left_by(logits, params)
    got = np.zeros(VOCAB)
    got[slice(None) if kept.ids is None else kept.ids] = kept.weights / kept.weights.sum(dtype=np.float64)
    want = transformers_probabilities(logits, params, HISTORY.token_ids, HISTORY.num_prompt)
    assert torch.allclose(torch.from_numpy(got), want, rtol=0, atol=1e-6), params


def test_the_settings_are_all_that_change_a_distribution() -> None:
    """A new setting must come into this table. Grammars have tests of their own; the rest does not touch the choice."""
    others = {"max_tokens", "grammar", "logprobs", "prompt_logprobs", "seed", "stop_token_ids", "pooling"}
    assert {*SETTINGS} == {*SamplingParams.__struct_fields__} - others


@pytest.mark.parametrize("part", range(4))
def test_combinations_equal_transformers(part: int) -> None:
    """A few hundred of all, spread evenly; every pair of values is among them."""
    for index in range(part * 37, NUM_COMBINATIONS, 4 * 37):
        check(index)


def test_every_pair_of_values_is_among_those() -> None:
    chosen = [combination(index) for index in range(0, NUM_COMBINATIONS, 37)]
    for (name, values), (other, others) in itertools.combinations(SETTINGS.items(), 2):
        assert {(getattr(p, name), getattr(p, other)) for p in chosen} == {*itertools.product(values, others)}


@pytest.mark.long
def test_all_combinations_equal_transformers() -> None:
    for index in range(NUM_COMBINATIONS):
        check(index)
    facts = {"seed": "the combination's number", "combinations": NUM_COMBINATIONS, "tolerance": 1e-6, "different": 0}
    write_evidence("sampling_combinations", facts)


def chi_square(params: SamplingParams, logits: Row, num_draws: int) -> tuple[float, int]:
    """The statistic of draws at consecutive positions against transformers' distribution, and its degrees of freedom;
    tokens that are expected fewer than 5 times count together."""
    kept = left_by(logits, params)
    tokens = np.array([kept.draw(uniform(params.seed, position)) for position in range(num_draws)])
    counts = np.bincount(tokens, minlength=logits.shape[0]).astype(np.float64)
    want = transformers_probabilities(logits, params, HISTORY.token_ids, HISTORY.num_prompt).numpy() * num_draws
    assert not counts[want == 0].any(), "a token that must not be drawn"
    rare = (want > 0) & (want < 5)
    seen, expected = [*counts[want >= 5]], [*want[want >= 5]]
    if rare.any():
        seen.append(counts[rare].sum())
        expected.append(want[rare].sum())
    statistic = sum((a - b) ** 2 / b for a, b in zip(seen, expected, strict=True))
    return float(statistic), len(expected) - 1


def deviation(statistic: float, freedom: int) -> float:
    """In standard deviations (Wilson and Hilferty's cube root)."""
    spread = 2 / (9 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5)


def drawing(seed: int, count: int) -> Iterator[tuple[SamplingParams, Row]]:
    """Random combinations that leave something to chance."""
    rng = random.Random(seed)
    while count:
        params, logits = combination(rng.randrange(NUM_COMBINATIONS)), logits_of(rng.randrange(2**31))
        if params.temperature and left_by(logits, params).weights.shape[0] > 2:
            count -= 1
            yield msgspec.structs.replace(params, seed=rng.randrange(2**63)), logits


def test_draws_follow_the_distribution() -> None:
    for params, logits in drawing(seed=1, count=3):
        assert deviation(*chi_square(params, logits, 10_000)) < 4.5, params


@pytest.mark.long
def test_a_hundred_thousand_draws_follow_each_of_many_distributions() -> None:
    seed = random.randrange(2**32)
    found = [deviation(*chi_square(params, logits, 100_000)) for params, logits in drawing(seed, count=24)]
    assert max(found) < 4.5
    # Nor are they too good: the deviations are spread as chance wants.
    assert abs(float(np.mean(found))) < 1.0 and 0.4 < float(np.std(found)) < 1.9
    facts = {"seed": seed, "draws": 100_000, "largest": max(found), "limit": 4.5}
    write_evidence("sampling_chi_square", {**facts, "deviations": [round(value, 2) for value in found]})
