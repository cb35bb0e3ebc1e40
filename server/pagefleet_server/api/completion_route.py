"""POST /v1/completions."""

from contextlib import AsyncExitStack

from aiohttp import web

from pagefleet_server.api.answering import answer, make_head
from pagefleet_server.api.bodies import read_body
from pagefleet_server.api.completion_reply import CompletionReply
from pagefleet_server.api.errors import BadRequestError
from pagefleet_server.api.generation import Generation
from pagefleet_server.api.lengths import check_room, check_token_ids
from pagefleet_server.api.planning import Prompt, learn_facts, plan_choices, read_terms
from pagefleet_server.api.protocol.completions import DEFAULT_MAX_TOKENS, CompletionBody
from pagefleet_server.api.service import SERVICE, Loaded


async def post_completions(request: web.Request) -> web.StreamResponse:
    """Continue each prompt."""
    service = request.app[SERVICE]
    service.require()
    body = await read_body(request, service, CompletionBody)
    loaded = service.require_texts()
    service.check_model(body.model)
    if body.max_tokens == 0 and not body.echo:
        raise BadRequestError("max_tokens 0 asks for nothing, unless echo asks for the prompt", param="max_tokens")
    async with AsyncExitStack() as stack:
        with service.admit(len(body.prompts) * body.n) as arrival:
            terms = read_terms(request, service, body, arrival)
            async with terms.in_time(service.clock()):
                prompts = [await _encode(loaded, body, prompt) for prompt in body.prompts]
                facts = await learn_facts(loaded, body)
            wanted = None if body.max_tokens is None else max(1, body.max_tokens)
            plans = plan_choices(loaded, body, prompts, facts, wanted=wanted, default=DEFAULT_MAX_TOKENS)
            generation = await stack.enter_async_context(Generation(service, loaded.text, plans, terms))
        reply = CompletionReply(
            make_head("cmpl", service),
            loaded.text.describe,
            with_token_ids=body.return_token_ids,
            with_logprobs=body.num_logprobs is not None,
            num_prompt_logprobs=body.prompt_logprobs,
            echo=body.echo,
        )
        return await answer(request, service, generation, reply, body)


async def _encode(loaded: Loaded, body: CompletionBody, prompt: str | list[int]) -> Prompt:
    if isinstance(prompt, str):
        ids = await loaded.text.encode(
            prompt, add_special_tokens=body.add_special_tokens, max_model_len=loaded.ready.max_model_len
        )
        return ids, prompt if body.echo else None
    # First: looking at each of a million ids takes long.
    check_room(len(prompt), max_model_len=loaded.ready.max_model_len)
    await check_token_ids(prompt, loaded.ready.vocab_size)
    if not body.echo:
        return prompt, None
    return prompt, await loaded.text.decode_long(prompt, skip_special_tokens=body.skip_special_tokens)
