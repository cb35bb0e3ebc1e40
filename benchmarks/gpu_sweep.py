"""Other configurations than the table's, to decide what the table should say. Changes nothing by itself."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_timing import DEVICE, rotations, time_graph
from benchmarks.gpu_works import Scale, Scene, Work, make_scene
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


def sweep_steps(backend: Any, scale: Scale) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """(work and configuration, its measurement) of each; a configuration that the device refuses raises."""
    works = [work for work in (*scale.decodes, *scale.prefills) if work.name in SWEPT]
    for work in works or [scale.decodes[0], scale.prefills[0]]:
        for config in DECODE_CONFIGS if work.rows == 1 else PREFILL_CONFIGS:
            yield f"{work.name} {config}", partial(_measure, backend, work, config, scale.most_buffers)


def _measure(backend: Any, work: Work, config: DecodeConfig | PrefillConfig, most_buffers: int) -> dict[str, Any]:
    device = Device.of(DEVICE)
    scenes = [make_scene(backend, work, seed=seed) for seed in range(rotations(work.kv_bytes, most_buffers))]
    plans = [_plan(_operands(work, scene), device, config) for scene in scenes]
    return {"us": time_graph([partial(_run_all, plan) for plan in plans]).microseconds}


def _plan(operands: Operands, device: Device, config: DecodeConfig | PrefillConfig) -> tuple[Launch, ...]:
    if isinstance(config, DecodeConfig):
        return plan_decode(operands, device, config)
    return plan_prefill(operands, device, config)


def _run_all(plan: tuple[Launch, ...]) -> None:
    for launch in plan:
        run(launch, launch.arguments["out"].device)


def _operands(work: Work, scene: Scene) -> Operands:
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
