"""Queue full, clients that leave, engines that die or hang: the server over a real engine process without a model."""

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from support.api_server import cut, memory_command, memory_server, raw_completion, running, write_letter_model

LONG: dict[str, Any] = {"prompt": "ab", "max_tokens": 400, "ignore_eos": True}


async def test_beyond_the_queue_is_503_with_retry_after_and_the_rest_is_served(tmp_path: Path) -> None:
    async with memory_server(tmp_path, "slow-20", "--max-queue", "2", "--max-num-seqs", "2") as talk:
        body = {"prompt": "ab", "max_tokens": 100, "ignore_eos": True}

        async def ask() -> tuple[int, dict[str, str], dict[str, object]]:
            async with talk.session.post("/v1/completions", json=body) as response:
                return response.status, dict(response.headers), await response.json()

        answers = await asyncio.gather(*(ask() for _ in range(9)))
        refused = [answer for answer in answers if answer[0] == 503]
        assert (len(refused), len(answers) - len(refused)) == (5, 4)
        for _, headers, answer in refused:
            assert 1 <= int(headers["Retry-After"]) <= 60
            error = answer["error"]
            assert isinstance(error, dict) and error["code"] == "queue_full" and "at most 2" in error["message"]
        metrics = await talk.until_idle()
        assert metrics['pagefleet_requests_rejected_total{reason="queue_full"}'] == 5
        assert metrics['vllm:request_success_total{finished_reason="length"}'] == 4
        assert (await talk.get("/readyz"))[0] == 200


async def test_the_tokens_that_wait_are_bounded_but_one_request_may_always_wait(tmp_path: Path) -> None:
    flags = ("--max-num-seqs", "1", "--max-queue-tokens", "50", "--num-kv-blocks", "128")
    async with memory_server(tmp_path, "slow-20", *flags) as talk:
        first = asyncio.create_task(talk.post("/v1/completions", **LONG))

        async def runs() -> bool:
            return await talk.gauge("vllm:num_requests_running") == 1

        await talk.until(runs, "it runs")
        long_prompt = {"prompt": [1] * 60, "max_tokens": 1}
        second = asyncio.create_task(talk.post("/v1/completions", **long_prompt))

        async def waits() -> bool:
            return await talk.gauge("pagefleet_prompt_tokens_waiting") == 60

        await talk.until(waits, "60 tokens wait although 50 are the bound")
        async with talk.session.post("/v1/completions", json={"prompt": "a", "n": 1}) as response:
            answer = await response.json()
            assert (response.status, answer["error"]["code"]) == (503, "queue_tokens")
            assert 1 <= int(response.headers["Retry-After"]) <= 60
        first.cancel()
        assert (await second)[0] == 200
        metrics = await talk.until_idle()
        assert metrics["pagefleet_prompt_tokens_waiting"] == 0
        assert metrics['pagefleet_requests_rejected_total{reason="queue_tokens"}'] == 1
        assert metrics['vllm:admission_rejections_total{reason="max_num_queued_tokens"}'] == 1


async def test_waiting_has_an_end_and_running_has_none(tmp_path: Path) -> None:
    """A prompt of many steps has no output for long; it runs all the same."""
    flags = ("--max-num-seqs", "1", "--queue-timeout", "0.4", "--num-kv-blocks", "256")
    async with memory_server(tmp_path, "slow-50", *flags) as talk:
        long_prompt = {"prompt": [1] * 1000, "max_tokens": 1}  # 16 steps of 64 tokens take 0.8 s
        first = asyncio.create_task(talk.post("/v1/completions", **long_prompt))

        async def runs() -> bool:
            return await talk.gauge("vllm:num_requests_running") == 1

        await talk.until(runs, "it runs")
        async with talk.session.post("/v1/completions", json={"prompt": "a"}) as response:
            answer = await response.json()
            assert (response.status, answer["error"]["code"]) == (503, "queue_timeout")
            assert 1 <= int(response.headers["Retry-After"]) <= 60
        status, answer = await first
        assert status == 200, answer
        metrics = await talk.until_idle()
        assert metrics['pagefleet_requests_rejected_total{reason="queue_timeout"}'] == 1


async def test_what_waits_is_counted_from_the_moment_it_is_accepted(tmp_path: Path) -> None:
    async with memory_server(tmp_path, "slow-50", "--max-num-seqs", "1") as talk:
        tasks = [asyncio.create_task(talk.post("/v1/completions", **LONG)) for _ in range(4)]

        async def three_wait() -> dict[str, float] | None:
            metrics = await talk.metrics()
            seen = metrics["vllm:num_requests_running"] + metrics["vllm:num_requests_waiting"]
            return metrics if seen == 4 and metrics["vllm:num_requests_running"] == 1 else None

        metrics = await talk.until(three_wait, "one runs and three wait")
        assert metrics["pagefleet_kv_blocks_waiting"] >= 1
        assert metrics["pagefleet_requests_oldest_waiting_seconds"] > 0
        states = [metrics[f'pagefleet_kv_blocks{{state="{state}"}}'] for state in ("free", "cached", "used")]
        assert sum(states) == metrics["pagefleet_kv_blocks_total"] == 64
        assert metrics["vllm:kv_cache_usage_perc"] == states[2] / 64
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        metrics = await talk.until_idle()
        assert metrics["pagefleet_kv_blocks_waiting"] == 0
        assert metrics["pagefleet_requests_oldest_waiting_seconds"] == 0


async def test_more_outputs_than_can_ever_fit_are_a_fault_of_the_request(tmp_path: Path) -> None:
    async with memory_server(tmp_path, "fine", "--max-queue", "2", "--max-num-seqs", "2") as talk:
        status, answer = await talk.post("/v1/completions", prompt=["a"] * 5)
        assert status == 400
        assert "5 outputs" in answer["error"]["message"] and "at most 4" in answer["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_ends_its_request(tmp_path: Path, stream: bool) -> None:
    """Generation once went on after the client had gone, without a stream above all."""
    async with memory_server(tmp_path, "slow-20") as talk:
        task = asyncio.create_task(talk.stream(**LONG) if stream else talk.post("/v1/completions", **LONG))

        async def runs() -> bool:
            return await talk.gauge("vllm:num_requests_running") == 1

        await talk.until(runs, "it runs")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        metrics = await talk.until_idle()
        assert metrics['vllm:request_success_total{finished_reason="abort"}'] == 1
        assert metrics["vllm:generation_tokens_total"] < 400
        assert '"status": 499' in talk.server.log


async def test_connections_are_closed_while_the_queue_is_not_empty(tmp_path: Path) -> None:
    async with memory_server(tmp_path, "slow-50", "--max-num-seqs", "1") as talk:
        tasks = [asyncio.create_task(talk.post("/v1/completions", **LONG)) for _ in range(3)]

        async def closes() -> bool:
            async with talk.session.get("/v1/models") as response:
                return response.headers.get("Connection") == "close"

        await talk.until(closes, "a response closes its connection")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await talk.until_idle()
        async with talk.session.get("/v1/models") as response:
            assert response.headers.get("Connection") != "close"


async def test_a_stream_that_waits_is_kept_alive_by_comments(tmp_path: Path) -> None:
    flags = ("--max-num-seqs", "1", "--stream-keep-alive", "0.2")
    async with memory_server(tmp_path, "slow-20", *flags) as talk:
        first = asyncio.create_task(talk.stream(**{**LONG, "max_tokens": 60}))

        async def runs() -> bool:
            return await talk.gauge("vllm:num_requests_running") == 1

        await talk.until(runs, "it runs")
        body = {**LONG, "max_tokens": 3, "stream": True}
        async with talk.session.post("/v1/completions", json=body) as response:
            lines = [line async for line in response.content if line.strip()]
        assert lines[0] == b": keep-alive\n"
        assert lines[-1] == b"data: [DONE]\n"
        assert all(line.startswith(b"data: ") or line == b": keep-alive\n" for line in lines)
        assert (await first)[-1] == "[DONE]"


async def test_a_killed_engine_ends_streams_with_an_error_and_the_process_with_the_reason(tmp_path: Path) -> None:
    async with memory_server(tmp_path, "slow-20") as talk:
        events = talk.events(**LONG)
        await anext(events)
        waiting = asyncio.create_task(talk.post("/v1/completions", **LONG))

        async def both_run() -> bool:
            return await talk.gauge("vllm:num_requests_running") == 2

        await talk.until(both_run, "both run")
        psutil.Process(talk.server.engine_pid).send_signal(signal.SIGKILL)
        rest = [event async for event in events]
        assert "signal 9" in rest[-1]["error"]["message"]
        assert rest[-1]["error"]["code"] == "engine_dead"
        status, answer = await waiting
        assert (status, answer["error"]["code"]) == (503, "engine_dead")
        assert await asyncio.to_thread(talk.server.wait_exit) == 1
        assert "the engine died: the engine ended with signal 9" in talk.server.log


async def test_a_failed_step_ends_the_process_with_its_reason(tmp_path: Path) -> None:
    async with memory_server(tmp_path, "fails-at-5") as talk:
        status, answer = await talk.post("/v1/completions", **LONG)
        assert (status, answer["error"]["code"]) == (503, "engine_dead")
        assert await asyncio.to_thread(talk.server.wait_exit) == 1
        assert "the device is lost" in talk.server.log


async def test_a_hanging_engine_fails_liveness_and_nothing_else_hangs(tmp_path: Path) -> None:
    """A frozen engine once passed every health check."""
    async with memory_server(tmp_path, "stalls-at-3", "--stall", "0.5") as talk:
        task = asyncio.create_task(talk.post("/v1/completions", **LONG))

        async def dead() -> bool:
            return (await talk.get("/livez"))[0] == 503

        await talk.until(dead, "liveness fails")
        assert (await talk.get("/readyz"))[0] == 503
        assert (await talk.get("/health"))[0] == 503
        metrics = await talk.metrics()
        assert metrics["pagefleet_engine_last_step_age_seconds"] >= 0.5
        assert metrics["vllm:num_requests_running"] == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_while_the_engine_starts_probes_answer_and_requests_are_told_to_wait(tmp_path: Path) -> None:
    async with memory_server(tmp_path, "never-ready") as talk:
        assert (await talk.get("/livez"))[0] == 200
        assert [(await talk.get(path))[0] for path in ("/readyz", "/startupz", "/health")] == [503, 503, 503]
        async with talk.session.post("/v1/completions", json={"prompt": "a"}) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "5")
        assert (await talk.get("/v1/models"))[0] == 503
        metrics = await talk.metrics()
        assert metrics["vllm:num_requests_waiting"] == metrics["pagefleet_kv_blocks_total"] == 0
        assert metrics['pagefleet_requests_rejected_total{reason="starting"}'] == 2
        talk.server.signal(signal.SIGTERM)
        assert await asyncio.to_thread(talk.server.wait_exit) == 0


async def test_a_reader_that_takes_nothing_is_dropped_and_its_request_ended(tmp_path: Path) -> None:
    flags = ("--write-timeout", "0.3", "--num-kv-blocks", "512", "--max-num-seqs", "1")
    async with memory_server(tmp_path, "fine", *flags) as talk:
        _, writer = await talk.connect()
        writer.write(raw_completion(prompt="ab", max_tokens=3000, ignore_eos=True, stream=True))
        await writer.drain()

        async def dropped() -> bool:
            return "client_too_slow" in talk.server.log

        await talk.until(dropped, "it is dropped")
        metrics = await talk.until_idle()
        assert metrics['vllm:request_success_total{finished_reason="abort"}'] == 1
        await cut(writer)


async def test_a_large_answer_is_sent_as_it_is_read_or_dropped(tmp_path: Path) -> None:
    text = "ab" * 400_000
    async with memory_server(tmp_path, "fine", "--write-timeout", "0.5") as talk:
        status, answer = await talk.post("/tokenize", prompt=text)
        assert status == 200 and answer["count"] == len(answer["tokens"]) == len(text)
        _, writer = await talk.connect()
        data = json.dumps({"prompt": text}).encode()
        head = f"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        await writer.drain()

        async def dropped() -> bool:
            return "client_too_slow" in talk.server.log

        await talk.until(dropped, "it is dropped")
        await cut(writer)
        assert (await talk.post("/tokenize", prompt="ab"))[0] == 200


def test_a_missing_model_ends_the_server_at_once_with_the_reason(tmp_path: Path) -> None:
    command = memory_command("fine", tmp_path / "nothing")
    with running(command, tmp_path / "log") as server:
        assert server.wait_exit() == 3
        assert "no such file or directory" in server.log


@pytest.mark.parametrize(
    ("fault", "want_code", "want_reason"),
    [("missing", 3, "is not there"), ("no-memory", 1, "no room for the KV cache")],
)
def test_an_engine_that_cannot_start_ends_the_server_with_its_reason(
    tmp_path: Path, fault: str, want_code: int, want_reason: str
) -> None:
    command = memory_command(fault, write_letter_model(tmp_path / "model"))
    with running(command, tmp_path / "log") as server:
        assert server.wait_exit() == want_code
        assert want_reason in server.log


async def test_a_taken_port_ends_the_server_with_the_reason(tmp_path: Path) -> None:
    async with memory_server(tmp_path, "never-ready") as talk:
        port = talk.server.base_url.rpartition(":")[2]
        command = memory_command("fine", tmp_path / "model", "--port", port)
        with running(command, tmp_path / "second.log") as second:
            assert await asyncio.to_thread(second.wait_exit) == 1
            assert f"cannot listen on --host 127.0.0.1 --port {port}" in second.log


async def test_nothing_is_left_behind_by_disconnects_at_any_byte(tmp_path: Path) -> None:
    async with memory_server(tmp_path, "slow-5") as talk:
        data = raw_completion(prompt="ab", max_tokens=50, ignore_eos=True, stream=True)
        for length in range(len(data) + 1):
            _, writer = await talk.connect()
            writer.write(data[:length])
            await writer.drain()
            await cut(writer)
        assert (await talk.complete("ab", max_tokens=2, ignore_eos=True))["usage"]["completion_tokens"] == 2
        await talk.until_idle()


async def test_bodies_that_are_being_read_are_bounded_together(tmp_path: Path) -> None:
    """A thousand clients with bodies just below the limit would need gigabytes."""
    async with memory_server(tmp_path, "fine", "--max-body", "16KiB") as talk:
        unfinished = raw_completion(prompt="a" * 16_300)[:-3]
        writers = []
        for _ in range(64):
            _, writer = await talk.connect()
            writer.write(unfinished)
            await writer.drain()
            writers.append(writer)

        async def full() -> bool:
            return (await talk.post("/v1/completions", prompt="a" * 16_300))[0] == 503

        await talk.until(full, "no further large body is read")
        assert (await talk.complete("a", max_tokens=1))["usage"]["completion_tokens"] == 1, "small ones are"
        for writer in writers:
            await cut(writer)

        async def room() -> bool:
            return (await talk.post("/v1/completions", prompt="a" * 16_300))[0] == 400  # too long for the model

        await talk.until(room, "there is room again")


async def test_a_request_body_beyond_the_limit_is_413(tmp_path: Path) -> None:
    async with memory_server(tmp_path, "fine", "--max-body", "2KiB") as talk:
        status, answer = await talk.post("/v1/completions", prompt="a" * 4096)
        assert status == 413 and "2048 bytes" in answer["error"]["message"]
        async with talk.session.post("/v1/completions", data=b"{}", headers={"Content-Type": "text/plain"}) as response:
            assert response.status == 415
        with pytest.raises(aiohttp.ClientResponseError):
            async with talk.session.get("/nothing", raise_for_status=True):
                pass
