"""Builders for scheduler tests."""

from pagefleet_server.core.limits import SchedulerLimits
from pagefleet_server.core.prompt_lookup import SpeculationLimits
from pagefleet_server.core.report import NewTokens
from pagefleet_server.core.sampling_params import SamplingParams
from pagefleet_server.core.scheduler import Scheduler
from pagefleet_server.core.step import SchedulerOutput, TokenLogprobs
from support.kv_memory_runner import KvMemoryRunner


def make_limits(
    *,
    num_blocks: int = 16,
    block_size: int = 4,
    max_model_len: int = 64,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 16,
    max_step_seconds: float | None = None,
    speculation: SpeculationLimits | None = None,
) -> SchedulerLimits:
    return SchedulerLimits(
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_step_seconds=max_step_seconds,
        speculation=speculation,
    )


def make_sampling(
    max_tokens: int = 4, *, stop: tuple[int, ...] = (), min_tokens: int = 0, seed: int = 0
) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, stop_token_ids=stop, min_tokens=min_tokens, seed=seed)


def make_prompt(length: int, *, first: int = 1) -> list[int]:
    return [(first + index) % 50 for index in range(length)]


class Bench:
    """A scheduler with its memory-backed runner, one step per call, integrity checked around each."""

    def __init__(self, limits: SchedulerLimits, *, prefix_caching: bool = True, loops: bool = False) -> None:
        self.scheduler = Scheduler(limits, prefix_caching=prefix_caching)
        self.runner = KvMemoryRunner(num_blocks=limits.num_blocks, block_size=limits.block_size, loops=loops)
        self.now = 0.0
        self.tokens: dict[str, list[int]] = {}
        self.finish: dict[str, str] = {}
        self.scores: dict[str, list[TokenLogprobs]] = {}

    def add(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int = 4,
        *,
        stop: tuple[int, ...] = (),
        tenant: str = "",
        cache_salt: str = "",
        priority: int = 0,
    ) -> None:
        self.scheduler.add(
            request_id,
            prompt,
            make_sampling(max_tokens, stop=stop),
            arrival_time=self.now,
            tenant=tenant,
            cache_salt=cache_salt,
            priority=priority,
        )
        self.tokens[request_id] = []

    def add_group(self, request_ids: list[str], prompt: list[int], max_tokens: int = 4) -> None:
        """Siblings with the seeds 0, 1, 2 ..."""
        samplings = [make_sampling(max_tokens, seed=seed) for seed in range(len(request_ids))]
        self.scheduler.add_group(request_ids, prompt, samplings, arrival_time=self.now)
        self.tokens.update({request_id: [] for request_id in request_ids})

    def schedule(self) -> SchedulerOutput | None:
        output = self.scheduler.schedule(self.now)
        self.scheduler.check_integrity()
        return output

    def step(self) -> SchedulerOutput | None:
        """Schedule, execute and update once."""
        output = self.schedule()
        if output is not None:
            self.take(self.scheduler.update(output, self.runner.execute(output)))
            self.scheduler.check_integrity()
        self.now += 1.0
        return output

    def take(self, news: list[NewTokens]) -> None:
        for new in news:
            self.scores.setdefault(new.request_id, []).extend(new.prompt_logprobs or [])
            self.tokens[new.request_id] += new.token_ids
            if new.finish_reason is not None:
                self.finish[new.request_id] = new.finish_reason.value

    def run(self, max_steps: int = 1000) -> list[SchedulerOutput]:
        """Step until nothing is left."""
        outputs: list[SchedulerOutput] = []
        while self.scheduler.has_work:
            assert len(outputs) < max_steps, "no end in sight"
            output = self.step()
            assert output is not None
            outputs.append(output)
        return outputs


def shape(output: SchedulerOutput | None) -> list[tuple[str, int, int, bool]]:
    """(request id, start, number of tokens, sample) of each row."""
    assert output is not None
    return [(row.request_id, row.start, len(row.token_ids), row.sample) for row in output.scheduled]
