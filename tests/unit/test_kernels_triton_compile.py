"""What the compiler makes of the shipped configurations, for GPUs that are not here."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pagefleet_kernels.triton.launch import HOPPER
from support import triton_matrix as matrix

ROOT = Path(__file__).resolve().parents[2]
EVIDENCE = ROOT / "docs" / "evidence"
FP8 = torch.float8_e4m3fn
BF16 = torch.bfloat16
LLAMA = (128, 128)

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1" or platform.machine() != "x86_64",
    reason="needs Triton's compiler and its x86-64 tools",
)


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def assert_ships(entry: matrix.Entry) -> matrix.Row:
    row = matrix.build(entry)
    assert matrix.faults(entry, row) == [], row
    return row


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_attention_builds_for_every_generation(capability: int, kind: str) -> None:
    assert_ships(matrix.attention(capability, kind, BF16, LLAMA))


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_fp8_memory_builds_for_hopper(kind: str) -> None:
    assert_ships(matrix.attention(90, kind, FP8, LLAMA))


def test_the_feature_rich_prefill_builds_for_hopper() -> None:
    assert_ships(matrix.attention(90, "prefill", BF16, (64, 64), **matrix.EVERYTHING))


def test_enough_decode_programs_fit_on_a_multiprocessor() -> None:
    """Decode lives on bytes in flight: at least three programs, with their tiles, per Hopper multiprocessor."""
    row = assert_ships(matrix.attention(90, "decode", BF16, LLAMA))
    assert row.registers * 128 * 3 <= 65536
    assert row.shared_bytes * 3 <= 227 * 1024


@pytest.mark.parametrize("entry", list(matrix.neighbours(HOPPER, fp8=True)), ids=lambda entry: entry.name)
def test_neighbours_build_for_hopper(entry: matrix.Entry) -> None:
    assert_ships(entry)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("version", ["installed", "3.6.0"])
def test_the_whole_matrix_builds(version: str, tmp_path: Path) -> None:
    """Also with the oldest Triton that we allow (what comes with torch 2.11), installed aside. Leaves its table as
    evidence."""
    paths = [str(ROOT / "tests"), str(ROOT / "kernels")]
    if version != "installed":
        aside = tmp_path / "site"
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(aside), f"triton=={version}"],
            check=True,
            timeout=1800,
        )
        paths.insert(0, str(aside))
    table = tmp_path / "table.json"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    subprocess.run(
        [sys.executable, "-m", "support.triton_matrix", str(table)], check=True, timeout=5400, env=environment
    )
    found = json.loads(table.read_text(encoding="utf-8"))
    if version != "installed":
        assert found["triton"] == version
    EVIDENCE.mkdir(parents=True, exist_ok=True)
    name = f"{found['time'][:10]}-kernels_triton_{found['triton']}_compile.json"
    (EVIDENCE / name).write_text(table.read_text(encoding="utf-8"), encoding="utf-8")
    assert found["faults"] == {}
