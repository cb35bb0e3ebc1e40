"""POST /v1/embeddings."""

import base64
import math
import sys
from array import array
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace

import msgspec
from aiohttp import web

from pagefleet_server.api.answering import USAGE
from pagefleet_server.api.bodies import read_body
from pagefleet_server.api.errors import BadRequestError
from pagefleet_server.api.generation import Choice, ChoicePlan, Generation, Terms, Usage
from pagefleet_server.api.lengths import check_fits, check_token_ids
from pagefleet_server.api.output_text import TextRules
from pagefleet_server.api.planning import read_terms
from pagefleet_server.api.protocol.embeddings import EmbeddingBody
from pagefleet_server.api.service import SERVICE, Arrival, Loaded, Service
from pagefleet_server.api.whole_answer import send_json
from pagefleet_server.core.sampling_params import SamplingParams


async def post_embeddings(request: web.Request) -> web.StreamResponse:
    """A vector of length 1 for each input, in their order."""
    service = request.app[SERVICE]
    service.require()
    body = await read_body(request, service, EmbeddingBody)
    loaded = service.require()
    service.check_model(body.model)
    if loaded.ready.pooling is None:
        raise BadRequestError(
            f"{service.model_name!r} makes texts, no embeddings; serve it with --pooling last or mean for these",
            param="model",
            code="no_embeddings",
        )
    terms = read_terms(request, service, body, Arrival(service.clock()))
    vectors: list[array[float]] = []
    num_tokens = 0
    for group in _groups(body.inputs, service.settings.engine.scheduler.max_num_seqs):
        choices = await _run(service, loaded, body, group, terms)
        vectors += [_vector(choice.pooled, body.dimensions) for choice in choices]
        num_tokens += sum(len(choice.plan.prompt_token_ids) for choice in choices)
    request[USAGE] = Usage(prompt_tokens=num_tokens, completion_tokens=0, cached_tokens=0)
    document = {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": _encode(vector, body.encoding_format)}
            for index, vector in enumerate(vectors)
        ],
        "model": service.model_name,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
    return await send_json(request, msgspec.json.encode(document))


def _groups(inputs: Sequence[str | list[int]], size: int) -> Iterable[Sequence[str | list[int]]]:
    """So many run at once; the rest of a long list does not fill the queue."""
    return (inputs[start : start + size] for start in range(0, len(inputs), size))


async def _run(
    service: Service, loaded: Loaded, body: EmbeddingBody, inputs: Sequence[str | list[int]], terms: Terms
) -> list[Choice]:
    """Through the engine, as any other requests. Raises UnavailableError, BadRequestError, DeadlineError."""
    sampling = SamplingParams(max_tokens=1, pooling=loaded.ready.pooling)
    async with AsyncExitStack() as stack:
        with service.admit(len(inputs)) as arrival:
            prompts = [await _token_ids(loaded, body, item) for item in inputs]
            plans = [ChoicePlan(index, index, prompt, sampling, TextRules()) for index, prompt in enumerate(prompts)]
            terms = replace(terms, on_sent=arrival.on_sent)
            generation = await stack.enter_async_context(Generation(service, loaded.text, plans, terms))
        async with aclosing(generation.deltas()) as deltas:
            async for _ in deltas:
                pass
        return generation.choices


async def _token_ids(loaded: Loaded, body: EmbeddingBody, item: str | list[int]) -> list[int]:
    """Raises BadRequestError for an input without tokens, or with too many."""
    most = loaded.ready.max_model_len
    if not isinstance(item, str):
        check_fits(len(item), max_model_len=most)  # first: looking at each of a million ids takes long
        await check_token_ids(item, loaded.ready.vocab_size, param="input")
        return item
    least = -(-len(item.encode()) // loaded.text.max_token_bytes)
    if least > most:
        check_fits(least, max_model_len=most, what="at least ")
    ids = await loaded.text.encode_any(item, add_special_tokens=body.add_special_tokens)
    check_fits(len(ids), max_model_len=most)
    return ids


def _vector(parts: Sequence[bytes], dimensions: int | None) -> "array[float]":
    """Sum of the parts, cut to `dimensions`, then of length 1. Raises BadRequestError for more than there are."""
    columns = [_floats(part) for part in parts]
    total = columns[0] if len(columns) == 1 else array("f", map(sum, zip(*columns, strict=True)))
    if dimensions is not None and dimensions > len(total):
        raise BadRequestError(
            f"dimensions is {dimensions}; this model's embeddings have {len(total)}", param="dimensions"
        )
    cut = total[:dimensions]
    norm = math.sqrt(math.fsum(value * value for value in cut)) or 1.0
    return array("f", (value / norm for value in cut))


def _floats(data: bytes) -> "array[float]":
    """float32, little-endian."""
    values = array("f", data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _encode(vector: "array[float]", encoding: str) -> list[float] | str:
    if encoding == "float":
        return vector.tolist()
    if sys.byteorder == "big":
        vector.byteswap()
    return base64.b64encode(vector.tobytes()).decode()
