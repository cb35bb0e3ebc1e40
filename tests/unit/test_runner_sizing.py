import os
from pathlib import Path

import pytest
import torch

from pagefleet_kernels.reference import ReferenceBackend
from pagefleet_server.model_errors import ModelError
from pagefleet_server.models.dtype import cpu_has_bfloat16, resolve_device, resolve_dtype
from pagefleet_server.models.probe import LayerSpec
from pagefleet_server import host_memory
from pagefleet_server.runner.cpus import available_cpus
from pagefleet_server.runner.kv_memory import DEFAULT_CPU_BYTES, KVPlan, allocate_kv, plan_kv
from pagefleet_server.settings import CacheSettings

CPU = torch.device("cpu")
LAYERS = (LayerSpec(4, 2, 16, 16, None), LayerSpec(4, 1, 32, 8, 64))
PER_BLOCK = 16 * 2 * (2 * 32 + 40)
"""Bytes of a block of 16 tokens in bfloat16 over both layers."""


def plan(settings: CacheSettings) -> KVPlan:
    return plan_kv(LAYERS, settings, backend=ReferenceBackend(), dtype=torch.bfloat16, device=CPU)


def test_memory_holds_the_null_block_too() -> None:
    assert plan(CacheSettings(kv_cache_memory_bytes=10 * PER_BLOCK)) == KVPlan(16, 9, PER_BLOCK)
    assert plan(CacheSettings(kv_cache_memory_bytes=10 * PER_BLOCK - 1)).num_blocks == 8


def test_count_of_blocks_wins_over_memory() -> None:
    assert plan(CacheSettings(num_kv_blocks=3, kv_cache_memory_bytes=1)).num_blocks == 3


def test_default_is_a_gibibyte_on_cpus() -> None:
    assert plan(CacheSettings()).num_bytes <= DEFAULT_CPU_BYTES < plan(CacheSettings()).num_bytes + PER_BLOCK


def test_memory_for_no_block_is_refused_with_the_numbers() -> None:
    with pytest.raises(ModelError, match=f"1000 bytes, but two blocks .* take {2 * PER_BLOCK}"):
        plan(CacheSettings(kv_cache_memory_bytes=1000))
    with pytest.raises(ModelError, match="--num-kv-blocks 0"):
        plan(CacheSettings(num_kv_blocks=0))


def test_more_memory_than_the_machine_has_is_refused() -> None:
    huge = plan(CacheSettings(kv_cache_memory_bytes=1 << 50))
    with pytest.raises(ModelError, match=r"the limit \(machine or container\) is"):
        allocate_kv(LAYERS, huge, backend=ReferenceBackend(), dtype=torch.bfloat16, device=CPU)


def test_more_memory_than_the_container_may_use_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = plan(CacheSettings(num_kv_blocks=5))
    monkeypatch.setattr(host_memory, "limit_bytes", lambda: 1000)
    with pytest.raises(ModelError, match=f"wants {wanted.num_bytes} bytes .* is 1000"):
        allocate_kv(LAYERS, wanted, backend=ReferenceBackend(), dtype=torch.bfloat16, device=CPU)


def test_memory_limit_is_the_smaller_of_machine_and_container(tmp_path: Path) -> None:
    machine = host_memory.limit_bytes(tmp_path / "none")
    file = tmp_path / "memory.max"
    for content, want in (("max", machine), ("4096", 4096), (str(1 << 60), machine), ("?", machine)):
        file.write_text(content + "\n")
        assert host_memory.limit_bytes(file) == want
    assert 0 < host_memory.resident_bytes() < machine
    assert host_memory.resident_bytes(tmp_path / "none") == 0


def test_allocation_takes_what_was_planned() -> None:
    wanted = plan(CacheSettings(num_kv_blocks=5))
    caches = allocate_kv(LAYERS, wanted, backend=ReferenceBackend(), dtype=torch.bfloat16, device=CPU)
    assert sum(cache.num_bytes for cache in caches) == wanted.num_bytes == 6 * PER_BLOCK


@pytest.mark.parametrize(
    ("content", "quota"), [("150000 100000", 2), ("100000 100000", 1), ("1000 100000", 1), ("max 100000", 10**6)]
)
def test_threads_follow_affinity_and_quota(tmp_path: Path, content: str, quota: int) -> None:
    (tmp_path / "cpu.max").write_text(content + "\n")
    assert available_cpus(tmp_path / "cpu.max") == min(quota, len(os.sched_getaffinity(0)))


def test_threads_without_a_cgroup_follow_affinity(tmp_path: Path) -> None:
    assert available_cpus(tmp_path / "none") == len(os.sched_getaffinity(0))


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
