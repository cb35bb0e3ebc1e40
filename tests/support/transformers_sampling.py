"""The distribution that transformers' own logits processors leave, in the order of its generate()."""

from collections.abc import Sequence

import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pagefleet_server.core.sampling_params import SamplingParams
from pagefleet_server.runner.rows import Row


def transformers_probabilities(
    logits: Row, params: SamplingParams, history: Sequence[int] = (1,), num_prompt: int = 1
) -> torch.Tensor:
    """float64 [V]. Presence and frequency penalties are ours to compute: transformers has none."""
    scores = torch.from_numpy(logits.copy()).unsqueeze(0)
    input_ids = torch.tensor([list(history)], dtype=torch.int64)
    before, after = LogitsProcessorList(), LogitsProcessorList()
    if params.logit_bias:
        before.append(SequenceBiasLogitsProcessor([[[token], bias] for token, bias in params.logit_bias]))
    if params.repetition_penalty != 1.0:
        before.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.bad_words:
        after.append(NoBadWordsLogitsProcessor([list(word) for word in params.bad_words], eos_token_id=None))
    if params.min_tokens and params.stop_token_ids:
        after.append(
            MinNewTokensLengthLogitsProcessor(num_prompt, params.min_tokens, list(params.stop_token_ids), device="cpu")
        )
    if params.allowed_token_ids is not None:
        allowed = list(params.allowed_token_ids)
        after.append(PrefixConstrainedLogitsProcessor(lambda batch, ids: allowed, num_beams=1))
    after.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        after.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        after.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        after.append(MinPLogitsWarper(params.min_p))
    scores = before(input_ids, scores)  # type: ignore[arg-type]
    for token in history[num_prompt:]:
        scores[0, token] -= params.frequency_penalty
    for token in set(history[num_prompt:]):
        scores[0, token] -= params.presence_penalty
    return after(input_ids, scores)[0].double().softmax(-1)  # type: ignore[arg-type]
