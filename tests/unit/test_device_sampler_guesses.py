"""Guessed tokens where draws are made on the device: each row as the request would draw it a step later."""

import random

import torch

from pagefleet_kernels.sampling_batch import SamplingBatch
from pagefleet_server.core.sampling_params import SamplingParams
from pagefleet_server.core.step import DrawnToken, ScheduledRequest, TokenHistory
from pagefleet_server.runner.device_sampler import sample_on_device

VOCABULARY = 12


class CountingSampler:
    """Draws by the row's largest logit, the seed and the position, and by nothing else."""

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        drawn = logits.nan_to_num().argmax(-1) + batch.seeds + 5 * batch.positions * (batch.temperature > 0)
        return drawn % VOCABULARY


def guessing(name: str, drafts: tuple[int, ...], **params: float) -> ScheduledRequest:
    sampling = SamplingParams(max_tokens=50, seed=len(name), **params)  # type: ignore[arg-type]
    history = TokenHistory([3, 4, 5], 2) if sampling.needs_history else None
    return ScheduledRequest(name, (5, *drafts), 2, (1, 2), True, sampling, history, num_drafts=len(drafts))


def one_by_one(logits: torch.Tensor, request: ScheduledRequest) -> list[int]:
    """The tokens of single steps, as far as guesses and draws agree."""
    tokens: list[int] = []
    for row in range(1 + request.num_drafts):
        alone = sample_on_device(CountingSampler(), logits[row : row + 1], [request.after_drafts(row)], None)
        tokens.append(alone.sampled[request.request_id])
        if row < request.num_drafts and tokens[-1] != request.token_ids[1 + row]:
            break
    return tokens


def test_rows_behind_right_guesses_are_drawn_as_single_steps_draw_them() -> None:
    rng = random.Random(4)
    generator = torch.Generator().manual_seed(4)
    num_right = 0
    for _ in range(300):
        requests, rows = [], []
        for index in range(rng.randrange(1, 5)):
            params = {"temperature": rng.choice([0.0, 1.0]), "presence_penalty": rng.choice([0.0, 0.0, 0.5])}
            count = rng.randrange(4)
            logits = torch.randn(1 + count, VOCABULARY, generator=generator)
            request = guessing("x" * (index + 1), (), **params)
            drafts: tuple[int, ...] = ()
            for row in range(count):  # guesses that are right four times in five
                asked = guessing(request.request_id, drafts, **params)
                token = one_by_one(logits[: row + 1], asked)[-1]
                drafts += (token if rng.random() < 0.8 else (token + 1) % VOCABULARY,)
            requests.append(guessing(request.request_id, drafts, **params))
            rows.append(logits)
        result = sample_on_device(CountingSampler(), torch.cat(rows), requests, None)
        for request, logits in zip(requests, rows, strict=True):
            name = request.request_id
            tokens = [result.sampled[name], *(drawn.token_id for drawn in result.further.get(name, ()))]
            assert tokens == one_by_one(logits, request)
            num_right += len(tokens) - 1
        assert not result.failed
    assert num_right > 100


def test_a_row_without_numbers_fails_the_request_only_where_it_is_known() -> None:
    request = guessing("r", (2, 3), temperature=0.0)
    logits = torch.zeros(3, VOCABULARY)
    logits[0, 1] = logits[1, 2] = 1.0  # seed 1: draws 2, then 3
    assert sample_on_device(CountingSampler(), logits, [request], None).further["r"][0] == DrawnToken(3)
    logits[1] = float("nan")
    result = sample_on_device(CountingSampler(), logits, [request], None)
    assert (result.sampled, result.further, result.failed) == ({"r": 2}, {}, {})
    logits[0] = float("nan")
    result = sample_on_device(CountingSampler(), logits, [request], None)
    assert "r" in result.failed and not result.sampled and not result.further.get("r")
