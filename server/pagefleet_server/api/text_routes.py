"""POST /tokenize and /detokenize, GET /tokenizer_info."""

from collections.abc import Mapping

import msgspec
from aiohttp import web

from pagefleet_server.api.bodies import read_body
from pagefleet_server.api.lengths import check_token_ids
from pagefleet_server.api.protocol.chat import to_template
from pagefleet_server.api.protocol.tokenizing import DetokenizeBody, TokenizeBody
from pagefleet_server.api.service import SERVICE
from pagefleet_server.api.whole_answer import send_json


async def post_tokenize(request: web.Request) -> web.StreamResponse:
    """Token ids of a text or a conversation, as the generation routes would make them."""
    service = request.app[SERVICE]
    service.require()
    body = await read_body(request, service, TokenizeBody)
    loaded = service.require()
    service.check_model(body.model)
    with service.mind_long_texts():
        if body.messages is None:
            text, add_special_tokens = body.prompt or "", body.add_special_tokens is not False
        else:
            add_special_tokens = bool(body.add_special_tokens)
            text = await loaded.text.render(
                to_template(body.messages),
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                variables=body.chat_template_kwargs,
            )
        ids = await loaded.text.encode_any(text, add_special_tokens=add_special_tokens)
        strings = await loaded.text.token_strings(ids) if body.return_token_strs else None
    return await _answer(
        request,
        {
            "count": len(ids),
            "max_model_len": loaded.ready.max_model_len,
            "tokens": ids,
            "token_strs": strings,
        },
    )


async def post_detokenize(request: web.Request) -> web.StreamResponse:
    """Text of token ids."""
    service = request.app[SERVICE]
    service.require()
    body = await read_body(request, service, DetokenizeBody)
    loaded = service.require()
    service.check_model(body.model)
    await check_token_ids(body.tokens, loaded.ready.vocab_size, param="tokens")
    text = await loaded.text.decode_long(body.tokens, skip_special_tokens=body.skip_special_tokens)
    return await _answer(request, {"prompt": text})


async def get_tokenizer_info(request: web.Request) -> web.StreamResponse:
    """What clients need that render templates or count tokens themselves (vLLM's name)."""
    service = request.app[SERVICE]
    loaded = service.require()
    return await _answer(request, loaded.text.tokenizer_info | {"model_max_length": loaded.ready.max_model_len})


async def _answer(request: web.Request, document: Mapping[str, object]) -> web.StreamResponse:
    return await send_json(request, msgspec.json.encode(document))
