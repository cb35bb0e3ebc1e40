"""From a validated body and its encoded prompts to the choices that are to be made, and on which terms."""

import re
import secrets
from collections.abc import Sequence
from typing import Protocol

from aiohttp import web

from pagefleet_server.api.errors import BadRequestError
from pagefleet_server.api.generation import ChoicePlan, Terms
from pagefleet_server.api.generation_defaults import with_defaults
from pagefleet_server.api.grammar import Shape, read_grammar
from pagefleet_server.api.lengths import resolve_max_tokens
from pagefleet_server.api.protocol.sampling import SamplingBody
from pagefleet_server.api.sampling import (
    SEEDS,
    ModelFacts,
    check_rules,
    make_sampling,
    make_text_rules,
    vary_sampling,
)
from pagefleet_server.api.service import TENANT, TRACE, Arrival, Loaded, Service

TIMEOUT_HEADER = "X-Request-Timeout"

Prompt = tuple[list[int], str | None]
"""Token ids, and the text to echo."""


class Wishes(Protocol):
    """What a body may say of its terms."""

    @property
    def cache_salt(self) -> str:
        """Only requests with the same salt share cached blocks."""

    @property
    def priority(self) -> int:
        """The smaller, the sooner."""

    @property
    def timeout(self) -> float | None:
        """Seconds from arrival."""


def read_terms(request: web.Request, service: Service, body: Wishes, arrival: Arrival) -> Terms:
    """Raises BadRequestError for a deadline that is none."""
    return Terms(
        arrival=arrival.time,
        on_sent=arrival.on_sent,
        timeout_seconds=_read_timeout(request, service, body),
        tenant=request.get(TENANT, ""),
        cache_salt=body.cache_salt,
        priority=body.priority,
        on_end=None if TRACE not in request else request[TRACE].on_end,
    )


async def learn_facts(loaded: Loaded, body: SamplingBody, *, call: Shape | None = None) -> ModelFacts:
    """`call`: the shape of a tool call that must be made. Raises BadRequestError for a shape that cannot be had."""
    shape = read_grammar(body.response_format, body.structures)
    if shape is not None and call is not None:
        raise BadRequestError("a forced tool call and another shape of the output exclude each other")
    shape = shape or call
    return ModelFacts(
        eos_token_ids=tuple(loaded.ready.eos_token_ids),
        vocab_size=loaded.ready.vocab_size,
        bad_words=await loaded.text.encode_words(body.bad_words) if body.bad_words else (),
        grammar=None if shape is None else await loaded.text.compile(*shape),
    )


def plan_choices(
    loaded: Loaded,
    body: SamplingBody,
    prompts: Sequence[Prompt],
    facts: ModelFacts,
    *,
    wanted: int | None,
    default: int | None,
) -> list[ChoicePlan]:
    """`n` choices for each prompt, in order. Raises BadRequestError."""
    ready = loaded.ready
    body = with_defaults(body, loaded.defaults)
    rules = make_text_rules(body, eos_token_ids=ready.eos_token_ids)
    first_seed = secrets.randbelow(SEEDS) if body.seed is None else body.seed
    plans: list[ChoicePlan] = []
    for prompt_index, (token_ids, echo) in enumerate(prompts):
        max_tokens = resolve_max_tokens(len(token_ids), wanted, default=default, max_model_len=ready.max_model_len)
        for number in range(body.n):
            if plans:
                sampling = vary_sampling(plans[0].sampling, body, max_tokens=max_tokens, seed=first_seed + number)
            else:
                sampling = make_sampling(body, max_tokens=max_tokens, seed=first_seed, facts=facts)
                check_rules(sampling, len(prompts))
            plans.append(
                ChoicePlan(
                    index=prompt_index * body.n + number,
                    prompt_index=prompt_index,
                    prompt_token_ids=token_ids,
                    sampling=sampling,
                    rules=rules,
                    skip_special_tokens=body.skip_special_tokens,
                    prompt_text=echo,
                )
            )
    return plans


def _read_timeout(request: web.Request, service: Service, body: Wishes) -> float | None:
    """The least of what server, header and body say. Raises BadRequestError for a header that is no number."""
    limits = [service.settings.http.request_timeout_seconds, body.timeout]
    header = request.headers.get(TIMEOUT_HEADER)
    if header is not None:
        if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", header) or float(header) == 0:
            raise BadRequestError(f"{TIMEOUT_HEADER}: {header[:40]!r} is no number of seconds above 0")
        limits.append(float(header))
    return min((limit for limit in limits if limit is not None), default=None)
