"""From a request body to what the engine and the text stage need."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pagefleet_server.api.errors import BadRequestError
from pagefleet_server.api.output_text import TextRules
from pagefleet_server.api.protocol.sampling import SamplingBody
from pagefleet_server.core.sampling_params import SamplingParams

SEEDS = 2**63


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the rules of a request are checked against."""

    eos_token_ids: tuple[int, ...]
    vocab_size: int
    bad_words: tuple[tuple[int, ...], ...] = ()
    """The request's bad words as token sequences."""
    grammar: str | None = None
    """Of the output; None: free text."""


def make_sampling(body: SamplingBody, *, max_tokens: int, seed: int, facts: ModelFacts) -> SamplingParams:
    """Sampling of one choice. `seed` is any integer. Raises BadRequestError for what only the model can tell."""
    if body.min_tokens > max_tokens:
        raise BadRequestError(
            f"min_tokens {body.min_tokens} is more than the {max_tokens} tokens of the output", param="min_tokens"
        )
    if facts.grammar is not None and body.ignore_eos:
        raise BadRequestError("ignore_eos does not go with a shape of the output: it ends where its grammar ends")
    logit_bias = {int(token_id): bias for token_id, bias in body.logit_bias.items()}
    stops = dict.fromkeys([*([] if body.ignore_eos else facts.eos_token_ids), *body.stop_token_ids])
    _check_vocabulary(body.stop_token_ids, facts, "stop_token_ids")
    _check_vocabulary(logit_bias, facts, "logit_bias")
    _check_vocabulary(body.allowed_token_ids or (), facts, "allowed_token_ids")
    if body.allowed_token_ids is not None and body.min_tokens and set(body.allowed_token_ids) <= set(stops):
        raise BadRequestError(
            "no allowed token is left before min_tokens: all of them end the output", param="allowed_token_ids"
        )
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=body.temperature,
        top_k=max(0, body.top_k),
        top_p=body.top_p,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=tuple(logit_bias.items()),
        allowed_token_ids=None if body.allowed_token_ids is None else tuple(dict.fromkeys(body.allowed_token_ids)),
        bad_words=facts.bad_words,
        grammar=facts.grammar,
        logprobs=body.num_logprobs,
        prompt_logprobs=body.num_prompt_logprobs,
        seed=seed % SEEDS,
        stop_token_ids=tuple(stops),
        min_tokens=body.min_tokens,
    )


def _check_vocabulary(token_ids: Iterable[int], facts: ModelFacts, param: str) -> None:
    for token_id in token_ids:
        if token_id >= facts.vocab_size:
            raise BadRequestError(
                f"token id {token_id} is not in the vocabulary (0..{facts.vocab_size - 1})", param=param
            )


def make_text_rules(body: SamplingBody, *, eos_token_ids: Sequence[int]) -> TextRules:
    """How the text of each choice ends."""
    return TextRules(
        stops=tuple(body.stop or ()),
        include_stop=body.include_stop_str_in_output,
        min_tokens=body.min_tokens,
        hidden_stop_ids=frozenset(eos_token_ids) - frozenset(body.stop_token_ids),
    )
