"""Answer bodies of the two generation routes, whole and in pieces. Pure: values in, dicts out."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from pagefleet_server.api.generation import Choice, Usage
from pagefleet_server.api.logprobs import Describe, chat_logprobs, completion_logprobs
from pagefleet_server.api.output_text import Delta
from pagefleet_server.core.step import TokenLogprobs

Document = dict[str, Any]


class Reply(ABC):
    """One HTTP request's answer."""

    whole_object: str
    piece_object: str

    def __init__(self, head: Document, describe: Describe, *, with_token_ids: bool, with_logprobs: bool) -> None:
        """`head`: id, created and model, in every document."""
        self._head = head
        self._describe = describe
        self._with_token_ids = with_token_ids
        self._with_logprobs = with_logprobs

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
        tells_tokens = delta.token_ids and (self._with_token_ids or self._with_logprobs)
        if not delta.text and delta.finish_reason is None and not tells_tokens:
            return None
        return self._event([self._piece_choice(choice, delta)])

    def final_usage(self, usage: Usage) -> Document:
        """The event that closes a stream with include_usage."""
        return self._event([]) | {"usage": usage.to_dict()}

    def _event(self, choices: list[Document]) -> Document:
        return {**self._head, "object": self.piece_object, "choices": choices}

    def _ids(self, token_ids: Sequence[int]) -> Document:
        return {"token_ids": list(token_ids)} if self._with_token_ids else {}

    def _prompt_ids(self, choice: Choice) -> Document:
        """Where the route tells prompt ids beside the choices."""
        return {}

    @abstractmethod
    def _whole_choice(self, choice: Choice) -> Document: ...

    @abstractmethod
    def _opening_choice(self, choice: Choice) -> Document | None: ...

    @abstractmethod
    def _piece_choice(self, choice: Choice, delta: Delta) -> Document: ...


def _end(delta: Delta | None) -> Document:
    reason, stop = (None, None) if delta is None else (delta.finish_reason, delta.stop_reason)
    return {"finish_reason": reason, "stop_reason": stop}


class CompletionReply(Reply):
    """/v1/completions. An echoed prompt stands in front of the text."""

    whole_object = "text_completion"
    piece_object = "text_completion"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._offsets: dict[int, int] = {}
        """Choice -> characters of the tokens that have been told."""

    def _whole_choice(self, choice: Choice) -> Document:
        text = (choice.plan.prompt_text or "") + "".join(choice.text)
        body = {"index": choice.plan.index, "text": text} | _end(choice.last) | self._ids(choice.token_ids)
        return body | self._logprobs(choice, choice.token_ids, choice.logprobs) | self._choice_prompt_ids(choice)

    def _opening_choice(self, choice: Choice) -> Document | None:
        if not choice.plan.prompt_text and not self._with_token_ids:
            return None
        body = {"index": choice.plan.index, "text": choice.plan.prompt_text or "", "logprobs": None}
        return body | _end(None) | self._ids(()) | self._choice_prompt_ids(choice)

    def _piece_choice(self, choice: Choice, delta: Delta) -> Document:
        body = {"index": choice.plan.index, "text": delta.text} | _end(delta) | self._ids(delta.token_ids)
        return body | self._logprobs(choice, delta.token_ids, delta.logprobs)

    def _choice_prompt_ids(self, choice: Choice) -> Document:
        return {"prompt_token_ids": choice.plan.prompt_token_ids} if self._with_token_ids else {}

    def _logprobs(self, choice: Choice, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Document:
        if not self._with_logprobs:
            return {"logprobs": None}
        offset = self._offsets.get(choice.plan.index, 0)
        told = completion_logprobs(list(zip(token_ids, logprobs, strict=True)), self._describe, offset=offset)
        self._offsets[choice.plan.index] = offset + sum(len(text) for text in told["tokens"])
        return {"logprobs": told}


class ChatReply(Reply):
    """/v1/chat/completions."""

    whole_object = "chat.completion"
    piece_object = "chat.completion.chunk"

    def _prompt_ids(self, choice: Choice) -> Document:
        return {"prompt_token_ids": choice.plan.prompt_token_ids} if self._with_token_ids else {}

    def _whole_choice(self, choice: Choice) -> Document:
        message = {"role": "assistant", "content": "".join(choice.text), "refusal": None}
        body = {"index": choice.plan.index, "message": message} | _end(choice.last) | self._ids(choice.token_ids)
        return body | self._logprobs(choice.token_ids, choice.logprobs)

    def _opening_choice(self, choice: Choice) -> Document:
        delta = {"role": "assistant", "content": ""}
        return {"index": choice.plan.index, "delta": delta, "logprobs": None} | _end(None)

    def _piece_choice(self, choice: Choice, delta: Delta) -> Document:
        content = {"content": delta.text} if delta.text else {}
        body = {"index": choice.plan.index, "delta": content} | _end(delta) | self._ids(delta.token_ids)
        return body | self._logprobs(delta.token_ids, delta.logprobs)

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Document:
        if not self._with_logprobs:
            return {"logprobs": None}
        return {"logprobs": chat_logprobs(list(zip(token_ids, logprobs, strict=True)), self._describe)}
