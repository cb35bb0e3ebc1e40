"""The side-by-side benchmark: its requests, its arithmetic, its client."""

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from aiohttp import web

from benchmarks.serving import __main__ as main
from benchmarks.serving import floors
from benchmarks.serving.client import send_workload
from benchmarks.serving.floors import ONE_BILLION, SMOLLM2, ModelSize, Rates, floor_seconds
from benchmarks.serving.outcome import Answer, Record, Run, Start, percentile, summarise
from benchmarks.serving.paths import Paths
from benchmarks.serving.peers import known_peers
from benchmarks.serving.report import between_marks, markdown, ratios
from benchmarks.serving.servers import Server
from benchmarks.serving.setup import VERSIONS
from benchmarks.serving.workloads import WHAT, Request, Workload, build, one_token_words, shortened
from pagefleet_server.tokenizer import load_tokenizer
from support.smollm2 import smollm2_gguf

LENGTHS = {"A": {64}, "B": {1000}, "C": {830}, "D": {64}}


@pytest.mark.parametrize("name", WHAT)
def test_prompts_have_exactly_the_tokens_they_say(name: str) -> None:
    tokenizer = load_tokenizer(smollm2_gguf()).tokenizer
    words = one_token_words(tokenizer)
    workload = build(name, words, 1)
    for request in workload.requests:
        assert len(tokenizer.encode(request.prompt).ids) == request.num_prompt
    if name in LENGTHS:
        assert {request.num_prompt for request in workload.requests} == LENGTHS[name]
    assert workload == build(name, words, 1)
    assert workload.requests[0] != build(name, words, 2).requests[0]


def test_requests_of_c_share_a_prefix_and_those_of_a_do_not() -> None:
    words = [f"w{index}" for index in range(500)]
    shared, apart = build("C", words, 1).requests, build("A", words, 1).requests
    assert len({request.prompt.split()[:800].__repr__() for request in shared}) == 1
    assert len({request.prompt for request in shared}) == 64
    assert len({request.prompt.split()[0] for request in apart}) > 32


@pytest.mark.parametrize("name", WHAT)
def test_a_quick_run_sends_the_first_part_of_each_workload(name: str) -> None:
    whole = build(name, [f"w{index}" for index in range(500)], 3)
    quick = shortened(whole)
    assert quick.requests == whole.requests[: len(quick.requests)] and quick.concurrency == whole.concurrency
    if whole.requests[-1].at is None:
        assert len(quick.requests) == max(whole.concurrency, len(whole.requests) // 4)
    else:
        ends = [workload.requests[-1].at or 0.0 for workload in (quick, whole)]
        assert 0.0 < ends[0] <= ends[1] / 4 < (whole.requests[len(quick.requests)].at or 0.0)


def test_arrivals_of_e_are_two_a_second() -> None:
    requests = build("E", [f"w{index}" for index in range(500)], 3).requests
    times = [request.at for request in requests]
    assert all(time is not None and 0 < time < 60 for time in times) and times == sorted(times, key=float)  # type: ignore[arg-type]
    assert 80 < len(requests) < 160


def test_rates_and_percentiles() -> None:
    answers = [Answer(0.0, (1.0, 1.5, 2.0), 10, 3), Answer(1.0, (2.0, 3.0, 5.0), 20, 3)]
    run = summarise("A", "x", 0, answers, (0.05, 1.5, 0.1))
    assert run.out_tokens_per_s == pytest.approx(6 / 5)
    assert run.total_tokens_per_s == pytest.approx(36 / 5)
    assert run.ttft_ms[0] == pytest.approx(1000)
    assert run.itl_ms[0] == pytest.approx(750)
    assert run.clean
    assert not replace(run, other_cores=0.2).clean
    assert percentile([], 95) == 0.0 and percentile([4.0], 95) == 4.0


def test_a_failed_request_is_counted_and_makes_the_run_unclean() -> None:
    run = summarise("A", "x", 0, [Answer(0.0, (1.0,), 1, 1), Answer(0.0, (), 0, 0, "HTTP 503")], (0.0, 1.0, 0.0))
    assert run.num_failed == 1 and run.first_error == "HTTP 503" and not run.clean


def run_of(peer: str, index: int, rate: float, others: float = 0.0) -> Run:
    return Run("A", peer, index, rate, rate, 1.0, (1.0, 2.0), (1.0, 2.0), 0, others, 1.5, 0.1)


def test_ratios_pair_clean_runs_of_the_same_round() -> None:
    runs = [run_of("ours", 0, 100), run_of("vllm", 0, 50), run_of("ours", 1, 90), run_of("vllm", 1, 10, others=0.9)]
    assert ratios(runs, "ours", "vllm") == [2.0]
    text = markdown(Record({"commit": "abc"}, runs))
    assert "| vllm | 50 | 2.00 |" in text and "2 (1)" in text


def test_tables_go_between_the_marks_of_a_page() -> None:
    page = "a\n<!-- x -->\nold\n<!-- /x -->\nb\n"
    assert between_marks(page, "x", "new") == "a\n<!-- x -->\n\nnew\n\n<!-- /x -->\nb\n"
    assert between_marks(between_marks(page, "x", "1"), "x", "2") == between_marks(page, "x", "2")
    with pytest.raises(ValueError, match="no <!-- y -->"):
        between_marks(page, "y", "new")


@pytest.mark.parametrize(("num_events", "wanted"), [(3, ""), (2, "2 tokens in 2 events, not 3")])
async def test_the_client_counts_the_servers_tokens(num_events: int, wanted: str) -> None:
    async def complete(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        events: list[dict[str, object]] = [{"choices": [{"text": "x"}]} for _ in range(num_events)]
        events.append({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": num_events}})
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        for start in range(0, len(text), 11):
            await response.write(text[start : start + 11].encode())
            await asyncio.sleep(0)
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        host, port = runner.addresses[0][:2]
        workload = Workload("x", (Request("hi", 7, 3),) * 3, 2)
        answers = await send_workload(f"http://{host}:{port}", workload, lambda request: {"prompt": request.prompt})
    finally:
        await runner.cleanup()
    assert [answer.error for answer in answers] == [wanted] * 3
    assert all(len(answer.token_times) == num_events and answer.num_prompt == 7 for answer in answers)


def test_what_the_machine_allows_follows_from_weights_and_rates() -> None:
    """By hand for a model of 100 layer weights and 10 output weights: 220 bytes a step, 200 flops a prompt token."""
    size, words = ModelSize(100, 10), [f"w{index}" for index in range(500)]
    reading = Rates(bytes_per_s=220.0, flops_per_s=1e12)
    assert floor_seconds(build("D", words, 1), size, reading) == pytest.approx(5 * 128, rel=1e-3)
    assert floor_seconds(build("A", words, 1), size, reading) == pytest.approx(64 * 128 / 16, rel=1e-3)
    computing = Rates(bytes_per_s=1e12, flops_per_s=200.0)
    rows = 64 * 32 * 220 / 200
    assert floor_seconds(build("C", words, 1), size, computing) == pytest.approx(800 + 64 * 30 + rows)
    assert SMOLLM2.num_weights == 134_479_872
    assert ONE_BILLION.num_weights == 1_073_741_824


def test_the_tables_say_how_far_the_machine_is_away() -> None:
    runs = [Run("A", "ours", 0, 60.0, 90.0, 1.0, (1.0, 2.0), (1.0, 2.0), 0, 0.0, 1.0, 0.0)]
    assert "The machine allows 120 in bfloat16; ours reaches 50% of it." in markdown(
        Record({}, runs, floors={"A": 120.0})
    )


def test_the_tables_name_the_version_of_every_peer(tmp_path: Path) -> None:
    peers = {name: make() for name, make in known_peers(Paths(tmp_path)).items()}
    assert {name for name, peer in peers.items() if not peer.version} == {"ours"}
    starts = [Start(name, 1.0, peer.version) for name, peer in peers.items()]
    table = markdown(Record({}, starts=starts))
    assert f"| vllm ({VERSIONS['vllm']}) | 1.0 |" in table and "| ours | 1.0 |" in table


def test_the_tables_say_of_a_server_that_it_had_ended() -> None:
    starts = [Start("here", 1.0, ""), Start("gone", 1.0, "")]
    table = markdown(Record({}, starts=starts, peak_mib={"here": 900.4, "gone": 0.0}))
    assert "| here | 1.0 | 900 |" in table and "| gone | 1.0 | it had ended by itself |" in table


def test_all_peers_are_those_installed_and_the_variants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["serving", "--peers", "all", "--variant", "quant=--quantization gguf"])
    options = main.parse()
    assert main.names_of(options, Paths(tmp_path)) == ["ours", "quant"]
    assert main.make_peer(options, Paths(tmp_path), "quant").command[-2:] == ("--quantization", "gguf")


def test_a_peer_is_asked_for_its_workloads_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["serving", "-w", "D,A,C,B,E", "--rounds", "1", "--quiet-wait", "0"])
    monkeypatch.setattr(floors, "machine_rates", lambda rounds: Rates(1e9, 1e9))
    asked: list[str] = []

    class Asked:
        peer = known_peers(Paths(tmp_path))["transformers"]()

        async def measure(self, workload: Workload, seed: int) -> Run:
            asked.append(workload.name)
            return Run(workload.name, self.peer.name, seed, 1.0, 1.0, 1.0, (1.0, 1.0), (1.0, 1.0), 0, 0.0, 0.0, 0.0)

    asyncio.run(main.measure(main.parse(), Record({"seed": 1}), [cast(Server, Asked())]))
    assert asked == ["warm-up", "D", "A"]
