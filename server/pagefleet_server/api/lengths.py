"""The one rule of prompt and output lengths: defaults are cut to the room there is, explicit wishes are never."""

import asyncio

from pagefleet_server.api.errors import BadRequestError

IDS_AT_ONCE = 64 * 1024
"""A list may have a million; so many are looked at between two turns of the event loop."""
TOO_LONG = "context_length_exceeded"


def check_text_bytes(num_bytes: int, *, max_token_bytes: int, max_model_len: int) -> None:
    """Refuse a text that cannot fit, before it is tokenised. Raises BadRequestError."""
    least = -(-num_bytes // max_token_bytes)
    if least >= max_model_len:
        raise BadRequestError(
            f"the prompt's text has {num_bytes} bytes; no token has more than {max_token_bytes} bytes, so it has at "
            f"least {least} tokens, and with one for the output it exceeds the context of {max_model_len} tokens",
            code=TOO_LONG,
        )


def check_room(num_prompt: int, *, max_model_len: int) -> None:
    """Raises BadRequestError for a prompt that leaves no room for a token of output."""
    if num_prompt >= max_model_len:
        raise BadRequestError(
            f"the context is {max_model_len} tokens; the prompt has {num_prompt}, which leaves no room for the output",
            code=TOO_LONG,
        )


def resolve_max_tokens(num_prompt: int, wanted: int | None, *, default: int | None, max_model_len: int) -> int:
    """Output tokens of a request, >= 1. `default` None means the rest of the context. Raises BadRequestError."""
    if num_prompt == 0:
        raise BadRequestError("the prompt has no tokens; give at least one", param="prompt")
    check_room(num_prompt, max_model_len=max_model_len)
    room = max_model_len - num_prompt
    if wanted is None:
        return room if default is None else min(default, room)
    if wanted > room:
        raise BadRequestError(
            f"the context is {max_model_len} tokens; {num_prompt + wanted} were asked for: {num_prompt} in the prompt "
            f"and {wanted} for the output. Ask for at most {room}, or shorten the prompt",
            param="max_tokens",
            code=TOO_LONG,
        )
    return wanted


def check_fits(num_prompt: int, *, max_model_len: int, what: str = "") -> None:
    """For a prompt without output. Raises BadRequestError."""
    if num_prompt == 0:
        raise BadRequestError("an input has no tokens; give at least one", param="input")
    if num_prompt > max_model_len:
        raise BadRequestError(
            f"the context is {max_model_len} tokens; an input has {what}{num_prompt}", param="input", code=TOO_LONG
        )


async def check_token_ids(token_ids: list[int], vocab_size: int, *, param: str = "prompt") -> None:
    """Raises BadRequestError for an id that the model does not have, naming the field."""
    for start in range(0, len(token_ids), IDS_AT_ONCE):
        highest = max(token_ids[start : start + IDS_AT_ONCE])
        if highest >= vocab_size:
            raise BadRequestError(f"token id {highest} is not in the vocabulary (0..{vocab_size - 1})", param=param)
        if len(token_ids) > IDS_AT_ONCE:
            await asyncio.sleep(0)
