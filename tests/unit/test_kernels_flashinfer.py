"""FlashInfer's adapter. Without a GPU it computes nothing: a plain class of the contract that it documents stands in
its place, and the self-check that guards the real one is held to fakes that are wrong."""

import inspect
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from pagefleet_kernels import ops
from pagefleet_kernels.batch import KVShape
from pagefleet_kernels.errors import BackendUnavailable, KernelArgumentError
from pagefleet_kernels.flashinfer import FlashInferBackend, checked_wrapper, make_backend
from pagefleet_kernels.flashinfer.backend import MAX_RULES
from pagefleet_kernels.probe import probe
from support import fake_flashinfer
from support.attention_oracle import CASES, Case, build
from support.fake_flashinfer import BatchPrefillWithPagedKVCacheWrapper as FakeWrapper

CPU = torch.device("cpu")
WIDE = KVShape(2, 64, 64)

SEQUENCES = {
    "decodes then chunks": Case(((1, 9), (1, 300), (7, 7), (16, 48)), WIDE),
    "padding": Case(((1, 20), (1, 0), (0, 0), (0, 9), (3, 3), (40, 0)), WIDE),
    "window and cap": Case(((1, 300), (9, 70)), WIDE, sliding_window=23, softcap=5.0),
    "whole blocks, large ones": Case(((1, 64), (64, 128)), WIDE, block_size=64),
    "no GQA": Case(((1, 18), (5, 18)), KVShape(4, 64, 64), num_q_heads=4),
    "nothing": Case(((0, 9),), WIDE),
}


def attend(backend: FlashInferBackend, case: Case, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    world = build(case, dtype=torch.float16)
    cache = backend.allocate(
        case.shape, num_blocks=world.num_blocks, block_size=case.block_size, dtype=torch.float16, device=CPU
    )
    ops.write_kv(backend, cache, world.history_keys, world.history_values, world.history_slots)
    rule = {"scale": case.scale, "sliding_window": case.sliding_window, "softcap": case.softcap} | changes
    return ops.paged_attention(backend, world.query, cache, world.batch, **rule), world.want


@pytest.mark.parametrize("name", sorted(SEQUENCES))
def test_says_in_flashinfers_terms_what_the_batch_says(name: str) -> None:
    out, want = attend(FlashInferBackend(FakeWrapper), SEQUENCES[name])
    torch.testing.assert_close(out.double(), want, rtol=3e-3, atol=3e-3)


def test_plans_once_a_batch_and_kind_of_layer() -> None:
    made: list[FakeWrapper] = []

    def make(*arguments: Any) -> FakeWrapper:
        made.append(FakeWrapper(*arguments))
        return made[-1]

    backend = FlashInferBackend(make)
    case = SEQUENCES["decodes then chunks"]
    world = build(case, dtype=torch.float16)
    cache = backend.allocate(WIDE, num_blocks=world.num_blocks, block_size=16, dtype=torch.float16, device=CPU)
    for window in (None, 7, None, 7):
        ops.paged_attention(backend, world.query, cache, world.batch, scale=1.0, sliding_window=window)
    assert [wrapper.plans for wrapper in made] == [1, 1]
    ops.paged_attention(backend, world.query, cache, replace(world.batch), scale=1.0)
    assert [wrapper.plans for wrapper in made] == [2, 1]
    for window in range(1, 3 * MAX_RULES):
        ops.paged_attention(backend, world.query, cache, world.batch, scale=1.0, sliding_window=window)
    assert len(backend._planned) == MAX_RULES


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"dtype": torch.float32}, "dtype"),
        ({"dtype": torch.float8_e4m3fn}, "dtype"),
        ({"shape": KVShape(1, 64, 128)}, "head_dim"),
        ({"shape": KVShape(1, 80, 80)}, "head_dim"),
    ],
)
def test_what_is_not_asked_of_it_is_refused(change: dict[str, Any], argument: str) -> None:
    options: dict[str, Any] = {
        "shape": WIDE, "num_blocks": 2, "block_size": 16, "dtype": torch.float16, "device": CPU,
    }  # fmt: skip
    with pytest.raises(KernelArgumentError, match=argument):
        FlashInferBackend(FakeWrapper).allocate(**(options | change))


def test_sinks_are_refused() -> None:
    case = replace(CASES["sinks"], shape=WIDE)
    with pytest.raises(KernelArgumentError, match="sinks"):
        attend(FlashInferBackend(FakeWrapper), case, sinks=torch.zeros(case.num_q_heads))


def test_the_contract_of_the_installed_package_is_asked_for() -> None:
    assert checked_wrapper(fake_flashinfer) is FakeWrapper

    class Older(FakeWrapper):
        def plan(self, qo_indptr: torch.Tensor, paged_kv_indptr: torch.Tensor) -> None:  # type: ignore[override]
            raise AssertionError

    class Package:
        __version__ = "0.1"
        BatchPrefillWithPagedKVCacheWrapper = Older

    with pytest.raises(BackendUnavailable, match=r"flashinfer 0\.1: .*plan does not take causal, head_dim_qk"):
        checked_wrapper(Package)
    with pytest.raises(BackendUnavailable, match="flashinfer of unknown version has no BatchPrefill"):
        checked_wrapper(object())


class OffByOneWindow(FakeWrapper):
    """What a version would do that counts the row's own key."""

    def plan(self, *arguments: Any, **options: Any) -> None:
        options["window_left"] -= options["window_left"] > 0
        super().plan(*arguments, **options)


class ForgetsTheCap(FakeWrapper):
    def plan(self, *arguments: Any, **options: Any) -> None:
        super().plan(*arguments, **(options | {"logits_soft_cap": 0.0}))


class TopLeftMask(FakeWrapper):
    """Causal from the first key on, not up to the last."""

    def run(self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        rows = [last - first for first, last in pairwise(self.starts)]
        self.lengths = [min(pair) for pair in zip(self.lengths, rows, strict=True)]
        return super().run(q, paged_kv_cache)


class Nan(FakeWrapper):
    def run(self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return torch.full_like(q, float("nan"))


class Raises(FakeWrapper):
    def run(self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        raise RuntimeError("Ninja build failed")


def test_the_self_check_takes_what_agrees() -> None:
    probe(FlashInferBackend(FakeWrapper), CPU, block_size=16, softcap=2.0)


@pytest.mark.parametrize(
    ("wrapper", "reason"),
    [
        (OffByOneWindow, "windowed attention differs from plain torch"),
        (ForgetsTheCap, "capped attention differs"),
        (TopLeftMask, "full attention differs"),
        (Nan, "full attention differs from plain torch by nan"),
        (Raises, "RuntimeError: Ninja build failed"),
    ],
)
def test_the_self_check_refuses_what_does_not(wrapper: type[FakeWrapper], reason: str) -> None:
    with pytest.raises(BackendUnavailable, match=f"its self-check failed: {reason}"):
        probe(FlashInferBackend(wrapper), CPU, block_size=16, softcap=2.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_says_why_it_is_not_available() -> None:
    with pytest.raises(BackendUnavailable, match="no CUDA device"):
        make_backend()


def test_an_installed_package_has_the_fakes_arguments() -> None:
    flashinfer = pytest.importorskip("flashinfer", reason="FlashInfer is no dependency")
    real = inspect.signature(flashinfer.BatchPrefillWithPagedKVCacheWrapper.plan).parameters
    fake = inspect.signature(FakeWrapper.plan).parameters
    assert list(real)[: len(fake)] == list(fake)
    assert all(real[name].default == fake[name].default for name in fake if isinstance(fake[name].default, int))
