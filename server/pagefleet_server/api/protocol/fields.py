"""Fields of request bodies that the models do not declare: which are refused, and which change nothing.

A field that would change the result is refused unless it has a value that asks for nothing.
"""

from collections.abc import Mapping
from typing import Final

from pagefleet_server.api.errors import BadRequestError

REFUSED: Final[Mapping[str, tuple[object, ...]]] = {
    # OpenAI
    "audio": (None,),
    "best_of": (None, 1),
    "function_call": (None, "none"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
    # vLLM
    "chat_template": (None,),
    "length_penalty": (None, 1),
    "logits_processors": (None, []),
    "media_io_kwargs": (None,),
    "mm_processor_kwargs": (None,),
    "prompt_embeds": (None,),
    "repetition_detection": (None,),
    "return_tokens_as_token_ids": (None, False),
    "spaces_between_special_tokens": (None, True),
    "structural_tag": (None,),
    "thinking_token_budget": (None,),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
    "vllm_xargs": (None,),
}
"""Field -> values that ask for nothing. Any other value is answered with 400."""

HARMLESS: Final[frozenset[str]] = frozenset(
    {
        "guided_decoding_backend",
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Fields that change no result here: they are about accounts, storage or speed."""

MAX_NAMES = 256
MAX_NAME_CHARS = 64


def check_extra(extra: Mapping[str, object]) -> list[str]:
    """Names that nobody knows, sorted. Raises BadRequestError for a field that would change the result."""
    unknown = []
    for name, value in extra.items():
        if name in REFUSED:
            if not any(_same(value, neutral) for neutral in REFUSED[name]):
                raise BadRequestError(
                    f"{name} is not supported by this server; leave it out",
                    param=name,
                    code="unsupported_parameter",
                )
        elif name not in HARMLESS:
            unknown.append(name)
    return sorted(unknown)


def _same(value: object, neutral: object) -> bool:
    """0 and 0.0 are the same, False and 0 are not."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


class UnknownFields:
    """Remembers which unknown names have been told, so that each is told once; bounded."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def fresh(self, names: list[str]) -> list[str]:
        """Those never given before, shortened for the log."""
        new = []
        for name in (name[:MAX_NAME_CHARS] for name in names):
            if name not in self._told and len(self._told) < MAX_NAMES:
                self._told.add(name)
                new.append(name)
        return new
