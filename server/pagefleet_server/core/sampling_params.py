"""How one request wants its tokens drawn."""

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Validated at the API's door; the engine trusts it."""

    max_tokens: int
    """Tokens to generate at most, >= 1. The API has already clamped it to the room that the prompt leaves."""

    temperature: float = 1.0
    """>= 0; 0 is greedy (argmax, lowest id wins a tie)."""

    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""

    top_p: float = 1.0
    """In (0, 1]: keep the smallest set of tokens whose probabilities reach top_p; 1 keeps all."""

    seed: int = 0
    """64-bit. Draws are keyed by (seed, position), so a request's tokens do not depend on its neighbours.
    The API draws one at random when the client gives none."""

    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the request (the model's EOS ids among them, unless ignore_eos); the stop token is emitted as the
    last token, with finish reason "stop"."""

    min_tokens: int = 0
    """Stop ids are not honoured before so many tokens have been generated."""
