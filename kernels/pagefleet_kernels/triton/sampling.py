"""Planning the sampler: see kernels/sampling.py for the arithmetic."""

from typing import Any

import torch

from pagefleet_kernels.sampling_batch import SamplingBatch
from pagefleet_kernels.triton.configs import pow2
from pagefleet_kernels.triton.kernels import sampling as sampling_kernels
from pagefleet_kernels.triton.launch import Launch

CHUNK = 4096
"""Vocabulary entries of one program where rows are cut; decides which sums are taken together, so it is fixed."""


def plan_sample(tokens: torch.Tensor, logits: torch.Tensor, batch: SamplingBatch) -> tuple[Launch, ...]:
    """logits [B, V] -> tokens int64 [B]."""
    rows, vocab = logits.shape
    chunks = -(-vocab // CHUNK)
    options: dict[str, Any] = {"device": logits.device}
    shaped = torch.empty((rows, vocab), dtype=torch.float32, **options)
    chunk_peak = torch.empty((rows, chunks), dtype=torch.float32, **options)
    threshold, row_peak = (torch.empty(rows, dtype=torch.float32, **options) for _ in range(2))
    tie_limit = torch.empty(rows, dtype=torch.int32, **options)
    sums = {
        "chunk_mass": torch.empty((rows, chunks), dtype=torch.float64, **options),
        "chunk_ties": torch.empty((rows, chunks), dtype=torch.int32, **options),
        "best_score": torch.empty((rows, chunks), dtype=torch.float32, **options),
        "best_token": torch.empty((rows, chunks), dtype=torch.int32, **options),
    }
    penalties = batch.penalties
    sizes = {"vocab": vocab, "chunks": chunks}
    rule = {
        "shaped": shaped,
        "threshold": threshold,
        "row_peak": row_peak,
        "temperature": batch.temperature,
        "min_p": batch.min_p,
    }
    shape = Launch(
        kernel=sampling_kernels.shape_logits,
        grid=(rows, chunks),
        arguments={
            "shaped": shaped,
            "chunk_peak": chunk_peak,
            "logits": logits,
            "repetition": penalties.repetition if penalties else None,
            "presence": penalties.presence if penalties else None,
            "frequency": penalties.frequency if penalties else None,
            "output_counts": penalties.output_counts if penalties else None,
            "prompt_seen": penalties.prompt_seen if penalties else None,
            "stride_logits": logits.stride(0),
            **sizes,
        },
        constants={"BLOCK": CHUNK},
        num_warps=8,
        num_stages=1,
    )
    find = Launch(
        kernel=sampling_kernels.find_threshold,
        grid=(rows,),
        arguments={
            "threshold": threshold,
            "tie_limit": tie_limit,
            "row_peak": row_peak,
            "shaped": shaped,
            "chunk_peak": chunk_peak,
            "temperature": batch.temperature,
            "top_k": batch.top_k,
            "top_p": batch.top_p,
            **sizes,
        },
        constants={"CHUNKS_PAD": pow2(chunks, 1), "BLOCK": CHUNK},
        num_warps=32,  # one program walks the whole row
        num_stages=1,
    )
    add = Launch(
        kernel=sampling_kernels.sum_chunks,
        grid=(rows, chunks),
        arguments={**sums, **rule, **sizes},
        constants={"BLOCK": CHUNK},
        num_warps=8,
        num_stages=1,
    )
    numbers = {"tie_limit": tie_limit, "seeds": batch.seeds, "positions": batch.positions}
    pick = Launch(
        kernel=sampling_kernels.pick_token,
        grid=(rows,),
        arguments={"tokens": tokens, **sums, **rule, **numbers, **sizes},
        constants={"CHUNKS_PAD": pow2(chunks, 1), "BLOCK": CHUNK},
        num_warps=8,
        num_stages=1,
    )
    return shape, find, add, pick
