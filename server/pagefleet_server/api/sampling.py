"""From a request body to what the engine and the text stage need."""

from collections.abc import Sequence

from pagefleet_server.api.errors import BadRequestError
from pagefleet_server.api.output_text import TextRules
from pagefleet_server.api.protocol.sampling import SamplingBody
from pagefleet_server.core.sampling_params import SamplingParams

SEEDS = 2**63


def make_sampling(
    body: SamplingBody, *, max_tokens: int, seed: int, eos_token_ids: Sequence[int], vocab_size: int
) -> SamplingParams:
    """Sampling of one choice. `seed` is any integer. Raises BadRequestError for what only the model can tell."""
    if body.min_tokens > max_tokens:
        raise BadRequestError(
            f"min_tokens {body.min_tokens} is more than the {max_tokens} tokens of the output", param="min_tokens"
        )
    if unknown := [token_id for token_id in body.stop_token_ids if token_id >= vocab_size]:
        raise BadRequestError(
            f"token id {unknown[0]} is not in the vocabulary (0..{vocab_size - 1})", param="stop_token_ids"
        )
    stops = dict.fromkeys([*([] if body.ignore_eos else eos_token_ids), *body.stop_token_ids])
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=body.temperature,
        top_k=max(0, body.top_k),
        top_p=body.top_p,
        seed=seed % SEEDS,
        stop_token_ids=tuple(stops),
        min_tokens=body.min_tokens,
    )


def make_text_rules(body: SamplingBody, *, eos_token_ids: Sequence[int]) -> TextRules:
    """How the text of each choice ends."""
    return TextRules(
        stops=tuple(body.stop or ()),
        include_stop=body.include_stop_str_in_output,
        min_tokens=body.min_tokens,
        hidden_stop_ids=frozenset(eos_token_ids) - frozenset(body.stop_token_ids),
    )
