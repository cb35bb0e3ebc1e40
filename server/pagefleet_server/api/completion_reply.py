"""Answer bodies of /v1/completions."""

from collections.abc import Sequence
from typing import Any

from pagefleet_server.api.generation import Choice
from pagefleet_server.api.logprobs import completion_logprobs
from pagefleet_server.api.output_text import Delta
from pagefleet_server.api.reply import Document, Reply, describe_end
from pagefleet_server.core.step import TokenLogprobs


class CompletionReply(Reply):
    """An echoed prompt stands in front of the text."""

    whole_object = "text_completion"
    piece_object = "text_completion"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._offsets: dict[int, int] = {}
        """Choice -> characters of the tokens that have been told."""

    def _whole_choice(self, choice: Choice) -> Document:
        text = (choice.plan.prompt_text or "") + "".join(choice.text)
        body = {"index": choice.plan.index, "text": text} | describe_end(choice.last) | self._ids(choice.token_ids)
        return body | self._logprobs(choice, choice.token_ids, choice.logprobs) | self._choice_prompt_ids(choice)

    def _opening_choice(self, choice: Choice) -> Document | None:
        if not choice.plan.prompt_text and not self._with_token_ids:
            return None
        body = {"index": choice.plan.index, "text": choice.plan.prompt_text or "", "logprobs": None}
        return body | describe_end(None) | self._ids(()) | self._choice_prompt_ids(choice)

    def _piece_choice(self, choice: Choice, delta: Delta) -> Document | None:
        if not delta.text and not self._must_tell(delta):
            return None
        body = {"index": choice.plan.index, "text": delta.text} | describe_end(delta) | self._ids(delta.token_ids)
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
