"""Runs steps: flat arrays, model, sampler. Built once, by `build_runner`."""

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pagefleet_kernels import ops
from pagefleet_kernels.backend import Backend, KVCache, TokenSampler
from pagefleet_kernels.dispatch import select_backend
from pagefleet_kernels.errors import BackendUnavailable, KernelArgumentError
from pagefleet_server.core.step import SchedulerOutput, StepResult
from pagefleet_server.model_errors import ModelError
from pagefleet_server.models.executor import Executor, OpenedModel, open_model
from pagefleet_server.models.load_progress import Paced, Progress, describe
from pagefleet_server.models.pooling import Pooling
from pagefleet_server.runner import memory_budget
from pagefleet_server.runner.cpus import available_cpus
from pagefleet_server.runner.decode_graphs import DecodeGraphs
from pagefleet_server.runner.device_sampler import sample_on_device
from pagefleet_server.runner.flat_batch import FlatBatch, flatten
from pagefleet_server.runner.grammars import Grammars, load_in_background
from pagefleet_server.runner.graph_setup import graph_setup
from pagefleet_server.runner.kv_memory import KVPlan, allocate_kv, bytes_per_block, kv_dtype, kv_shape, plan_kv
from pagefleet_server.runner.logprobs import score_prompts
from pagefleet_server.runner.memory_budget import MemoryBudget
from pagefleet_server.runner.paged_context import PagedContext
from pagefleet_server.runner.pooling import pool_rows
from pagefleet_server.runner.sampler import sample
from pagefleet_server.runner.step_buffers import moved
from pagefleet_server.runner.tensor_parallel import Order, RankGroup
from pagefleet_server.runner.warm_up import largest_step, one_row
from pagefleet_server.settings import EngineSettings

_logger = logging.getLogger(__name__)

_HOST = torch.device("cpu")
RANK_LOST = 5
"""Exit code when another rank ended: as for a step that failed, see docs/engine.md."""
GRAMMARS_AFTER_SECONDS = 5.0
"""The tokenizer of grammars is made when no step has run for so long: not during the start, nor between tokens."""
LOAD_TOLD_SECONDS = 2.0
"""Between two lines about a long load."""


class StepError(Exception):
    """A step could not be computed; the engine ends with this reason."""


@dataclass(frozen=True, slots=True)
class Runner:
    """A model with its KV cache. Stateless between steps but for the cache's content."""

    model: Executor
    backend: Backend
    caches: tuple[KVCache, ...]
    plan: KVPlan
    max_model_len: int
    """Tokens of prompt and output: the model's limit, capped by the setting and by what the blocks hold."""
    start_seconds: Mapping[str, float]
    """Phase -> seconds it took."""
    grammars: Grammars | None = None
    """For requests that have a grammar."""
    linear_backend: str = "torch"
    """Who computes the linears: the kernel backend that packed them, or torch."""
    group: RankGroup | None = None
    """The ranks that hold the model together; this one leads. None: it is alone."""
    graphs: DecodeGraphs | None = None
    """Decode steps captured on these caches; None: every step is eager."""
    fresh: bool = False
    """The caches are a check's own: see check."""

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.plan.block_size

    @property
    def num_blocks(self) -> int:
        """Usable blocks, ids 1 .. num_blocks; the null block 0 is on top."""
        return self.plan.num_blocks

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text."""
        return self.model.eos_token_ids

    @property
    def vocab_size(self) -> int:
        """Width of the logits; token ids are below it."""
        return self.model.vocab_size

    @property
    def pooling(self) -> Pooling | None:
        """The kind of embeddings that it makes; None: texts."""
        return self.model.pooling

    @property
    def attention_backend(self) -> str:
        """Name of the kernel backend."""
        return self.backend.name

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> StepResult:
        """Compute a step. Requests whose logits are NaN or infinite fail alone. Raises KernelArgumentError for a broken
        batch."""
        checked = self._prepare(step)
        if self.grammars is not None:
            self.grammars.begin_step()
        if self.group is not None:
            self.group.send(step, fresh=self.fresh)
        self._copy_blocks(step)
        replayed = None if self.graphs is None else self.graphs.run(checked)
        batch = checked if replayed is not None else moved(checked, self.model.device)
        context = PagedContext(self.backend, self.caches, batch.attention)
        if self.pooling is not None:
            return pool_rows(self.model.hidden(batch.token_ids, batch.positions, context), step)
        logits = replayed
        if logits is None:
            logits = self.model.forward(batch.token_ids, batch.positions, context, batch.logit_rows)
        scores, unscored = score_prompts(logits, batch.scores)
        if batch.draws_from is not None:
            logits = logits.index_select(0, batch.draws_from)
        if isinstance(self.backend, TokenSampler):
            result = sample_on_device(self.backend, logits, batch.sampled, self.grammars)
        else:
            result = sample(logits, batch.sampled, self.grammars)
        return replace(result, prompt_logprobs=scores, failed={**unscored, **result.failed}) if batch.scores else result

    @torch.inference_mode()
    def follow(self, order: Order) -> None:
        """A further rank's part of a step that rank 0 has checked."""
        runner = self._with_fresh_caches() if order.fresh else self
        batch = moved(runner._prepare(order.step), self.model.device)
        runner._copy_blocks(order.step)
        context = PagedContext(runner.backend, runner.caches, batch.attention)
        runner.model.hidden(batch.token_ids, batch.positions, context)

    def _prepare(self, step: SchedulerOutput) -> FlatBatch:
        """On the host, where looking at numbers waits for no device."""
        batch = flatten(step, block_size=self.block_size, device=_HOST)
        ops.check_batch(batch.attention, num_blocks=self.num_blocks + 1, block_size=self.block_size)
        return batch

    def _copy_blocks(self, step: SchedulerOutput) -> None:
        if step.copies:
            for cache in self.caches:
                ops.copy_blocks(self.backend, cache, step.copies)

    def _with_fresh_caches(self) -> "Runner":
        """One block, beside the others."""
        plan = replace(self.plan, num_blocks=1)
        caches = allocate_kv(
            self.model.layers, plan, backend=self.backend, dtype=self.caches[0].dtype, device=self.model.device
        )
        return replace(self, plan=plan, caches=caches, graphs=None, fresh=True)

    def check(self) -> None:
        """Ask for one token, in blocks of its own, after a step in which nobody got any. Raises StepError when there is
        none: then it was not the requests."""
        step = one_row(position=0, block_size=self.block_size)
        if self._with_fresh_caches().execute(step).failed:
            raise StepError(
                f"the model gives no numbers any more ({self.model.dtype}), not even for the prompt that it answered at"
                " its start: its weights or the memory are damaged"
            )


def build_runner(settings: EngineSettings, progress: Progress) -> Runner:
    """Load the model, allocate the KV cache, run a warm-up prompt and a decode step. With --tensor-parallel-size the
    other ranks are started as well. Raises ModelError."""
    size = settings.model.tensor_parallel_size
    group = RankGroup(rank=0, size=size) if size > 1 else None
    connect = None if group is None else lambda device: group.lead(settings, device, end=_end_with_rank)
    return _build(settings, progress, group, connect)


def build_follower(settings: EngineSettings, *, rank: int, port: int) -> Callable[[], None]:
    """A further rank, connected and loaded; the function follows rank 0 to the end. Raises ModelError."""
    group = RankGroup(rank=rank, size=settings.model.tensor_parallel_size)
    runner = _build(settings, _tell_nobody, group, lambda device: group.follow(port, device))

    def follow() -> None:
        while (order := group.receive()) is not None:
            runner.follow(order)
        group.close()

    return follow


def _tell_nobody(phase: str, message: str, /, *, done_bytes: int = 0, total_bytes: int = 0) -> None:
    """Only rank 0 reports its progress."""


def _end_with_rank(reason: str) -> None:
    """The other ranks wait for one that is gone, and nothing wakes them: the process ends at once."""
    _logger.critical("the engine ends: %s; its log lines are above", reason)
    logging.shutdown()
    os._exit(RANK_LOST)


def _build(
    settings: EngineSettings,
    progress: Progress,
    group: RankGroup | None,
    connect: Callable[[torch.device], None] | None,
) -> Runner:
    seconds: dict[str, float] = {}

    def timed(phase: str, message: str, since: float) -> float:
        now = time.monotonic()
        seconds[phase] = now - since
        _logger.info("%s: %s (%.2f s)", phase, message, seconds[phase])
        progress(phase, message)
        return now

    started = time.monotonic()
    if settings.model.threads is not None and settings.model.threads < 1:
        raise ModelError(f"--threads {settings.model.threads}: must be >= 1")
    ranks = 1 if group is None else group.size
    torch.set_num_threads(max(1, (settings.model.threads or available_cpus()) // ranks))
    progress("load_weights", settings.model.model)
    told = Paced(
        lambda done, total: progress("load_weights", describe(done, total), done_bytes=done, total_bytes=total),
        LOAD_TOLD_SECONDS,
    )
    opened = open_model(settings.model, group, told)
    if connect is not None:
        connect(opened.device)
    stored = kv_dtype(settings.cache.kv_cache_dtype, opened.dtype)
    backend = _backend_for(opened, settings, stored)
    model, packed = opened.load(backend, told)
    if settings.model.deterministic:
        _check_deterministic(model.device, backend.name, backend.name if packed else "torch")
    where = f"{len(model.layers)} layers on {model.device} ({model.executor})"
    weights = f"{model.num_weight_bytes} bytes of weights, {_name(model.dtype)}, {where}"
    now = timed("load_weights", weights, started)

    budget = _measure(settings, model, backend, group, stored)
    graphing = graph_setup(
        settings.model.cuda_graphs,
        model,
        backend,
        max_rows=settings.scheduler.max_num_seqs,
        kv_dtype=stored,
        group=group,
    )
    if graphing is not None:
        longest = min(settings.model.max_model_len or model.max_positions, model.max_positions)
        estimate = graphing.estimate(block_size=settings.cache.block_size, max_seq_len=longest)
        budget = replace(budget, graphs=estimate)
    plan = plan_kv(model.layers, settings.cache, budget, backend=backend, dtype=stored, device=model.device)
    if group is not None:
        plan = replace(plan, num_blocks=group.least(plan.num_blocks))
    budget.check(plan.num_bytes)
    caches = allocate_kv(model.layers, plan, backend=backend, dtype=stored, device=model.device)
    blocks = f"{plan.num_blocks} blocks of {plan.block_size} tokens ({_name(stored)}, {backend.name})"
    now = timed("allocate_kv", f"{plan.num_bytes} bytes of KV, {blocks}", now)

    runner = Runner(
        model,
        backend,
        caches,
        plan,
        _max_model_len(settings, model, plan),
        seconds,
        grammars=load_in_background(
            Path(settings.model.model),
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            delay_seconds=GRAMMARS_AFTER_SECONDS,
        ),
        linear_backend=backend.name if packed else "torch",
        group=group,
    )
    if group is not None and group.rank > 0:
        return runner
    warm_up = one_row(position=runner.max_model_len - 1, block_size=runner.block_size)
    for reason in runner.execute(warm_up).failed.values():
        raise ModelError(
            f"{reason}, at the first prompt, in {_name(model.dtype)}; check the weights or try another --dtype"
        )
    if graphing is not None:
        captured = graphing.capture(caches, plan, max_seq_len=runner.max_model_len)
        runner = replace(runner, graphs=captured)
    timed("warm_up", f"{torch.get_num_threads()} threads, contexts up to {runner.max_model_len} tokens", now)
    return runner


def _backend_for(model: OpenedModel, settings: EngineSettings, stored: torch.dtype) -> Backend:
    """The backend that was asked for, or the fastest that can hold this model's layers (their widths, block size, and
    `stored`, the KV's dtype). What is asked for by name and cannot be had is a ModelError."""
    name, block_size = settings.model.attention_backend, settings.cache.block_size
    try:
        backend = select_backend(model.device, name)
    except BackendUnavailable as error:
        raise ModelError(f"--attention-backend: {error.reason}") from error
    try:
        for shape in {kv_shape(layer) for layer in model.layers}:
            ops.bytes_per_block(backend, shape, block_size=block_size, dtype=stored)
            if name != "auto" or stored != model.dtype:  # what the device cannot do shows here, before the weights
                ops.allocate(backend, shape, num_blocks=2, block_size=block_size, dtype=stored, device=model.device)
    except BackendUnavailable as error:
        if stored != model.dtype:
            raise ModelError(
                f"--kv-cache-dtype: no KV in {_name(stored)} with the {backend.name} backend on {model.device}:"
                f" {error.reason}; leave it at auto"
            ) from error
        if name != "auto":
            raise ModelError(f"--attention-backend {name} cannot serve this model: {error.reason}") from error
        _logger.warning("attention backend %s cannot serve this model (%s)", backend.name, error.reason)
        return select_backend(model.device, "reference")
    except KernelArgumentError as error:
        raise ModelError(f"the KV cache cannot be laid out: {error}") from error
    return backend


def _check_deterministic(device: torch.device, attention: str, linears: str) -> None:
    if attention == linears == "cpu":
        _logger.info("deterministic: the same request gives the same bits in any batch, chunk, cache hit and fork")
        return
    raise ModelError(
        f"--deterministic: on {device} with attention by {attention!r} and linears by {linears!r}, the last bits of a"
        " request's logits may change with the number of rows beside it; serve on a CPU with the built kernels or leave"
        " out the flag"
    )


def _max_model_len(settings: EngineSettings, model: Executor, plan: KVPlan) -> int:
    wanted = settings.model.max_model_len
    if wanted is not None and wanted < 1:
        raise ModelError(f"--max-model-len {wanted}: must be >= 1")
    if wanted is not None and wanted > model.max_positions:
        raise ModelError(f"--max-model-len {wanted}: the model's own limit is {model.max_positions}; lower it")
    return min(wanted or model.max_positions, model.max_positions, plan.num_blocks * plan.block_size)


def _measure(
    settings: EngineSettings, model: Executor, backend: Backend, group: RankGroup | None, stored: torch.dtype
) -> MemoryBudget:
    """What memory the model takes, found by the largest step on a small cache, which all ranks run at once."""
    shallow, block_size = model.shallow(), settings.cache.block_size
    step, num_blocks = largest_step(settings.scheduler, max_positions=model.max_positions, block_size=block_size)
    per_block = bytes_per_block(shallow.layers, block_size, backend=backend, dtype=stored)
    plan = KVPlan(block_size, num_blocks, per_block)
    caches = allocate_kv(shallow.layers, plan, backend=backend, dtype=stored, device=model.device)
    trial = Runner(shallow, backend, caches, plan, num_blocks * block_size, {})
    leads = group is None or group.rank == 0

    def run(step: SchedulerOutput) -> None:
        if leads:
            trial.execute(step)
        else:
            trial.follow(Order(step, fresh=False))

    run(one_row(position=0, block_size=block_size))
    return memory_budget.measure(
        model.device,
        weights=model.num_weight_bytes,
        scratch=plan.num_bytes,
        largest_step=lambda: run(step),
        num_ranks=1 if group is None else group.size,
        leads=leads,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
