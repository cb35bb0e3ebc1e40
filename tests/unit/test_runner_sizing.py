import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pagefleet_kernels.reference import ReferenceBackend
from pagefleet_server import cgroup, host_memory
from pagefleet_server.model_errors import ModelError
from pagefleet_server.models.dtype import cpu_has_bfloat16, resolve_device, resolve_dtype
from pagefleet_server.models.probe import LayerSpec
from pagefleet_server.runner.cpus import available_cpus
from pagefleet_server.runner.kv_memory import DEFAULT_CPU_BYTES, KVPlan, allocate_kv, plan_kv
from pagefleet_server.runner.memory_budget import MemoryBudget
from pagefleet_server.settings import CacheSettings

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
LAYERS = (LayerSpec(4, 2, 16, 16, None), LayerSpec(4, 1, 32, 8, 64))
PER_BLOCK = 16 * 2 * (2 * 32 + 40)
"""Bytes of a block of 16 tokens in bfloat16 over both layers."""


PLENTY = MemoryBudget(limit=1 << 40, process=0, api=0, weights=0, activations=0, margin=0)


def plan(settings: CacheSettings, budget: MemoryBudget = PLENTY, device: torch.device = CPU) -> KVPlan:
    return plan_kv(LAYERS, settings, budget, backend=ReferenceBackend(), dtype=torch.bfloat16, device=device)


def test_memory_holds_the_null_block_too() -> None:
    assert plan(CacheSettings(kv_cache_memory_bytes=10 * PER_BLOCK)) == KVPlan(16, 9, PER_BLOCK)
    assert plan(CacheSettings(kv_cache_memory_bytes=10 * PER_BLOCK - 1)).num_blocks == 8


def test_count_of_blocks_wins_over_memory() -> None:
    assert plan(CacheSettings(num_kv_blocks=3, kv_cache_memory_bytes=1)).num_blocks == 3


def test_default_is_a_gibibyte_on_cpus_or_what_is_there() -> None:
    assert plan(CacheSettings()).num_bytes <= DEFAULT_CPU_BYTES < plan(CacheSettings()).num_bytes + PER_BLOCK
    small = MemoryBudget(limit=100_000, process=30_000, api=5_000, weights=20_000, activations=4_000, margin=1_000)
    assert (
        plan(CacheSettings(), small).num_bytes
        <= small.left
        == 40_000
        < plan(CacheSettings(), small).num_bytes + PER_BLOCK
    )
    with pytest.raises(ModelError, match="gets 0 bytes"):
        plan(CacheSettings(), replace(small, activations=90_000))


@pytest.mark.parametrize(("part", "device"), [(0.75, CPU), (0.75, CUDA), (None, CUDA)])
def test_a_part_of_the_memory_holds_everything(part: float | None, device: torch.device) -> None:
    budget = MemoryBudget(
        limit=10_000_000, process=100_000, api=0, weights=2_000_000, activations=300_000, margin=50_000
    )
    got = plan(CacheSettings(gpu_memory_utilization=part), budget, device)
    rest = got.num_bytes + budget.limit - budget.left
    assert rest <= (part or 0.9) * budget.limit < rest + PER_BLOCK


def test_memory_for_no_block_is_refused_with_the_numbers() -> None:
    with pytest.raises(ModelError, match=f"1000 bytes, but two blocks .* take {2 * PER_BLOCK}"):
        plan(CacheSettings(kv_cache_memory_bytes=1000))
    with pytest.raises(ModelError, match="--num-kv-blocks 0"):
        plan(CacheSettings(num_kv_blocks=0))


def test_what_does_not_fit_is_refused_with_every_class(caplog: pytest.LogCaptureFixture) -> None:
    budget = MemoryBudget(limit=1000, process=100, api=50, weights=300, activations=70, margin=80)
    with caplog.at_level("INFO"):
        budget.check(400)
    for told in ("weights 300", "KV 400", "activations 70", "engine process 100", "API process 50", "margin 80"):
        assert told in caplog.text
    assert "together 1000 of 1000" in caplog.text
    with pytest.raises(
        ModelError, match=r"401 bytes does not fit: 400 are left of 1000.*weights 300.*lower --kv-cache"
    ):
        budget.check(401)


@pytest.mark.parametrize(
    ("files", "want"),
    [
        ({}, None),
        ({"memory.max": "max"}, None),
        ({"memory.max": "?"}, None),
        ({"memory.max": "4096"}, 4096),
        ({"a/b/memory.max": "8192", "a/memory.max": "5000", "memory.max": "max"}, 5000),
        ({"memory/v1/memory.limit_in_bytes": "7000"}, 7000),
        ({"memory/memory.limit_in_bytes": "6000", "memory/v1/memory.limit_in_bytes": "9223372036854771712"}, 6000),
        ({"memory/other/memory.limit_in_bytes": "10"}, None),
    ],
)
def test_the_smallest_limit_of_the_own_groups_counts(tmp_path: Path, files: dict[str, str], want: int | None) -> None:
    assert cgroup.memory_limit(*write_groups(tmp_path, files)) == want


@pytest.mark.parametrize(
    ("files", "want"),
    [
        ({}, None),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"a/b/cpu.max": "200000 100000", "a/cpu.max": "50000 100000"}, 0.5),
        ({"cpu/v1/cpu.cfs_quota_us": "-1", "cpu/v1/cpu.cfs_period_us": "100000"}, None),
        ({"cpu/v1/cpu.cfs_quota_us": "300000", "cpu/v1/cpu.cfs_period_us": "100000"}, 3.0),
        ({"cpu.max": "100000 0"}, None),
    ],
)
def test_the_smallest_quota_of_the_own_groups_counts(tmp_path: Path, files: dict[str, str], want: float | None) -> None:
    assert cgroup.cpu_limit(*write_groups(tmp_path, files)) == want


def write_groups(tmp_path: Path, files: dict[str, str]) -> tuple[Path, Path]:
    """Mount and membership: of version 2 in /a/b, of version 1 in /v1."""
    membership = tmp_path / "membership"
    membership.write_text("9:cpuset:/\n4:memory:/v1\n2:cpu,cpuacct:/v1\n0::/a/b\n")
    for name, text in files.items():
        file = tmp_path / "mount" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return tmp_path / "mount", membership


def test_memory_is_cut_by_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = iter([None, 4096, 1 << 59])
    monkeypatch.setattr(cgroup, "memory_limit", lambda: next(limits))
    machine = host_memory.limit_bytes()
    assert (host_memory.limit_bytes(), host_memory.limit_bytes()) == (4096, machine)
    assert 0 < host_memory.resident_bytes() < machine
    assert host_memory.resident_bytes("0") == 0


HELD = """
from pagefleet_server import host_memory
host_memory.restart_peak()
before = host_memory.resident_bytes()
held = bytearray(b"x" * (64 << 20))
del held
assert host_memory.peak_bytes() - before > 60 << 20
assert host_memory.resident_bytes() - before < 40 << 20
"""


def test_the_peak_is_what_was_held_at_once() -> None:
    """In a process of its own: a long test run is large, and a system that reclaims cold pages shrinks it meanwhile."""
    subprocess.run([sys.executable, "-c", HELD], check=True, timeout=60)


def test_allocation_takes_what_was_planned() -> None:
    wanted = plan(CacheSettings(num_kv_blocks=5))
    caches = allocate_kv(LAYERS, wanted, backend=ReferenceBackend(), dtype=torch.bfloat16, device=CPU)
    assert sum(cache.num_bytes for cache in caches) == wanted.num_bytes == 6 * PER_BLOCK


@pytest.mark.parametrize(("quota", "most"), [(1.5, 2), (1.0, 1), (0.01, 1), (None, 10**6)])
def test_threads_follow_affinity_and_quota(monkeypatch: pytest.MonkeyPatch, quota: float | None, most: int) -> None:
    monkeypatch.setattr(cgroup, "cpu_limit", lambda: quota)
    assert available_cpus() == min(most, len(os.sched_getaffinity(0)))


def test_bfloat16_is_read_from_the_cpu_flags(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    for line, want in (("flags\t: fpu avx512_bf16 x", True), ("Features\t: fp bf16", True), ("flags\t: avx2", False)):
        file.write_text(f"processor\t: 0\n{line}\n")
        assert cpu_has_bfloat16(file) is want
    assert cpu_has_bfloat16(tmp_path / "none") is False


def test_dtype_auto_is_the_checkpoints_where_the_cpu_is_fast_in_it() -> None:
    half = torch.bfloat16 if cpu_has_bfloat16() else torch.float32
    assert resolve_dtype("auto", torch.float32, CPU) == torch.float32
    assert resolve_dtype("auto", torch.bfloat16, CPU) == half
    assert resolve_dtype("auto", torch.float16, CPU) == half
    assert resolve_dtype("auto", None, CPU) == half
    assert resolve_dtype("auto", torch.float16, torch.device("cuda", 0)) == torch.float16
    assert resolve_dtype("float16", torch.float32, CPU) == torch.float16


def test_unknown_dtype_and_device_are_refused() -> None:
    with pytest.raises(ModelError, match="--dtype 'int8'"):
        resolve_dtype("int8", None, CPU)
    with pytest.raises(ModelError, match="--device 'tpu'"):
        resolve_device("tpu")
