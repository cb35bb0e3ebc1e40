"""Client and engine process together, over a runner without a model: streams, waiting, abort, every kind of end."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from pagefleet_server.client.engine_client import DELIVERED_AT_ONCE
from pagefleet_server.client.errors import EngineDeadError, EngineNotReadyError, RequestRefusedError
from pagefleet_server.client.request_stream import RequestStream
from pagefleet_server.engine.exit_code import ExitCode
from pagefleet_server.wire import StepDone
from support.engine_clients import DEADLINE_SECONDS, engine, until
from support.kv_memory_runner import expected_tokens
from support.memory_engine import make_settings
from support.scheduling import make_prompt, make_sampling


def runs(process_id: int) -> bool:
    """False for a zombie too: an orphan stays one where no init reaps it."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def collect(stream: RequestStream) -> tuple[list[int], str | None]:
    tokens: list[int] = []
    reason: str | None = None
    with stream:
        async for output in stream:
            tokens += output.token_ids
            reason = output.finish_reason
    return tokens, reason


async def test_many_requests_at_once_get_the_tokens_that_each_gets_alone() -> None:
    async with engine(make_settings(num_blocks=20)) as client:
        steps: list[StepDone] = []
        client.observe_steps(steps.append)
        prompts = [make_prompt(1 + 7 * index, first=index) for index in range(12)]
        streams = [client.submit(prompt, make_sampling(10)) for prompt in prompts]
        assert client.num_waiting == 12
        got = await asyncio.gather(*(collect(stream) for stream in streams))
        assert got == [(expected_tokens(prompt, 10), "length") for prompt in prompts]
        await until(lambda: steps[-1].step_seconds is None, "the idle engine has spoken")
        assert client.gauges is not None
        assert (client.gauges.blocks_used, client.num_waiting, client.num_open) == (0, 0, 0)
        assert client.gauges.num_preemptions > 0
        assert not client.has_work
        assert all(step.gauges.blocks_total == 20 for step in steps)
    assert not client.on_death.done()


async def test_outputs_of_a_large_step_are_handed_out_over_several_turns_of_the_loop() -> None:
    """512 streams that were woken in one turn held up a probe for all of them."""
    num_streams = 3 * DELIVERED_AT_ONCE
    settings = make_settings(num_blocks=num_streams, max_num_seqs=num_streams, max_num_batched_tokens=num_streams)
    async with engine(settings) as client:
        turn = 0
        seen: list[tuple[float, int]] = []
        client.observe_outputs(lambda output, time: seen.append((time, turn)))

        async def count_turns() -> None:
            nonlocal turn
            while True:
                turn += 1
                await asyncio.sleep(0)

        counter = asyncio.create_task(count_turns())
        streams = [client.submit(make_prompt(1), make_sampling(4)) for _ in range(num_streams)]
        await asyncio.gather(*(collect(stream) for stream in streams))
        counter.cancel()
        together = Counter(time for time, _ in seen)
        assert max(together.values()) > 2 * DELIVERED_AT_ONCE, "some step had many outputs"
        assert max(Counter(seen).values()) <= DELIVERED_AT_ONCE


async def test_outputs_for_a_slow_consumer_are_merged_not_piled_up() -> None:
    async with engine(make_settings()) as client:
        with client.submit(make_prompt(5), make_sampling(20)) as stream:
            await until(lambda: client.num_open == 0, "the request has ended")
            outputs = [output async for output in stream]
        assert [output.token_ids for output in outputs] == [expected_tokens(make_prompt(5), 20)]
        assert outputs[0].first_scheduled_time is not None


async def test_cancelled_iteration_aborts_the_request_and_frees_its_blocks() -> None:
    async with engine(make_settings("slow-2", num_blocks=200)) as client:
        task = asyncio.create_task(collect(client.submit(make_prompt(9), make_sampling(1000))))
        await until(lambda: client.gauges is not None and client.gauges.num_running == 1, "the request runs")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert client.num_open == 0
        await until(lambda: client.gauges is not None and client.gauges.blocks_used == 0, "the blocks are free")


async def test_leaving_the_block_early_aborts_waiting_requests_too() -> None:
    async with engine(make_settings("slow-2", num_blocks=200, max_num_seqs=1)) as client:
        with client.submit(make_prompt(9), make_sampling(1000)), client.submit(make_prompt(9), make_sampling(1000)):
            await until(lambda: client.gauges is not None and client.gauges.num_waiting == 1, "one waits")
        await until(lambda: client.num_waiting == 0 and not client.has_work, "nobody waits")
        assert client.gauges is not None
        assert client.gauges.num_added == 2


async def test_impossible_requests_are_refused_with_the_numbers() -> None:
    async with engine(make_settings(num_blocks=2)) as client:
        for prompt, max_tokens, want in (
            ([], 1, "no tokens"),
            (make_prompt(10), 7, "17 tokens; the limit is 16"),
            ([50], 1, r"token id 50 .*0\.\.49"),
            ([-1], 1, "token id -1"),
            ([1], 0, "max_tokens is 0"),
        ):
            with pytest.raises(RequestRefusedError, match=want):
                client.submit(prompt, make_sampling(max_tokens))
        assert await collect(client.submit(make_prompt(10), make_sampling(6))) == (
            expected_tokens(make_prompt(10), 6),
            "length",
        )


async def test_group_computes_its_prompt_once_and_each_member_has_its_own_stream() -> None:
    async with engine(make_settings()) as client:
        steps: list[StepDone] = []
        client.observe_steps(steps.append)
        streams = client.submit_group(make_prompt(20), [make_sampling(5, seed=seed) for seed in range(3)])
        assert client.num_waiting == 3
        got = await asyncio.gather(*(collect(stream) for stream in streams))
        assert got == [(expected_tokens(make_prompt(20), 5, seed), "length") for seed in range(3)]
        assert sum(step.step_tokens for step in steps) == 20 + 3 * 4
        with pytest.raises(RequestRefusedError, match="9 sequences of one prompt wanted; 1 to 8"):
            client.submit_group([1], [make_sampling()] * 9)


async def test_reset_empties_the_prefix_cache() -> None:
    async with engine(make_settings()) as client:
        cached: list[int] = []
        for reset in (False, False, True):
            if reset:
                client.reset_prefix_cache()
            with client.submit(make_prompt(20), make_sampling(1)) as stream:
                cached += [output.num_cached_tokens async for output in stream]
        assert cached == [0, 16, 0]


async def test_request_before_ready_is_refused() -> None:
    async with engine(make_settings(), ready=False) as client:
        with pytest.raises(EngineNotReadyError):
            client.submit([1], make_sampling())
        await asyncio.wait_for(client.wait_ready(), DEADLINE_SECONDS)
        assert client.starting is not None
        assert client.starting.phase == "load_weights"


async def test_idle_engine_speaks_every_second() -> None:
    async with engine(make_settings()) as client:
        times: list[float] = []
        client.observe_steps(lambda step: times.append(step.time))
        await until(lambda: len(times) >= 3, "three idle reports came")
        assert all(0.9 < later - earlier < 5.0 for earlier, later in pairwise(times[1:]))


async def test_killed_engine_is_noticed_within_a_second_and_every_stream_is_told() -> None:
    async with engine(make_settings("slow-5", num_blocks=200)) as client:
        stream = client.submit(make_prompt(3), make_sampling(1000))
        first = await anext(stream)
        assert first.token_ids
        assert client.process_id is not None
        os.kill(client.process_id, signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(EngineDeadError, match="signal 9"):
            await asyncio.wait_for(collect(stream), DEADLINE_SECONDS)
        death = await client.on_death
        assert time.monotonic() - killed < 1.0
        assert death.return_code == -signal.SIGKILL
        with pytest.raises(EngineDeadError):
            client.submit([1], make_sampling())
        with pytest.raises(EngineDeadError):
            raise client.dead or AssertionError


async def test_failed_step_ends_the_engine_with_the_reason() -> None:
    async with engine(make_settings("fails-at-3")) as client:
        with pytest.raises(EngineDeadError, match="a step failed: RuntimeError: the device is lost"):
            await asyncio.wait_for(collect(client.submit(make_prompt(3), make_sampling(10))), DEADLINE_SECONDS)
        assert (await client.on_death).return_code == ExitCode.STEP_FAILED


@pytest.mark.parametrize(
    ("model", "want", "code"),
    [
        ("missing", "^model 'missing' is not there", ExitCode.BAD_MODEL),
        ("no-memory", "MemoryError: no room", ExitCode.START_FAILED),
    ],
)
async def test_failed_start_gives_reason_and_a_code_of_its_own(model: str, want: str, code: ExitCode) -> None:
    async with engine(make_settings(model), ready=False) as client:
        with pytest.raises(EngineDeadError, match=want):
            await asyncio.wait_for(client.wait_ready(), DEADLINE_SECONDS)
        assert (await client.on_death).return_code == code


async def test_stalled_step_dumps_stacks_and_silence_shows_in_the_age(capfd: pytest.CaptureFixture[str]) -> None:
    async with engine(make_settings("stalls-at-2", stall_dump_seconds=2.0)) as client:
        with client.submit(make_prompt(3), make_sampling(10)):
            dumped = ""

            def seen() -> bool:
                nonlocal dumped
                dumped += capfd.readouterr().err
                return "Timeout" in dumped and "execute" in dumped

            await until(seen, "the stacks are on stderr")
            assert client.has_work
            assert client.last_message_age_seconds > 1.0
        assert client.process_id is not None
        os.kill(client.process_id, signal.SIGKILL)
        await client.on_death


async def test_signals_to_the_group_leave_the_engine_to_its_parent() -> None:
    async with engine(make_settings()) as client:
        assert client.process_id is not None
        os.kill(client.process_id, signal.SIGTERM)
        os.kill(client.process_id, signal.SIGINT)
        assert (await collect(client.submit([3], make_sampling(2))))[1] == "length"
        assert await client.stop() == ExitCode.STOPPED
    assert not client.on_death.done()


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGTERM])
def test_engine_ends_with_its_parent_even_in_a_stalled_step(kill: signal.Signals) -> None:
    code = """
import asyncio, sys
from support.engine_clients import engine
from support.memory_engine import make_settings
from support.scheduling import make_sampling
async def main():
    async with engine(make_settings("stalls-at-1")) as client:
        client.submit([1], make_sampling())
        print(client.process_id, flush=True)
        await asyncio.sleep(1000)
asyncio.run(main())
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert runs(child)
        parent.send_signal(kill)
        parent.wait(DEADLINE_SECONDS)
        deadline = time.monotonic() + 5.0
        while runs(child):
            assert time.monotonic() < deadline, "the engine outlived its parent"
            time.sleep(0.01)
