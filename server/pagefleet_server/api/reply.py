"""Answer bodies of a generation route, whole and in pieces. Pure: values in, dicts out."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from pagefleet_server.api.generation import Choice, Usage
from pagefleet_server.api.logprobs import Describe, prompt_logprobs
from pagefleet_server.api.output_text import Delta

Document = dict[str, Any]


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

    def whole(self, choices: Sequence[Choice], usage: Usage) -> Document:
        """The body of an answer that is no stream."""
        document = {**self._head, "object": self.whole_object}
        document["choices"] = [self._whole_choice(choice) for choice in choices]
        document["usage"] = usage.to_dict()
        return document | self._prompt_ids(choices[0])

    def opening(self, choice: Choice) -> Document | None:
        """The event in front of a choice's first delta, if there is one."""
        piece = self._opening_choice(choice)
        return None if piece is None else self._event([piece]) | self._prompt_ids(choice)

    def piece(self, choice: Choice, delta: Delta) -> Document | None:
        """One event; None when the delta has nothing to tell."""
        body = self._piece_choice(choice, delta)
        return None if body is None else self._event([body])

    def final_usage(self, usage: Usage) -> Document:
        """The event that closes a stream with include_usage."""
        return self._event([]) | {"usage": usage.to_dict()}

    def _event(self, choices: list[Document]) -> Document:
        return {**self._head, "object": self.piece_object, "choices": choices}

    def _ids(self, token_ids: Sequence[int]) -> Document:
        return {"token_ids": list(token_ids)} if self._with_token_ids else {}

    def _prompt_logprobs(self, choice: Choice) -> Document:
        """vLLM's `prompt_logprobs`."""
        if self._num_prompt_logprobs is None:
            return {}
        told = prompt_logprobs(choice.prompt_told, self._describe, num_top=self._num_prompt_logprobs)
        return {"prompt_logprobs": told}

    def _prompt_ids(self, choice: Choice) -> Document:
        """Where the route tells prompt ids beside the choices."""
        return {}

    @abstractmethod
    def _whole_choice(self, choice: Choice) -> Document: ...

    @abstractmethod
    def _opening_choice(self, choice: Choice) -> Document | None: ...

    @abstractmethod
    def _piece_choice(self, choice: Choice, delta: Delta) -> Document | None: ...

    def _must_tell(self, delta: Delta) -> bool:
        """Whether the delta is worth an event even without text."""
        tells_tokens = bool(delta.token_ids) and (self._with_token_ids or self._with_logprobs)
        return delta.finish_reason is not None or tells_tokens


def describe_end(delta: Delta | None) -> Document:
    """Why a choice ended; nulls while it goes on."""
    reason, stop = (None, None) if delta is None else (delta.finish_reason, delta.stop_reason)
    return {"finish_reason": reason, "stop_reason": stop}
