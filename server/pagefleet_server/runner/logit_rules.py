"""What a request's rules do to its logits before temperature: bias, penalties, and what is forbidden."""

from collections.abc import Iterator

import numpy as np

from pagefleet_server.core.sampling_params import SamplingParams
from pagefleet_server.core.step import TokenHistory
from pagefleet_server.runner.grammars import Mask
from pagefleet_server.runner.rows import Ids, Row

_NOTHING = TokenHistory(token_ids=(), num_prompt=0)


def apply_rules(logits: Row, params: SamplingParams, history: TokenHistory | None, allowed: Mask | None = None) -> Row:
    """Logits [V] -> a new row, in the order that SamplingParams states. history: given when params.needs_history;
    allowed: bool [V], what the grammar allows.

    A rule that would forbid every token that is left is not applied: something must be drawn.
    """
    row = logits.copy()
    history = history if history is not None else _NOTHING
    for token_id, bias in params.logit_bias:
        row[token_id] += np.float32(bias)
    if params.repetition_penalty != 1.0:
        _penalise_repetition(row, params.repetition_penalty, np.unique(_ids(history.token_ids)))
    if params.presence_penalty or params.frequency_penalty:
        seen, counts = np.unique(_ids(history.token_ids[history.num_prompt :]), return_counts=True)
        # In float32, as every other rule: float64 in between would round differently from one addition at a time.
        row[seen] -= np.float32(params.presence_penalty) + np.float32(params.frequency_penalty) * counts.astype(
            np.float32
        )
    if allowed is not None:
        row[~allowed] = -np.inf
        if not np.isfinite(row.max()):  # a bias of minus infinity, or logits that had none: the grammar still holds
            row[allowed] = 0.0
    for forbidden in _forbidden(row.shape[0], params, history):
        kept = row[forbidden].copy()
        row[forbidden] = -np.inf
        if not np.isfinite(row.max()):
            row[forbidden] = kept
    return row


def _penalise_repetition(row: Row, penalty: float, ids: Ids) -> None:
    """A penalty near 0 takes a logit up to the largest number, never beyond: infinities cannot be drawn from."""
    values, bounds = row[ids], np.finfo(np.float32)
    divisor = max(np.float32(penalty), bounds.tiny)
    with np.errstate(over="ignore"):
        row[ids] = np.minimum(np.where(values < 0, values * divisor, values / divisor), bounds.max)


def _forbidden(vocab_size: int, params: SamplingParams, history: TokenHistory) -> Iterator[Ids]:
    """Ids that may not be drawn now, rule by rule."""
    if params.allowed_token_ids is not None:
        mask = np.ones(vocab_size, dtype=np.bool_)
        mask[list(params.allowed_token_ids)] = False
        yield np.flatnonzero(mask)
    if len(history.token_ids) - history.num_prompt < params.min_tokens and params.stop_token_ids:
        yield _ids(params.stop_token_ids)
    endings = [word[-1] for word in params.bad_words if _stands_before(word[:-1], history)]
    if endings:
        yield np.unique(_ids(endings))


def _stands_before(prefix: tuple[int, ...], history: TokenHistory) -> bool:
    """The last tokens so far are `prefix`."""
    count = len(prefix)
    return count == 0 or tuple(history.token_ids[-count:]) == prefix


def _ids(values: object) -> Ids:
    return np.asarray(values, dtype=np.int64).reshape(-1)
