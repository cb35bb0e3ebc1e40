"""From a request body to what the engine and the text stage need."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from pagefleet_server.api.errors import BadRequestError
from pagefleet_server.api.output_text import TextRules
from pagefleet_server.api.protocol.sampling import SamplingBody
from pagefleet_server.core.sampling_params import SamplingParams

SEEDS = 2**63
MAX_RULES = 2**22
"""Token ids of rules, biases, and four characters of a grammar each, in one request; all prompts together."""


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
    check_min_tokens(body, max_tokens)
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


def vary_sampling(made: SamplingParams, body: SamplingBody, *, max_tokens: int, seed: int) -> SamplingParams:
    """The same for another choice of the same request: its rules, which may be long, are shared. Raises
    BadRequestError."""
    check_min_tokens(body, max_tokens)
    return msgspec.structs.replace(made, max_tokens=max_tokens, seed=seed % SEEDS)


def check_min_tokens(body: SamplingBody, max_tokens: int) -> None:
    """Raises BadRequestError when the output may not be long enough."""
    if body.min_tokens > max_tokens:
        raise BadRequestError(
            f"min_tokens {body.min_tokens} is more than the {max_tokens} tokens of the output", param="min_tokens"
        )


def check_rules(made: SamplingParams, num_prompts: int) -> None:
    """The engine gets the rules with each prompt. Raises BadRequestError for long ones of many prompts."""
    size = len(made.allowed_token_ids or ()) + 2 * len(made.logit_bias) + len(made.stop_token_ids)
    size += sum(map(len, made.bad_words)) + len(made.grammar or "") // 4
    if size * num_prompts > MAX_RULES:
        raise BadRequestError(
            f"the rules of the output have {size} values for each of {num_prompts} prompts; at most {MAX_RULES} are "
            "taken at once; send fewer prompts in a request",
            param="prompt",
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
        hides_output=body.max_tokens == 0,
    )
