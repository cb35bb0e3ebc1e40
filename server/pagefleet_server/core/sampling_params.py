"""How one request wants its tokens drawn.

Order of the rules: logit_bias, repetition_penalty, presence and frequency penalties; then what is forbidden
(by grammar, allowed_token_ids, stop ids before min_tokens, bad_words); then temperature, top_k, top_p, min_p.
"""

from typing import Literal

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

    min_p: float = 0.0
    """In [0, 1]: keep tokens at least min_p times as likely as the likeliest; 0 keeps all."""

    repetition_penalty: float = 1.0
    """> 0: logits of tokens in prompt or output are divided by it when positive, multiplied when negative; 1 is off."""

    presence_penalty: float = 0.0
    """In [-2, 2]: taken from the logits of tokens that the output holds; 0 is off."""

    frequency_penalty: float = 0.0
    """In [-2, 2]: taken from a token's logit for every time that the output holds it; 0 is off."""

    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, added to its logit); ids are distinct."""

    allowed_token_ids: tuple[int, ...] | None = None
    """Only these may be drawn; None: all."""

    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that may not come about: the last token is forbidden where the ones before it stand."""

    grammar: str | None = None
    """The output must be a text of this grammar (llguidance's JSON form, checked by the API). Needs stop ids that are
    the model's own end; None: any text."""

    logprobs: int | None = None
    """Log-probabilities wanted with each token: of the drawn one and of so many of the likeliest, >= 0. None: none."""

    prompt_logprobs: int | None = None
    """Log-probabilities wanted of the prompt's tokens from the second on, with so many of the likeliest, >= 0. None:
    none. Such a request does not use the prefix cache, and its prompt is computed in small chunks."""

    pooling: Literal["last", "mean"] | None = None
    """Draw nothing: give the prompt's hidden state, of its last token or summed over all (the mean but for its length).
    None: generate. Only for models that were loaded for it; max_tokens is 1 and stands for that one result."""

    seed: int = 0
    """64-bit. Draws are keyed by (seed, position), so a request's tokens do not depend on its neighbours.
    The API draws one at random when the client gives none."""

    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the request (the model's EOS ids among them, unless ignore_eos); the stop token is emitted as the
    last token, with finish reason "stop"."""

    min_tokens: int = 0
    """Stop ids cannot be drawn before so many tokens have been generated."""

    @property
    def num_drawn(self) -> int:
        """Tokens that it adds to its prompt at most."""
        return 0 if self.pooling else self.max_tokens

    @property
    def needs_history(self) -> bool:
        """Some rule looks at the tokens so far."""
        return bool(
            self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or self.bad_words
            or self.grammar is not None
            or (self.min_tokens and self.stop_token_ids)
        )

    @property
    def changes_logits(self) -> bool:
        """Some rule before temperature applies."""
        return self.needs_history or bool(self.logit_bias) or self.allowed_token_ids is not None
