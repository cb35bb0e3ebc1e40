"""How much a grammar may ask of one step: read where it is first built, and where each token is checked."""

from llguidance import LLMatcher, LLParserLimits

MAX_STEP_ITEMS = 5000
"""Of the parser, for one token: about 20 ms, for which every stream of the replica stands still. JSON schemas and
grammars without ambiguity stay below a hundred; `s: s s | "a"` needs more for each token, seconds by the hundredth."""
TOO_COMPLEX = "the grammar allows too many readings of what was written so far"
"""How the message of a request begins that fails for it; only the output shows it."""
_WORDS = ("too many", "items; max is", "lexer error")
"""Of the library's own messages; the reason that it gives apart from them is the same for all faults."""


def make_limits() -> LLParserLimits:
    """For every matcher; the library's own where they are not named."""
    return LLParserLimits(step_max_items=MAX_STEP_ITEMS)


def is_too_complex(matcher: LLMatcher) -> bool:
    """Whether it has given up, as opposed to having been given a text that does not fit."""
    told = matcher.get_error().partition("<state>")[0].lower()  # behind it stands what was written
    return matcher.is_error() and any(word in told for word in _WORDS)
