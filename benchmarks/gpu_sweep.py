"""Other configurations than the table's, to decide what the table should say. Changes nothing by itself."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_timing import rotations, time_graph
from pagefleet_kernels.triton.attention import Operands, plan_decode, plan_prefill
from pagefleet_kernels.triton.configs import DecodeConfig, PrefillConfig
from pagefleet_kernels.triton.launch import Device, Launch, run

SWEPT = ("decode 1 x 8k", "decode 32 x 4k", "decode 128 x 4k fp8", "prefill 1 x 4k", "prefill 1 x 8k D64")
DECODE_CONFIGS = tuple(
    DecodeConfig(tile=tile, split=split, max_splits=64, num_warps=warps, num_stages=stages)
    for tile, split, warps, stages in itertools.product((64, 128), (256, 512, 1024), (4,), (3, 5))
)
PREFILL_CONFIGS = tuple(
    PrefillConfig(rows=rows, tile=tile, num_warps=warps, num_stages=stages)
    for rows, tile, warps, stages in (
        (128, 64, 8, 2),
        (128, 64, 8, 3),
        (128, 128, 8, 2),
        (128, 128, 8, 3),
        (64, 64, 4, 3),
    )
)


def run_sweep(
    make_scene: Callable[[Any, int], Any], decodes: Sequence[Any], prefills: Sequence[Any]
) -> list[dict[str, Any]]:
    """A row per work and configuration; a configuration that the device refuses says why."""
    rows = []
    device = Device.of(torch.device("cuda", torch.cuda.current_device()))
    for work in [work for work in (*decodes, *prefills) if work.name in SWEPT]:
        scenes = [make_scene(work, seed) for seed in range(rotations(work.kv_bytes))]
        made = [_operands(work, scene) for scene in scenes]
        for config in DECODE_CONFIGS if work.rows == 1 else PREFILL_CONFIGS:
            row: dict[str, Any] = {"name": work.name, "config": str(config)}
            plans = [_plan(operands, device, config) for operands in made]
            try:
                row["us"] = time_graph([partial(_run_all, plan) for plan in plans]).microseconds
            except RuntimeError as error:
                row["refused"] = str(error).splitlines()[0][:80]
            rows.append(row)
    return rows


def _plan(operands: Operands, device: Device, config: DecodeConfig | PrefillConfig) -> tuple[Launch, ...]:
    if isinstance(config, DecodeConfig):
        return plan_decode(operands, device, config)
    return plan_prefill(operands, device, config)


def _run_all(plan: tuple[Launch, ...]) -> None:
    for launch in plan:
        run(launch, launch.arguments["out"].device)


def _operands(work: Any, scene: Any) -> Operands:
    batch, cache = scene.batch, scene.cache
    return Operands(
        out=torch.empty_like(scene.query),
        query=scene.query,
        keys=cache.keys,
        values=cache.values,
        key_scales=cache.key_scales,
        value_scales=cache.value_scales,
        query_starts=batch.query_starts,
        seq_lens=batch.seq_lens,
        block_tables=batch.block_tables,
        sinks=None,
        num_decodes=batch.num_decodes,
        max_query_len=batch.max_query_len,
        max_seq_len=batch.max_seq_len,
        scale=work.head_dim**-0.5,
        window=0,
        softcap=0.0,
    )
