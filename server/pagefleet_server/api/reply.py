"""Answer bodies of a generation route, whole and in pieces.

Values in, dicts out. What may be large (an answer of many choices, log-probabilities of many tokens) is made into JSON
some at a time, with a turn of the event loop in between.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from pagefleet_server.api.errors import BadRequestError
from pagefleet_server.api.generation import TOKENS_AT_ONCE, Choice, Usage
from pagefleet_server.api.logprobs import Describe, Told, join_packed, pack, prompt_logprobs
from pagefleet_server.api.output_text import Delta

Document = dict[str, Any]
MAX_TOLD_BYTES = 64 * 1024 * 1024
"""Log-probabilities of an answer that is no stream are held until its end."""


class Reply(ABC):
    """One HTTP request's answer."""

    whole_object: str
    piece_object: str

    def __init__(
        self,
        head: Document,
        describe: Describe,
        *,
        with_token_ids: bool,
        with_logprobs: bool,
        num_prompt_logprobs: int | None = None,
    ) -> None:
        """`head`: id, created and model, in every document. num_prompt_logprobs: for `prompt_logprobs`, if told."""
        self._head = head
        self._describe = describe
        self._with_token_ids = with_token_ids
        self._with_logprobs = with_logprobs
        self._num_prompt_logprobs = num_prompt_logprobs
        self._noted: dict[int, list[Document]] = {}
        """Choice -> packed log-probabilities of its tokens so far, see note()."""
        self._num_noted_bytes = 0

    async def note(self, choice: Choice, delta: Delta) -> None:
        """Keep for whole() what only the delta tells. Raises BadRequestError beyond MAX_TOLD_BYTES."""
        if not self._with_logprobs:
            return
        if choice.plan.index not in self._noted:
            self._noted[choice.plan.index] = await self._echoed_logprobs(choice)
        if not delta.token_ids:
            return
        told = list(zip(delta.token_ids, delta.logprobs, strict=True))
        packed = pack(self._logprobs(choice, told)["logprobs"])
        self._noted[choice.plan.index].append(packed)
        self._num_noted_bytes += sum(len(value) for value in packed.values() if isinstance(value, bytes))
        if self._num_noted_bytes > MAX_TOLD_BYTES:
            raise BadRequestError(
                f"the log-probabilities of this answer have more than {MAX_TOLD_BYTES} bytes, and are held until its "
                "end; ask for a stream, for fewer of them, or for fewer tokens",
                param="logprobs",
                code="answer_too_large",
            )

    async def whole(self, choices: Sequence[Choice], usage: Usage) -> Document:
        """The body of an answer that is no stream, after every delta was noted. Choices are msgspec.Raw."""
        document: Document = {**self._head, "object": self.whole_object, "choices": []}
        for choice in choices:
            body = await self._whole_choice(choice)
            document["choices"].append(msgspec.Raw(msgspec.json.encode(body)))
            await asyncio.sleep(0)
        document["usage"] = usage.to_dict()
        return document | self._prompt_ids(choices[0])

    async def opening(self, choice: Choice) -> Document | None:
        """The event in front of a choice's first delta, if there is one."""
        piece = await self._opening_choice(choice)
        return None if piece is None else self._event([piece]) | self._prompt_ids(choice)

    def piece(self, choice: Choice, delta: Delta) -> Document | None:
        """One event; None when the delta has nothing to tell."""
        body = self._piece_choice(choice, delta)
        return None if body is None else self._event([body])

    def final_usage(self, usage: Usage) -> Document:
        """The event that closes a stream with include_usage."""
        return self._event([]) | {"usage": usage.to_dict()}

    async def _echoed_logprobs(self, choice: Choice) -> list[Document]:
        """Of the prompt's tokens, packed, where they are told in front of the output's."""
        return []

    def _event(self, choices: list[Document]) -> Document:
        return {**self._head, "object": self.piece_object, "choices": choices}

    def _ids(self, token_ids: Sequence[int]) -> Document:
        return {"token_ids": list(token_ids)} if self._with_token_ids else {}

    async def _prompt_logprobs(self, choice: Choice) -> Document:
        """vLLM's `prompt_logprobs`."""
        num_top = self._num_prompt_logprobs
        if num_top is None:
            return {}

        def render(told: Told) -> Document:
            return {"prompt_logprobs": prompt_logprobs(told, self._describe, num_top=num_top)}

        return join_packed(await pack_in_turns(choice.prompt_told, render))

    def _prompt_ids(self, choice: Choice) -> Document:
        """Where the route tells prompt ids beside the choices."""
        return {}

    @abstractmethod
    def _logprobs(self, choice: Choice, told: Told) -> Document:
        """`logprobs` of a choice's next tokens; null when they are not told."""

    @abstractmethod
    async def _whole_choice(self, choice: Choice) -> Document: ...

    @abstractmethod
    async def _opening_choice(self, choice: Choice) -> Document | None: ...

    @abstractmethod
    def _piece_choice(self, choice: Choice, delta: Delta) -> Document | None: ...

    def _must_tell(self, delta: Delta) -> bool:
        """Whether the delta is worth an event even without text."""
        tells_tokens = bool(delta.token_ids) and (self._with_token_ids or self._with_logprobs)
        return delta.finish_reason is not None or tells_tokens


async def pack_in_turns(told: Told, render: Callable[[Told], Document]) -> list[Document]:
    """Packed documents of so many tokens each that none takes long."""
    parts = []
    for start in range(0, len(told), TOKENS_AT_ONCE):
        parts.append(pack(render(told[start : start + TOKENS_AT_ONCE])))
        await asyncio.sleep(0)
    return parts


def describe_end(delta: Delta | None) -> Document:
    """Why a choice ended; nulls while it goes on."""
    reason, stop = (None, None) if delta is None else (delta.finish_reason, delta.stop_reason)
    return {"finish_reason": reason, "stop_reason": stop}
