"""torch.nn.attention.varlen.varlen_attn by its documentation, in plain float64: torch has it on CUDA only."""

import torch


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
    num_splits: int,
) -> torch.Tensor:
    """As torch documents it, paged, with bottom-right alignment; rows that see nothing come out as NaN."""
    assert cu_seq_k is None
    assert num_splits == 1
    assert window_size[1] == 0
    out = torch.full((query.shape[0], query.shape[1], value.shape[3]), float("nan"), dtype=query.dtype)
    group = query.shape[1] // key.shape[2]
    assert enable_gqa == (group > 1)
    for seq, length in enumerate(seqused_k.tolist()):
        first, last = cu_seq_q[seq : seq + 2].tolist()
        assert last - first <= max_q
        assert length <= max_k
        ids = block_table[seq, : -(-length // key.shape[1])].long()
        keys, values = key[ids].flatten(0, 1)[:length].double(), value[ids].flatten(0, 1)[:length].double()
        for row in range(first, last if length else first):
            position = length - (last - row)
            start = 0 if window_size[0] < 0 else max(0, position - window_size[0])
            seen_keys = keys[start : position + 1].repeat_interleave(group, dim=1)
            seen_values = values[start : position + 1].repeat_interleave(group, dim=1)
            scores = torch.einsum("hd,lhd->hl", query[row].double(), seen_keys) * scale
            out[row] = torch.einsum("hl,lhd->hd", scores.softmax(dim=-1), seen_values).to(out.dtype)
    return out
