"""Answer bodies of /v1/completions."""

from typing import Any

from pagefleet_server.api.generation import Choice
from pagefleet_server.api.logprobs import Told, completion_logprobs, join_packed
from pagefleet_server.api.output_text import Delta
from pagefleet_server.api.reply import Document, Reply, describe_end, pack_in_turns


class CompletionReply(Reply):
    """An echoed prompt stands in front of the text."""

    whole_object = "text_completion"
    piece_object = "text_completion"

    def __init__(self, *args: Any, echo: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._echo = echo
        self._offsets: dict[int, int] = {}
        """Choice -> characters of the tokens that have been told."""

    async def _whole_choice(self, choice: Choice) -> Document:
        text = (choice.plan.prompt_text or "") + "".join(choice.text)
        body = {"index": choice.plan.index, "text": text} | describe_end(choice.last) | self._ids(choice.token_ids)
        noted = self._noted.get(choice.plan.index)
        body["logprobs"] = join_packed(noted) if noted else None
        return body | self._choice_prompt_ids(choice) | await self._prompt_logprobs(choice)

    async def _opening_choice(self, choice: Choice) -> Document | None:
        echoed = await self._echoed_logprobs(choice)
        if not choice.plan.prompt_text and not self._with_token_ids and not echoed:
            return None
        body = {"index": choice.plan.index, "text": choice.plan.prompt_text or ""} | describe_end(None)
        body["logprobs"] = join_packed(echoed) if echoed else None
        return body | self._ids(()) | self._choice_prompt_ids(choice)

    def _piece_choice(self, choice: Choice, delta: Delta) -> Document | None:
        if not delta.text and not self._must_tell(delta):
            return None
        body = {"index": choice.plan.index, "text": delta.text} | describe_end(delta) | self._ids(delta.token_ids)
        return body | self._logprobs(choice, list(zip(delta.token_ids, delta.logprobs, strict=self._with_logprobs)))

    def _choice_prompt_ids(self, choice: Choice) -> Document:
        return {"prompt_token_ids": choice.plan.prompt_token_ids} if self._with_token_ids else {}

    async def _echoed_logprobs(self, choice: Choice) -> list[Document]:
        if not self._echo or not self._with_logprobs:
            return []
        return await pack_in_turns(choice.prompt_told, lambda told: self._logprobs(choice, told)["logprobs"])

    def _logprobs(self, choice: Choice, told: Told) -> Document:
        if not self._with_logprobs:
            return {"logprobs": None}
        offset = self._offsets.get(choice.plan.index, 0)
        document = completion_logprobs(told, self._describe, offset=offset)
        self._offsets[choice.plan.index] = offset + sum(len(text) for text in document["tokens"])
        return {"logprobs": document}
