"""Two ranks over gloo: the numbers of one; and how they end."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch

from pagefleet_server.model_errors import ModelRefused
from pagefleet_server.models.checkpoint import open_checkpoint
from pagefleet_server.models.executor import Executor, open_model
from pagefleet_server.models.fused.sharding import ShardedSource, shard_spec
from pagefleet_server.models.fused.weight_names import expected
from pagefleet_server.models.fused.weight_sources import open_source
from pagefleet_server.runner.runner import Runner, build_runner
from pagefleet_server.settings import CacheSettings, EngineSettings, ModelSettings, SchedulerSettings
from support.evidence import write_evidence
from support.fused_cases import FUSED_CASES
from support.stepping import Blocks, quiet, step_of
from support.tiny_models import write_tiny

LOGIT_BOUND = 1e-4
"""Between raw logits of one and of two ranks, in float32."""
SIZES: dict[str, dict[str, int]] = {"phi3": {}, "starcoder2": {}, "gemma2": {"num_key_value_heads": 1}}
"""Merged weights; biases that are added once; a KV head that both ranks hold."""


def settings_for(path: Path, ranks: int, dtype: str = "float32") -> EngineSettings:
    return EngineSettings(
        model=ModelSettings(model=str(path), device="cpu", dtype=dtype, threads=1, tensor_parallel_size=ranks),
        cache=CacheSettings(num_kv_blocks=64),
        scheduler=SchedulerSettings(max_num_batched_tokens=64),
    )


@contextlib.contextmanager
def ranks_of(path: Path, ranks: int, dtype: str = "float32") -> Iterator[Runner]:
    runner = build_runner(settings_for(path, ranks, dtype), quiet)
    try:
        yield runner
    finally:
        if runner.group is not None:
            runner.group.close()


@dataclass
class Recorded:
    """A model that keeps the logits it gave."""

    model: Executor
    rows: list[torch.Tensor] = field(default_factory=list)

    def __getattr__(self, name: str) -> object:
        return getattr(self.model, name)

    def forward(self, *arguments: Any) -> torch.Tensor:
        logits = self.model.forward(*arguments)
        self.rows += logits.float().clone().unbind()
        return logits


def work(runner: Runner, seed: int) -> tuple[list[torch.Tensor], list[int]]:
    """Three requests in random chunks: whole rows of raw logits [V] of every step, and the greedy tokens."""
    model = Recorded(runner.model)
    runner = replace(runner, model=cast(Executor, model))
    rng = random.Random(seed)
    blocks = Blocks(runner, random.Random(seed))
    numbers = random.Random(7)
    prompts = [[numbers.randrange(3, runner.vocab_size) for _ in range(n)] for n in (3, 16, 40)]
    sequences = [blocks.sequence(str(i), p, room=12) for i, p in enumerate(prompts)]
    while any(len(s.token_ids) < len(p) + 10 for s, p in zip(sequences, prompts, strict=True)):
        chosen = [s for s, p in zip(sequences, prompts, strict=True) if len(s.token_ids) < len(p) + 10]
        chosen = rng.sample(chosen, rng.randint(1, len(chosen)))
        counts = {s.name: min(len(s.token_ids) - s.computed, rng.choice((1, 7, 64))) for s in chosen}
        ends = {s.name: s.computed + counts[s.name] == len(s.token_ids) for s in chosen}
        result = runner.execute(step_of([(s, counts[s.name]) for s in chosen]))
        for s in chosen:
            if ends[s.name]:
                s.token_ids.append(result.sampled[s.name])
    return model.rows, [token for s in sequences for token in s.token_ids]


def compare_ranks(path: Path) -> float:
    """The largest difference between a raw logit of two ranks and of one, over whole rows; equal greedy tokens, and
    equal bits when the two compute it again."""
    with ranks_of(path, 1) as alone:
        want, want_tokens = work(alone, seed=1)
    with ranks_of(path, 2) as runner:
        rows, tokens = work(runner, seed=1)
        runner.check()
        again, again_tokens = work(runner, seed=1)
        assert rows[0].shape == (runner.vocab_size,)
    assert tokens == want_tokens
    assert again_tokens == tokens and all(map(torch.equal, again, rows))
    return max(float((a - b).abs().max()) for a, b in zip(rows, want, strict=True))


def test_two_ranks_compute_what_one_does(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, "gemma2", num_key_value_heads=1)
    assert compare_ranks(path) <= LOGIT_BOUND


@pytest.mark.long
def test_two_ranks_compute_what_one_does_for_every_family(tmp_path: Path) -> None:
    """Of the whole table but OLMo 2, which is refused (below)."""
    errors: dict[str, float] = {}
    for number, (name, (model_type, changes)) in enumerate(FUSED_CASES.items()):
        if model_type != "olmo2":
            path = write_tiny(tmp_path / str(number), model_type, **changes)
            errors[name] = compare_ranks(path)
            assert errors[name] <= LOGIT_BOUND, name
    write_evidence("tensor_parallel_logits", {"seed": 1, "ranks": 2, "bound": LOGIT_BOUND, "largest_error": errors})


def test_parts_of_all_ranks_make_the_whole(tmp_path: Path) -> None:
    """Every tensor of every kind of checkpoint: the parts have the spec's shapes, and together all of its numbers."""
    biased: dict[str, int] = {"attention_bias": True}
    for model_type, changes in {**SIZES, "llama": biased}.items():
        path = write_tiny(tmp_path / model_type, model_type, **changes)
        whole = open_model(ModelSettings(model=str(path), device="cpu", executor="fused"))
        spec = whole.spec  # type: ignore[attr-defined]
        source = open_source(open_checkpoint(str(path)), spec, dummy=False)
        parts = [ShardedSource(source, spec, rank, 2) for rank in range(2)]
        for name, shape in expected(shard_spec(spec, 2)).items():
            own = [part.read(name, torch.float32) for part in parts]
            assert [tuple(part.shape) for part in own] == [shape, shape]
            numbers = source.read(name, torch.float32).flatten()
            assert set(numbers.tolist()) <= set(torch.cat([part.flatten() for part in own]).tolist()), name


@pytest.mark.parametrize(
    ("model_type", "changes", "ranks", "named"),
    [
        ("olmo2", {}, 2, "norms queries over all heads"),
        ("llama", {}, 3, "4 query heads do not divide by 3"),
        ("llama", {"intermediate_size": 50}, 4, "50 MLP outputs do not divide by 4"),
        ("mixtral", {}, 2, "only the fused decoder can be split over ranks, and .*mixtral is not in its table"),
    ],
)
def test_what_cannot_be_split_is_refused(
    tmp_path: Path, model_type: str, changes: dict[str, int], ranks: int, named: str
) -> None:
    path = write_tiny(tmp_path, model_type, **changes)
    with pytest.raises(ModelRefused, match=named):
        build_runner(settings_for(path, ranks), quiet)


LEADER = """
import sys, time, logging, msgspec
logging.basicConfig(level=logging.INFO)
from pagefleet_server.runner.runner import build_runner
from pagefleet_server.settings import EngineSettings
runner = build_runner(msgspec.json.decode(sys.argv[1], type=EngineSettings), lambda *_, **__: None)
print(runner.group._followers[0].pid, flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def leader(path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that leads two ranks, and the other rank's pid."""
    document = msgspec.json.encode(settings_for(path, 2)).decode()
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", LEADER, document], stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def test_a_rank_that_dies_ends_the_leader_with_the_reason(tmp_path: Path) -> None:
    with leader(write_tiny(tmp_path, "llama")) as (process, follower):
        os.kill(follower, signal.SIGKILL)
        _, log = process.communicate(timeout=60)
        assert process.returncode == 5
        assert "rank 1 of 2 ended with signal 9" in log


def test_a_leader_that_dies_takes_the_other_ranks_along(tmp_path: Path) -> None:
    with leader(write_tiny(tmp_path, "llama")) as (process, follower):
        process.kill()
        process.wait()
        deadline = time.monotonic() + 60
        while Path(f"/proc/{follower}").exists() and "Z" not in Path(f"/proc/{follower}/stat").read_text().split()[2]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
