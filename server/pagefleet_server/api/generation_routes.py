"""POST /v1/completions and /v1/chat/completions."""

import re
import secrets
import uuid
from collections.abc import Sequence
from contextlib import ExitStack

from aiohttp import web

from pagefleet_server.api.answering import send_stream, send_whole
from pagefleet_server.api.bodies import read_body
from pagefleet_server.api.errors import BadRequestError
from pagefleet_server.api.generation import ChoicePlan, Generation, Terms
from pagefleet_server.api.lengths import check_token_ids, resolve_max_tokens
from pagefleet_server.api.protocol.chat import ChatBody
from pagefleet_server.api.protocol.completions import DEFAULT_MAX_TOKENS, CompletionBody
from pagefleet_server.api.protocol.sampling import SamplingBody
from pagefleet_server.api.replies import ChatReply, CompletionReply, Reply
from pagefleet_server.api.sampling import SEEDS, ModelFacts, make_sampling, make_text_rules
from pagefleet_server.api.service import SERVICE, TENANT, Loaded, Service

TIMEOUT_HEADER = "X-Request-Timeout"

Prompt = tuple[list[int], str | None]
"""Token ids, and the text to echo."""


async def post_completions(request: web.Request) -> web.StreamResponse:
    """Continue each prompt."""
    service = request.app[SERVICE]
    service.require()
    body = await read_body(request, service, CompletionBody)
    loaded = service.require()
    service.check_model(body.model)
    with ExitStack() as stack:
        with service.admit(len(body.prompts) * body.n) as arrival:
            prompts = [await _encode_prompt(loaded, body, prompt) for prompt in body.prompts]
            facts = await _learn_facts(loaded, body)
            plans = _plan(loaded, body, prompts, facts, wanted=body.max_tokens, default=DEFAULT_MAX_TOKENS)
            terms = _read_terms(request, service, body, arrival)
            generation = stack.enter_context(Generation(service, loaded.text, plans, terms))
        reply = _make_reply(CompletionReply, _head("cmpl", service), loaded, body)
        return await _answer(request, service, generation, reply, body)


async def post_chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    service = request.app[SERVICE]
    service.require()
    body = await read_body(request, service, ChatBody)
    loaded = service.require()
    service.check_model(body.model)
    with ExitStack() as stack:
        with service.admit(body.n) as arrival:
            prompt = await _encode_conversation(loaded, body)
            wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
            facts = await _learn_facts(loaded, body)
            plans = _plan(loaded, body, [(prompt, None)], facts, wanted=wanted, default=None)
            terms = _read_terms(request, service, body, arrival)
            generation = stack.enter_context(Generation(service, loaded.text, plans, terms))
        reply = _make_reply(ChatReply, _head("chatcmpl", service), loaded, body)
        return await _answer(request, service, generation, reply, body)


def _read_terms(request: web.Request, service: Service, body: SamplingBody, arrival: float) -> Terms:
    return Terms(
        arrival=arrival,
        timeout_seconds=_read_timeout(request, service, body),
        tenant=request.get(TENANT, ""),
        cache_salt=body.cache_salt,
        priority=body.priority,
    )


def _read_timeout(request: web.Request, service: Service, body: SamplingBody) -> float | None:
    """The least of what server, header and body say. Raises BadRequestError for a header that is no number."""
    limits = [service.settings.http.request_timeout_seconds, body.timeout]
    header = request.headers.get(TIMEOUT_HEADER)
    if header is not None:
        if not re.fullmatch(r"\d{1,9}(\.\d{1,9})?", header) or float(header) == 0:
            raise BadRequestError(f"{TIMEOUT_HEADER}: {header[:40]!r} is no number of seconds above 0")
        limits.append(float(header))
    return min((limit for limit in limits if limit is not None), default=None)


def _head(prefix: str, service: Service) -> dict[str, object]:
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(service.wall_clock()), "model": service.model_name}


def _make_reply(kind: type[Reply], head: dict[str, object], loaded: Loaded, body: SamplingBody) -> Reply:
    with_logprobs = body.num_logprobs is not None
    return kind(head, loaded.text.describe, with_token_ids=body.return_token_ids, with_logprobs=with_logprobs)


async def _answer(
    request: web.Request, service: Service, generation: Generation, reply: Reply, body: SamplingBody
) -> web.StreamResponse:
    if not body.stream:
        return await send_whole(request, generation, reply)
    timeout = service.settings.http.write_timeout_seconds
    return await send_stream(request, generation, reply, body, write_timeout_seconds=timeout)


async def _encode_prompt(loaded: Loaded, body: CompletionBody, prompt: str | list[int]) -> Prompt:
    if isinstance(prompt, str):
        ids = await loaded.text.encode(
            prompt, add_special_tokens=body.add_special_tokens, max_model_len=loaded.ready.max_model_len
        )
        return ids, prompt if body.echo else None
    check_token_ids(prompt, loaded.ready.vocab_size)
    if not body.echo:
        return prompt, None
    return prompt, await loaded.text.decode_long(prompt, skip_special_tokens=body.skip_special_tokens)


async def _encode_conversation(loaded: Loaded, body: ChatBody) -> list[int]:
    text = await loaded.text.render(
        body.template_messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        documents=body.documents,
        variables=body.template_variables,
    )
    return await loaded.text.encode(
        text, add_special_tokens=body.add_special_tokens, max_model_len=loaded.ready.max_model_len
    )


async def _learn_facts(loaded: Loaded, body: SamplingBody) -> ModelFacts:
    return ModelFacts(
        eos_token_ids=tuple(loaded.ready.eos_token_ids),
        vocab_size=loaded.ready.vocab_size,
        bad_words=await loaded.text.encode_words(body.bad_words) if body.bad_words else (),
    )


def _plan(
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
    rules = make_text_rules(body, eos_token_ids=ready.eos_token_ids)
    first_seed = secrets.randbelow(SEEDS) if body.seed is None else body.seed
    plans = []
    for prompt_index, (token_ids, echo) in enumerate(prompts):
        max_tokens = resolve_max_tokens(len(token_ids), wanted, default=default, max_model_len=ready.max_model_len)
        for number in range(body.n):
            sampling = make_sampling(body, max_tokens=max_tokens, seed=first_seed + number, facts=facts)
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
