"""What tests send to the interpreting process when they want a whole model there: paths in, logits and tokens out."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pagefleet_kernels import ops
from pagefleet_kernels.backend import TokenSampler
from pagefleet_kernels.batch import AttentionBatch
from pagefleet_kernels.dispatch import select_backend
from pagefleet_kernels.errors import BackendUnavailable, KernelArgumentError
from pagefleet_kernels.triton.program import TritonProgram
from pagefleet_server.core.sampling_params import SamplingParams
from pagefleet_server.core.step import ScheduledRequest, StepResult
from pagefleet_server.models.executor import open_model
from pagefleet_server.models.fused.decoder import FusedDecoder
from pagefleet_server.runner.device_sampler import is_plain, sample_on_device
from pagefleet_server.runner.graph_setup import graph_setup
from pagefleet_server.runner.kv_memory import KVPlan, allocate_kv, bytes_per_block, kv_dtype
from pagefleet_server.runner.runner import Runner
from pagefleet_server.runner.sampler import sample
from pagefleet_server.settings import ModelSettings
from support.fake_graphs import FakeGraphMaker
from support.stepping import Blocks, chunked_logits, step_of


def runner_on_triton(path: str, dtype: str, kv: str = "auto") -> Runner:
    """The fused decoder with the backend that a GPU would get. kv: as --kv-cache-dtype."""
    opened = open_model(ModelSettings(model=path, device="cpu", dtype=dtype, executor="fused"))
    backend = select_backend(opened.device, "triton")
    model, packed = opened.load(backend)
    assert not packed
    stored = kv_dtype(kv, model.dtype)
    plan = KVPlan(16, 32, bytes_per_block(model.layers, 16, backend=backend, dtype=stored))
    caches = allocate_kv(model.layers, plan, backend=backend, dtype=stored, device=model.device)
    assert sum(cache.num_bytes for cache in caches) == plan.num_bytes
    return Runner(model, backend, caches, plan, model.max_positions, {})


def prompts_of(vocab_size: int, lengths: tuple[int, ...]) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, vocab_size) for _ in range(length)] for length in lengths]


def mixed_logits(
    path: Path, dtype: str, lengths: tuple[int, ...], seed: int = 1, kv: str = "auto"
) -> list[torch.Tensor]:
    """Logits [T, V] of each prompt, computed in steps that mix random chunks of them."""
    runner = runner_on_triton(str(path), dtype, kv)
    rng = random.Random(seed)
    blocks = Blocks(runner, rng)
    sequences = [
        blocks.sequence(str(index), tokens) for index, tokens in enumerate(prompts_of(runner.vocab_size, lengths))
    ]
    got = chunked_logits(runner, sequences, rng)
    decoder = runner.model
    assert isinstance(decoder, FusedDecoder)
    assert decoder._recorded is not None
    assert isinstance(decoder._recorded.program, TritonProgram)
    return [got[str(index)].float() for index in range(len(sequences))]


def block_bytes(path: Path, kv: str) -> int:
    """Of a block over all layers, as the KV cache is sized with."""
    return runner_on_triton(str(path), "bfloat16", kv).plan.bytes_per_block


def eager_through_transformers(path: Path, lengths: tuple[int, ...], kv: str) -> list[torch.Tensor]:
    """The same logits by the transformers path, whose attention writes and reads through the public ops."""
    opened = open_model(ModelSettings(model=str(path), device="cpu", dtype="float32", executor="transformers"))
    backend = select_backend(opened.device, "triton")
    model, _ = opened.load(backend)
    stored = kv_dtype(kv, model.dtype)
    plan = KVPlan(16, 32, bytes_per_block(model.layers, 16, backend=backend, dtype=stored))
    caches = allocate_kv(model.layers, plan, backend=backend, dtype=stored, device=model.device)
    runner = Runner(model, backend, caches, plan, model.max_positions, {})
    rng = random.Random(1)
    blocks = Blocks(runner, rng)
    sequences = [
        blocks.sequence(str(index), tokens) for index, tokens in enumerate(prompts_of(runner.vocab_size, lengths))
    ]
    got = chunked_logits(runner, sequences, rng)
    return [got[str(index)].float() for index in range(len(sequences))]


def greedy_with_graphs(path: Path) -> tuple[list[list[int]], list[list[int]], int]:
    """Greedy tokens of two prompts by captured decode steps and by eager ones, and how many were replayed."""
    runner = runner_on_triton(str(path), "float32")
    maker = FakeGraphMaker()
    setup = graph_setup(
        "auto", runner.model, runner.backend, max_rows=2, kv_dtype=torch.float32, group=None, new_maker=lambda: maker
    )
    assert setup is not None
    graphs = setup.capture(runner.caches, runner.plan, max_seq_len=32)
    assert graphs is not None
    maker.replays.clear()
    found = []
    for one in (replace(runner, graphs=graphs), runner):
        blocks = Blocks(one, random.Random(0))
        sequences = [
            blocks.sequence(str(index), tokens, room=5)
            for index, tokens in enumerate(prompts_of(one.vocab_size, (3, 9)))
        ]
        for _ in range(5):
            drawn = one.execute(step_of([(s, len(s.token_ids) - s.computed) for s in sequences])).sampled
            for sequence in sequences:
                sequence.token_ids.append(drawn[sequence.name])
        found.append([sequence.token_ids for sequence in sequences])
    return found[0], found[1], len(maker.replays)


def drawn_both_ways(vocab_size: int) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Requests of every kind, drawn on the device and on the CPU from the same logits; and how many are plain."""

    def told(result: StepResult) -> dict[str, Any]:
        names = ("sampled", "logprobs", "further", "failed")
        return {name: dict(getattr(result, name)) for name in names}

    generator = torch.Generator().manual_seed(2)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_k": 20, "seed": 2**64 - 3},
        {"top_p": 0.7, "min_p": 0.01, "seed": -5},
        {"temperature": 1e-50, "seed": 9},
        {"temperature": 1.3, "logit_bias": ((3, 2.0),), "seed": 1},
        {"temperature": 0.9, "logprobs": 2, "seed": 8},
        {"temperature": 0.0, "seed": 4},
        {"temperature": 1.1, "top_k": 2**40, "seed": 77},
        {"temperature": 0.0, "seed": 1},
        {"temperature": 1.0, "seed": 1},
    ]
    guesses = 2
    logits = 3.0 * torch.randn(len(kinds) + guesses, vocab_size, generator=generator)
    logits[8 + guesses, 5] = float("nan")
    logits[9 + guesses] = float("-inf")
    requests = []
    for index, kind in enumerate(kinds):
        drafts = guesses if index == 6 else 0
        requests.append(
            ScheduledRequest(
                request_id=str(index),
                token_ids=(1, *logits[6 : 6 + drafts].argmax(-1).tolist()),
                start=40 + index,
                block_ids=(1,),
                sample=True,
                sampling=SamplingParams(max_tokens=1, **kind),
                num_drafts=drafts,
            )
        )
    backend = select_backend(torch.device("cpu"), "triton")
    assert isinstance(backend, TokenSampler)
    there = sample_on_device(backend, logits, requests, None)
    return told(there), told(sample(logits, requests)), sum(map(is_plain, requests))


def refusal_of_program(change: dict[str, Any]) -> str:
    """The error of recording and running one norm and one activation, with something changed; empty: none."""
    device, width, dtype = torch.device("cpu"), change.get("width", 8), change.get("dtype", torch.float32)
    try:
        program = ops.new_program(select_backend(device, "triton"), dtype=dtype, device=device, max_rows=4)
        out = program.buffer(width)
        x = torch.ones(4, width, dtype=torch.bfloat16 if change.get("foreign") else torch.float32)
        program.norm(x, None, out, torch.ones(width), epsilon=1e-5)
        program.activate(x, out, activation=change.get("activation", "silu"), gated=False)
        rows = change.get("rows", 4)
        empty = torch.zeros(0, dtype=torch.int32)
        batch = AttentionBatch(torch.zeros(1, dtype=torch.int32), empty, empty.view(0, 1), empty.long(), 0, 0, 0)
        program.run(batch, torch.zeros(rows, dtype=torch.int64))
    except (BackendUnavailable, KernelArgumentError) as error:
        return str(error)
    return ""
