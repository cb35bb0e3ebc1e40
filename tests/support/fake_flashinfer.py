"""flashinfer.BatchPrefillWithPagedKVCacheWrapper by its documentation (0.7.4), in plain float64: it runs on CUDA only.

The arguments and their defaults are the package's; those that we leave alone must be left alone.
"""

from itertools import pairwise

import torch

__version__ = "0.7.4"


class BatchPrefillWithPagedKVCacheWrapper:
    """plan() a batch, then run() its layers."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", backend: str = "auto") -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert float_workspace_buffer.data_ptr() % 16 == 0
        assert kv_layout == "NHD"
        assert backend == "auto"
        self.plans = 0

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        o_data_type: torch.dtype | None = None,
        non_blocking: bool = True,
    ) -> None:
        for tensor in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            assert tensor.dtype == torch.int32
            assert tensor.dim() == 1
        assert causal
        assert pos_encoding_mode == "NONE"
        assert q_data_type in (torch.float16, torch.bfloat16)
        assert kv_data_type == q_data_type
        assert sm_scale is not None
        assert logits_soft_cap is not None
        assert num_qo_heads % num_kv_heads == 0
        pages = paged_kv_indptr.diff()
        assert len(paged_kv_indices) == int(paged_kv_indptr[-1])
        assert bool((paged_kv_last_page_len <= page_size).all())
        assert bool((paged_kv_last_page_len[pages > 0] >= 1).all())
        self.starts = qo_indptr.tolist()
        self.pages = [paged_kv_indices[first:last].long() for first, last in pairwise(paged_kv_indptr.tolist())]
        self.lengths = ((pages - 1).clamp(min=0) * page_size + paged_kv_last_page_len).tolist()
        self.rule = (num_qo_heads, num_kv_heads, head_dim_qk, page_size, sm_scale, window_left, logits_soft_cap)
        self.dtype = q_data_type
        self.plans += 1

    def run(self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Causal, the last query row at the last key. Rows that see nothing, and rows of no plan, come out as NaN."""
        heads, kv_heads, width, page_size, scale, window_left, cap = self.rule
        keys, values = paged_kv_cache
        assert q.shape == (self.starts[-1], heads, width)
        assert keys.shape[1:] == values.shape[1:] == (page_size, kv_heads, width)
        assert q.dtype == keys.dtype == values.dtype == self.dtype
        assert q.is_contiguous()
        out = torch.full_like(q, float("nan"))
        for seq, length in enumerate(self.lengths):
            first, last = self.starts[seq : seq + 2]
            k, v = (part[self.pages[seq]].flatten(0, 1)[:length].double() for part in (keys, values))
            k, v = (part.repeat_interleave(heads // kv_heads, dim=1) for part in (k, v))
            for row in range(first, last):
                position = length - (last - row)
                start = 0 if window_left < 0 else max(0, position - window_left)
                scores = torch.einsum("hd,lhd->hl", q[row].double(), k[start : position + 1]) * scale
                if cap > 0.0:
                    scores = cap * torch.tanh(scores / cap)
                seen = torch.einsum("hl,lhd->hd", scores.softmax(dim=-1), v[start : position + 1])
                out[row] = seen.to(out.dtype)
        return out
