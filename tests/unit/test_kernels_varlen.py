"""The adapter of torch's FlashAttention. Without a GPU there is none: a plain function of the contract that torch
documents stands in its place."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from pagefleet_kernels import ops
from pagefleet_kernels.batch import KVShape
from pagefleet_kernels.errors import BackendUnavailable, KernelArgumentError
from pagefleet_kernels.varlen import VarlenBackend, make_backend
from support.attention_oracle import CASES, Case, build
from support.fake_varlen import varlen_attn

CPU = torch.device("cpu")


SEQUENCES = {
    "decodes then chunks": Case(((1, 9), (1, 300), (7, 7), (16, 48))),
    "padding": Case(((1, 20), (1, 0), (0, 0), (3, 3))),
    "window": Case(((1, 300), (9, 70)), sliding_window=23),
    "no GQA": Case(((1, 18), (5, 18)), KVShape(4, 16, 16), num_q_heads=4),
}


@pytest.mark.parametrize("name", sorted(SEQUENCES))
def test_says_in_torchs_terms_what_the_batch_says(name: str) -> None:
    case = replace(SEQUENCES[name], block_size=256)
    world = build(case, dtype=torch.float16)
    backend = VarlenBackend(varlen_attn)
    cache = backend.allocate(case.shape, num_blocks=world.num_blocks, block_size=256, dtype=torch.float16, device=CPU)
    ops.write_kv(backend, cache, world.history_keys, world.history_values, world.history_slots)
    out = ops.paged_attention(
        backend, world.query, cache, world.batch, scale=case.scale, sliding_window=case.sliding_window
    )
    torch.testing.assert_close(out.double(), world.want, rtol=3e-3, atol=3e-3)


def test_rows_without_a_slot_change_no_block() -> None:
    backend = VarlenBackend(varlen_attn)
    cache = backend.allocate(KVShape(1, 8, 8), num_blocks=3, block_size=256, dtype=torch.float16, device=CPU)
    rows = torch.ones(2, 1, 8, dtype=torch.float16)
    ops.write_kv(backend, cache, rows, rows, torch.tensor([-1, 300]))
    assert cache.num_blocks == 3
    assert int(cache.keys[: cache.num_blocks].count_nonzero()) == 8
    ops.copy_blocks(backend, cache, [(1, 2)])
    assert torch.equal(cache.values[2], cache.values[1])


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"block_size": 16}, "block_size"),
        ({"dtype": torch.float32}, "dtype"),
        ({"shape": KVShape(1, 64, 32)}, "head_dim"),
        ({"shape": KVShape(1, 12, 12)}, "head_dim"),
    ],
)
def test_what_flash_attention_cannot_hold_is_refused(change: dict[str, Any], argument: str) -> None:
    options: dict[str, Any] = {
        "shape": KVShape(1, 64, 64), "num_blocks": 2, "block_size": 256, "dtype": torch.float16, "device": CPU,
    }  # fmt: skip
    with pytest.raises(KernelArgumentError, match=argument):
        VarlenBackend(varlen_attn).allocate(**(options | change))


@pytest.mark.parametrize("name", ["softcap", "sinks"])
def test_what_flash_attention_cannot_compute_is_refused(name: str) -> None:
    case = replace(CASES[name], block_size=256)
    world = build(case, dtype=torch.float16)
    backend = VarlenBackend(varlen_attn)
    cache = backend.allocate(case.shape, num_blocks=world.num_blocks, block_size=256, dtype=torch.float16, device=CPU)
    with pytest.raises(KernelArgumentError, match=name):
        ops.paged_attention(
            backend, world.query, cache, world.batch, scale=1.0, softcap=case.softcap, sinks=world.sinks
        )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_says_why_it_is_not_available() -> None:
    with pytest.raises(BackendUnavailable, match="no CUDA device"):
        make_backend()
