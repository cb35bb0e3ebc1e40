"""POST /v1/chat/completions."""

from contextlib import AsyncExitStack

from aiohttp import web

from pagefleet_server.api.answering import answer, make_head
from pagefleet_server.api.bodies import read_body
from pagefleet_server.api.chat_reply import ChatReply
from pagefleet_server.api.errors import BadRequestError
from pagefleet_server.api.generation import Generation
from pagefleet_server.api.grammar import Shape
from pagefleet_server.api.parsers.answer import AnswerParser
from pagefleet_server.api.parsers.choose import make_tool_parser
from pagefleet_server.api.parsers.forced import FORCING, forced_call
from pagefleet_server.api.parsers.reasoning import ReasoningSplitter, begins_in_reasoning
from pagefleet_server.api.planning import learn_facts, plan_choices, read_terms
from pagefleet_server.api.protocol.chat import ChatBody
from pagefleet_server.api.service import SERVICE, Loaded


async def post_chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    service = request.app[SERVICE]
    service.require()
    body = await read_body(request, service, ChatBody)
    loaded = service.require_texts()
    service.check_model(body.model)
    kind = _choose_tool_parser(loaded, body)
    if kind == "mistral":  # its mark is a special token
        body = body.model_copy(update={"skip_special_tokens": False})
    async with AsyncExitStack() as stack:
        with service.admit(body.n) as arrival:
            terms = read_terms(request, service, body, arrival)
            async with terms.in_time(service.clock()):
                text = await render(loaded, body)
                prompt = await loaded.text.encode(
                    text, add_special_tokens=body.add_special_tokens, max_model_len=loaded.ready.max_model_len
                )
                facts = await learn_facts(loaded, body, call=_shape_call(kind, body))
            wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
            plans = plan_choices(loaded, body, [(prompt, None)], facts, wanted=wanted, default=None)
            generation = await stack.enter_async_context(Generation(service, loaded.text, plans, terms))
        reasons = loaded.text.reasons
        open_in_prompt = begins_in_reasoning(text, facts.grammar)

        def make_parser() -> AnswerParser:
            names = [tool.function.name for tool in body.tools]
            return AnswerParser(
                ReasoningSplitter(open_in_prompt=open_in_prompt) if reasons else None,
                make_tool_parser(kind, names) if kind != "none" else None,
                parallel=body.parallel_tool_calls,
            )

        reply = ChatReply(
            make_head("chatcmpl", service),
            loaded.text.describe,
            make_parser=make_parser,
            with_token_ids=body.return_token_ids,
            with_logprobs=body.num_logprobs is not None,
            num_prompt_logprobs=body.prompt_logprobs,
            with_reasoning=reasons and body.include_reasoning,
        )
        return await answer(request, service, generation, reply, body)


async def render(loaded: Loaded, body: ChatBody) -> str:
    """The prompt's text. Raises BadRequestError."""
    return await loaded.text.render(
        body.template_messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        tools=[tool.to_template() for tool in body.tools] if body.offers_tools else None,
        documents=body.documents,
        variables=body.template_variables,
    )


def _shape_call(kind: str, body: ChatBody) -> Shape | None:
    """Raises BadRequestError when the model's way of writing calls cannot be forced."""
    if not body.forced:
        return None
    if kind not in FORCING:
        raise BadRequestError("this model's way of writing tool calls cannot be forced", param="tool_choice")
    return forced_call(kind, [(function.name, function.parameters) for function in body.forced])


def _choose_tool_parser(loaded: Loaded, body: ChatBody) -> str:
    """Raises BadRequestError when tools are offered to a model that cannot be told of them."""
    if not body.offers_tools:
        return "none"
    if loaded.text.tool_parser == "none":
        raise BadRequestError("this model's chat template does not take tools", param="tools")
    return loaded.text.tool_parser
