"""The stages of gpu_e2e.py: each a function of a Setting that returns facts, or raises, in a process of its own."""

import dataclasses
import importlib.metadata
import importlib.util
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from benchmarks import gpu_models
from benchmarks.gpu_e2e_server import server
from benchmarks.gpu_e2e_setting import Facts, Setting, StageFailedError

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "msgspec", "llguidance", "aiohttp")


def environment(setting: Setting) -> Facts:
    """Versions and the device. Fails when a package is missing, and says how to bring it."""
    facts: Facts = {"python": sys.version.split()[0]}
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    for name in PACKAGES:
        if name not in missing:
            facts[name] = importlib.metadata.version(name)
    if setting.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        facts["device"] = properties.name
        facts["capability"] = f"{properties.major}.{properties.minor}"
        facts["memory_gib"] = round(properties.total_memory / 2**30, 1)
        facts["cuda"] = torch.version.cuda
    if missing:
        raise StageFailedError(f"missing: {', '.join(missing)}; pip install 'pagefleet[server]' (or its wheels)", facts)
    return facts


def kernels(setting: Setting) -> Facts:
    """Every kernel against float64, as kernels_gpu.py does before it times."""
    if setting.device != "cuda":
        return {"not_measured": "the kernels need a GPU; tests run them under Triton's interpreter"}
    from benchmarks.gpu_checks import run_checks
    from pagefleet_kernels.triton import make_backend

    rows = run_checks(make_backend())
    wrong = [row["name"] for row in rows if not row["ok"]]
    facts: Facts = {"checks": len(rows), "worst_error": max(row.get("error", 0.0) for row in rows), "rows": rows}
    if wrong:
        raise StageFailedError(f"wrong: {', '.join(wrong)}", facts)
    return facts


def parity(setting: Setting) -> Facts:
    """Greedy tokens in float32 of both executors against transformers' own generate(), same weights."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        path = gpu_models.write_weights(Path(folder), setting.small)
        rng, count, new = random.Random(0), 4 if setting.tiny else 16, 12 if setting.tiny else 32
        vocab = setting.small["vocab_size"]
        prompts = [[rng.randrange(3, vocab) for _ in range(rng.randint(2, 200))] for _ in range(count)]
        module: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        module.to(setting.device)
        want = [_generate(module, prompt, new) for prompt in prompts]
        facts: Facts = {"prompts": count, "tokens": count * new}
        for executor in ("fused", "transformers"):
            runner = _runner(setting, path, executor=executor, dtype="float32", num_kv_blocks=512, dummy=False)
            got = _greedy(runner, prompts, new)
            facts[f"{executor}_equal"] = sum(a == b for a, b in zip(got, want, strict=True))
            facts[f"{executor}_attention"] = runner.attention_backend
            facts[f"{executor}_graphs"] = 0 if runner.graphs is None else len(runner.graphs.shapes)
            del runner
    wrong = [name for name in ("fused", "transformers") if facts[f"{name}_equal"] != count]
    if wrong:
        raise StageFailedError(f"other tokens than transformers: {', '.join(wrong)}", facts)
    return facts


def decode(setting: Setting) -> Facts:
    """Start, KV sized by itself, the largest step, then decode steps with graphs and without."""
    with tempfile.TemporaryDirectory() as folder:
        path = gpu_models.write_config(Path(folder), setting.large)
        began = time.perf_counter()
        runner = _runner(setting, path, executor="fused", dtype=setting.dtype)
        facts: Facts = {
            "start_seconds": round(time.perf_counter() - began, 2),
            "phases": {name: round(seconds, 2) for name, seconds in runner.start_seconds.items()},
            "weights_bytes": runner.model.num_weight_bytes,
            "kv_bytes": runner.plan.num_bytes,
            "kv_tokens": runner.num_blocks * runner.block_size,
            "attention": runner.attention_backend,
            "graphs": 0 if runner.graphs is None else len(runner.graphs.shapes),
        }
        _largest_step(runner)
        if setting.device == "cuda":
            free, total = torch.cuda.mem_get_info()
            facts["free_after_largest_step_bytes"], facts["total_bytes"] = free, total
            facts["gpu_peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
        facts["prompt_tokens_per_second"] = _prompt_rate(runner)
        eager = dataclasses.replace(runner, graphs=None)
        for rows in (1, 4) if setting.tiny else (1, 8, 32, 64):
            facts[f"decode_{rows}"] = _decode_rates(runner, eager, rows, steps=4 if setting.tiny else 40)
    if setting.device == "cuda" and not facts["graphs"]:
        raise StageFailedError("no decode step is captured: the log above says why", facts)
    worst = min(facts[name]["same_tokens"] for name in facts if name.startswith("decode_"))
    if worst < 0.9:  # near ties of random weights may fall otherwise; what is wrong differs everywhere
        raise StageFailedError(f"graphs and eager steps agree on {worst:.0%} of the tokens only", facts)
    return facts


def paged_against_static(setting: Setting) -> Facts:
    """The engine's scheduler over real steps, same KV bytes: requests that reserve max-model-len against blocks."""
    from pagefleet_server.core.limits import SchedulerLimits
    from pagefleet_server.core.sampling_params import SamplingParams
    from pagefleet_server.core.scheduler import Scheduler

    max_len, blocks, requests = (256, 64, 12) if setting.tiny else (2048, 1024, 128)
    slots = blocks * 16 // max_len
    rng = random.Random(0)

    def length(mean: float, sigma: float) -> int:
        """Log-normal, with ShareGPT's means as the vLLM paper gives them (161 in, 338 out), cut."""
        scale = 0.1 if setting.tiny else 1.0
        return max(4, min(max_len // 2 - 1, round(scale * rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))))

    load = [(length(161, 1.1), length(338, 0.9)) for _ in range(requests)]
    facts: Facts = {"requests": requests, "kv_tokens": blocks * 16, "static_slots": slots}
    with tempfile.TemporaryDirectory() as folder:
        path = gpu_models.write_config(Path(folder), setting.large)
        runner = _runner(setting, path, executor="fused", dtype=setting.dtype, num_kv_blocks=blocks)
        for name, running in (("static", slots), ("paged", 64)):
            limits = SchedulerLimits(
                num_blocks=blocks,
                block_size=16,
                max_model_len=max_len,
                max_num_seqs=running,
                max_num_batched_tokens=512,
            )
            scheduler = Scheduler(limits, prefix_caching=False)
            for index, (prompt, output) in enumerate(load):
                scheduler.add(
                    str(index), [3] * prompt, SamplingParams(max_tokens=output, temperature=0.0), arrival_time=0.0
                )
            began, steps, peak = time.perf_counter(), 0, 0
            while scheduler.has_work:
                step = scheduler.schedule(time.perf_counter() - began)
                assert step is not None
                peak = max(peak, len(step.scheduled))
                scheduler.update(step, runner.execute(step))
                steps += 1
            seconds = time.perf_counter() - began
            facts[name] = {
                "seconds": round(seconds, 2),
                "steps": steps,
                "peak_running": peak,
                "output_tokens_per_second": round(sum(output for _, output in load) / seconds, 1),
                "requests_per_second": round(requests / seconds, 2),
            }
    facts["paged_over_static"] = round(facts["static"]["seconds"] / facts["paged"]["seconds"], 2)
    return facts


STAGES: Mapping[str, Callable[[Setting], Facts]] = MappingProxyType(
    {
        "environment": environment,
        "kernels": kernels,
        "parity": parity,
        "decode": decode,
        "paged_against_static": paged_against_static,
        "server": server,
    }
)
"""In the order of what depends on what: the first that fails says where to look."""


def _runner(
    setting: Setting,
    path: Path,
    *,
    executor: str,
    dtype: str,
    num_kv_blocks: int | None = None,
    dummy: bool = True,
) -> Any:
    from pagefleet_server.runner.runner import build_runner
    from pagefleet_server.settings import CacheSettings, EngineSettings, ModelSettings, SchedulerSettings

    settings = EngineSettings(
        model=ModelSettings(
            model=str(path),
            device=setting.device,
            dtype=dtype,
            executor=executor,
            load_format="dummy" if dummy else "auto",
            threads=1 if setting.device == "cpu" else None,
        ),
        cache=CacheSettings(
            num_kv_blocks=num_kv_blocks, kv_cache_memory_bytes=2**24 if setting.tiny and num_kv_blocks is None else None
        ),
        scheduler=SchedulerSettings(max_num_batched_tokens=64 if setting.tiny else 2048),
    )
    return build_runner(settings, _tell)


def _tell(phase: str, message: str, **_numbers: object) -> None:
    print(f"  {phase}: {message}", file=sys.stderr, flush=True)


def _rows(runner: Any, lengths: list[int], counts: list[int]) -> Any:
    """A step of requests on blocks of their own: counts[i] tokens that end at lengths[i]."""
    from pagefleet_server.core.sampling_params import SamplingParams
    from pagefleet_server.core.step import ScheduledRequest, SchedulerOutput

    free, rows = iter(range(1, runner.num_blocks + 1)), []
    for index, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        table = tuple(next(free) for _ in range(-(-length // runner.block_size)))
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        tokens = tuple(3 + (index + position) % 200 for position in range(count))
        rows.append(ScheduledRequest(str(index), tokens, length - count, table, True, sampling))
    decodes = sum(1 for count in counts if count == 1)
    return SchedulerOutput(tuple(rows), decodes, sum(counts))


def _largest_step(runner: Any) -> None:
    """All tokens of a step, most sequences: if memory was sized wrongly, here it ends."""
    from pagefleet_server.runner.warm_up import largest_step
    from pagefleet_server.settings import SchedulerSettings

    tokens = min(2048, runner.num_blocks * runner.block_size // 2)
    seqs = min(64, tokens // 4)
    settings = SchedulerSettings(max_num_seqs=seqs, max_num_batched_tokens=tokens)
    step, _ = largest_step(settings, max_positions=runner.max_model_len, block_size=runner.block_size)
    runner.execute(step)


def _prompt_rate(runner: Any) -> float:
    length: int = min(2048, runner.max_model_len - 1)
    step = _rows(runner, [length], [length])
    runner.execute(step)
    began = time.perf_counter()
    for _ in range(3):
        runner.execute(step)
    return round(3.0 * length / (time.perf_counter() - began), 1)


def _decode_rates(runner: Any, eager: Any, rows: int, *, steps: int) -> Facts:
    """Interleaved; the best of each, with the model alone and with sampling in it (a step as the engine runs it)."""
    step = _rows(runner, [200 + 3 * index for index in range(rows)], [1] * rows)
    prompts = _rows(runner, [200 + 3 * index for index in range(rows)], [200 + 3 * index for index in range(rows)])
    for request in prompts.scheduled:  # KV of real tokens, one prompt at a time
        eager.execute(
            dataclasses.replace(prompts, scheduled=(request,), num_decodes=0, num_tokens=len(request.token_ids))
        )
    best = {"graphs": math.inf, "eager": math.inf}
    drawn: dict[str, Mapping[str, int]] = {}
    for _ in range(steps):
        for name, one in (("graphs", runner), ("eager", eager)):
            began = time.perf_counter()
            drawn[name] = one.execute(step).sampled
            best[name] = min(best[name], time.perf_counter() - began)
    same = sum(drawn["graphs"][key] == token for key, token in drawn["eager"].items()) / rows
    return {
        "graphs_ms": round(best["graphs"] * 1e3, 3),
        "eager_ms": round(best["eager"] * 1e3, 3),
        "graphs_tokens_per_second": round(rows / best["graphs"], 1),
        "gain": round(best["eager"] / best["graphs"], 2),
        "same_tokens": same,
    }


def _greedy(runner: Any, prompts: list[list[int]], new: int) -> list[list[int]]:
    """All prompts together: prompts one a step, then decodes in one batch."""
    from pagefleet_server.core.sampling_params import SamplingParams
    from pagefleet_server.core.step import ScheduledRequest, SchedulerOutput

    free, sampling = iter(range(1, runner.num_blocks + 1)), SamplingParams(max_tokens=1, temperature=0.0)
    tables = [tuple(next(free) for _ in range(-(-(len(p) + new) // runner.block_size))) for p in prompts]
    texts = [list(prompt) for prompt in prompts]

    def row(index: int, start: int) -> Any:
        return ScheduledRequest(str(index), tuple(texts[index][start:]), start, tables[index], True, sampling)

    for index, prompt in enumerate(prompts):
        drawn = runner.execute(SchedulerOutput((row(index, 0),), 0, len(prompt))).sampled
        texts[index].append(drawn[str(index)])
    for _ in range(new - 1):
        rows = tuple(row(index, len(text) - 1) for index, text in enumerate(texts))
        drawn = runner.execute(SchedulerOutput(rows, len(rows), len(rows))).sampled
        for index, text in enumerate(texts):
            text.append(drawn[str(index)])
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def _generate(module: Any, prompt: list[int], new: int) -> list[int]:
    ids = torch.tensor([prompt], device=module.device)
    out = module.generate(ids, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def quiet_environment() -> dict[str, str]:
    """For the processes of the stages."""
    root = Path(__file__).resolve().parents[1]
    paths = [str(root / "server"), str(root / "kernels"), str(root)]
    inherited = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*paths, inherited] if inherited else paths),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
