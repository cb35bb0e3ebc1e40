"""The adapter: our batches in FlashInfer's terms.

FlashInfer plans a batch on the host and then runs each layer by that plan. Its page table is CSR:

    block_tables [S, max_blocks] -> indices: the used entries, row by row; indptr [S + 1]: where each row begins;
    seq_lens [S]                 -> last_page_len: tokens in each sequence's last page, 1 .. block_size
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pagefleet_kernels.backend import KVCache
from pagefleet_kernels.batch import AttentionBatch, KVShape
from pagefleet_kernels.checks import refuse
from pagefleet_kernels.nhd_cache import NhdCache, NhdStore, is_padding

WORKSPACE_BYTES = 128 * 1024 * 1024
"""What FlashInfer recommends; shared by all plans, which run one after the other on one stream."""
MAX_RULES = 8
"""Kinds of layers (heads, widths, windows, caps) that keep a plan at once."""
DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128, 256)
PLAN_ARGUMENTS = frozenset(
    {
        "qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len", "num_qo_heads", "num_kv_heads",
        "head_dim_qk", "page_size", "causal", "sm_scale", "window_left", "logits_soft_cap", "q_data_type",
        "kv_data_type",
    }
)  # fmt: skip
"""Of BatchPrefillWithPagedKVCacheWrapper.plan."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What a plan depends on beside the batch."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    page_size: int
    sm_scale: float
    window_left: int
    """-1: none; else keys left of the row's own."""
    logits_soft_cap: float
    """0: none."""
    q_data_type: torch.dtype
    kv_data_type: torch.dtype


@dataclass(slots=True)
class Planned:
    """A wrapper, and the batch that its plan is for."""

    wrapper: Any
    batch: AttentionBatch | None = None


class FlashInferBackend(NhdStore):
    """See backend.Backend. make_wrapper: flashinfer.BatchPrefillWithPagedKVCacheWrapper.

    Plans once per batch object and rule: a batch's tensors must not change while it is in use.
    """

    name = "flashinfer"

    def __init__(self, make_wrapper: Callable[..., Any]) -> None:
        self._make_wrapper = make_wrapper
        self._workspace: torch.Tensor | None = None
        self._planned: dict[Rule, Planned] = {}

    def check(self, shape: KVShape, block_size: int, dtype: torch.dtype) -> None:
        """Refuse what is not asked of FlashInfer."""
        if dtype not in DTYPES:
            raise refuse("dtype", dtype, f"one of {', '.join(str(known) for known in DTYPES)} for this backend")
        if shape.head_dim != shape.v_head_dim or shape.head_dim not in HEAD_DIMS:
            found = f"{shape.head_dim} and v_head_dim {shape.v_head_dim}"
            raise refuse("shape.head_dim", found, f"equal, one of {', '.join(map(str, HEAD_DIMS))} for this backend")

    def paged_attention(
        self,
        query: torch.Tensor,
        cache: KVCache,
        batch: AttentionBatch,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal attention; sinks are refused. Waits for the device once a batch and rule, to plan."""
        own = NhdCache.own(cache)
        if sinks is not None:
            raise refuse("sinks", "given", "None for this backend")
        if query.shape[0] == 0:
            return query.new_empty(query.shape)
        rule = Rule(
            num_qo_heads=query.shape[1],
            num_kv_heads=own.shape.num_kv_heads,
            head_dim_qk=own.shape.head_dim,
            page_size=own.block_size,
            sm_scale=scale,
            window_left=-1 if sliding_window is None else sliding_window - 1,
            logits_soft_cap=softcap or 0.0,
            q_data_type=query.dtype,
            kv_data_type=own.dtype,
        )
        out: torch.Tensor = self._plan(rule, batch, own.device).run(query.contiguous(), (own.keys, own.values))
        padding = is_padding(batch.seq_lens, batch.query_starts, query.shape[0])
        return out.masked_fill(padding[:, None, None], 0.0)

    def _plan(self, rule: Rule, batch: AttentionBatch, device: torch.device) -> Any:
        """The wrapper whose plan is this batch's by this rule."""
        planned = self._planned.pop(rule, None)
        if planned is None:
            if self._workspace is None or self._workspace.device != device:
                self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
                self._planned.clear()
            if len(self._planned) >= MAX_RULES:
                self._planned.pop(next(iter(self._planned)))
            planned = Planned(self._make_wrapper(self._workspace, "NHD"))
        self._planned[rule] = planned  # last in order: the first one goes when there are too many
        if planned.batch is not batch:
            starts, indptr, indices, last = csr(batch, rule.page_size)
            options = {name: getattr(rule, name) for name in Rule.__slots__}
            planned.batch = None  # a plan that fails is none
            planned.wrapper.plan(starts, indptr, indices.to(device), last, causal=True, **options)
            planned.batch = batch
        return planned.wrapper


def csr(batch: AttentionBatch, page_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(qo_indptr [S + 1], indptr [S + 1], indices, last_page_len [S]) int32 on the host, as plan() wants them.

    A sequence of length 0 with rows is padding: it gets as many tokens of the null block as it has rows, so that what
    the library computes there is defined (and thrown away).
    """
    starts = batch.query_starts.cpu().numpy()
    rows = np.diff(starts)
    lens = batch.seq_lens.cpu().numpy()
    tables = batch.block_tables.cpu().numpy()
    lens = np.where(rows == 0, 0, np.maximum(lens, rows))
    pages = -(-lens // page_size)
    width = int(pages.max(initial=0))
    wide = np.zeros((len(lens), width), dtype=np.int32)  # as long as any padding wants it: block 0
    shown = min(width, tables.shape[1])
    wide[:, :shown] = np.where(batch.seq_lens.cpu().numpy()[:, None] > 0, tables[:, :shown], 0)
    indices = wide[np.arange(width) < pages[:, None]]
    indptr = np.concatenate([[0], np.cumsum(pages)]).astype(np.int32)
    last = np.where(lens > 0, (lens - 1) % page_size + 1, 0).astype(np.int32)
    return tuple(torch.from_numpy(part.astype(np.int32)) for part in (starts, indptr, indices, last))  # type: ignore[return-value]
