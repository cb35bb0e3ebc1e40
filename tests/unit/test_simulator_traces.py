"""Readers in the real files' column formats, generators, and loads as written on the command line."""

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest

from pagefleet_simulator.generators import diurnal, generate, on_off, ramp, spike, steady, step
from pagefleet_simulator.profile import ProfileError, load_profile, shipped_profiles
from pagefleet_simulator.replica import prompt_of
from pagefleet_simulator.specs import SpecError, parse_load, parse_settings
from pagefleet_simulator.traces import TraceError, read_azure, read_burstgpt, read_mooncake, read_shipped
from pagefleet_simulator.workload import Arrival

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:48.0000000,0,0
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,GPT-4,1087,230,1317,API log
118,ChatGPT,417,0,417,Conversation log
"""
MOONCAKE = """{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48]}
{"timestamp": 30535, "input_length": 700, "output_length": 26, "hash_ids": [46, 2353]}
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_azure(tmp_path: Path) -> None:
    trace = read_azure(write(tmp_path / "conv.csv", AZURE))
    assert [(round(a.time, 3), a.prompt_tokens, a.output_tokens) for a in trace.arrivals] == [
        (0.0, 374, 44),
        (1.319, 1, 1),
        (4.315, 396, 109),
    ]
    assert trace.seconds == pytest.approx(4.3146, abs=1e-3)


def test_burstgpt_leaves_failed_requests_out(tmp_path: Path) -> None:
    trace = read_burstgpt(write(tmp_path / "burst.csv", BURSTGPT))
    assert [(a.time, a.prompt_tokens, a.output_tokens) for a in trace.arrivals] == [(0.0, 472, 18), (40.0, 1087, 230)]


def test_mooncake_shares_prefixes(tmp_path: Path) -> None:
    trace = read_mooncake(write(tmp_path / "m.jsonl", MOONCAKE))
    first, second = (prompt_of(number, arrival) for number, arrival in enumerate(trace.arrivals))
    assert (len(first), len(second)) == (6955, 700)
    assert first[:512] == second[:512]
    assert first[512:1024] != second[512:1024][: len(first[512:1024])]
    assert trace.arrivals[1].time == pytest.approx(3.053)


@pytest.mark.parametrize(
    ("reader", "text", "where"),
    [
        (read_azure, AZURE.replace("396", "many"), "line 3"),
        (read_azure, AZURE.replace("ContextTokens", "Tokens"), "no column 'ContextTokens'"),
        (read_azure, AZURE.replace("374,44", "374"), "line 2: it has fewer columns"),
        (read_azure, AZURE.replace("374", "-374"), "line 2: -374 tokens"),
        (read_azure, AZURE.replace("374", "9" * 30), "line 2: 9+ tokens"),
        (read_azure, AZURE.replace("374", "9" * 200_000), "field larger than"),
        (read_azure, AZURE.replace("2023-11-16 18:15:46.6805900", "nan"), "line 2"),
        (read_burstgpt, BURSTGPT.replace("Response tokens", "Out"), "no column 'Response tokens'"),
        (read_burstgpt, BURSTGPT.replace("472", "inf"), "line 2: inf tokens"),
        (read_burstgpt, BURSTGPT.replace("\n5,", "\ninf,"), "line 2: the time inf is not finite"),
        (read_mooncake, MOONCAKE.replace('"hash_ids": [46, 2353]', '"ids": 3'), "line 2"),
        (read_mooncake, "{not json\n", "line 1"),
        (read_mooncake, "[" * 100_000, "line 1"),
        (read_mooncake, "5\n", "line 1"),
        (read_mooncake, MOONCAKE.replace("27482", "NaN"), "line 1.*not finite"),
        (read_mooncake, MOONCAKE.replace("6955", "1e999"), "line 1.*inf tokens"),
        (read_mooncake, MOONCAKE.replace("[46, 2353]", f"[{2**70}]"), "line 2.*64 bits"),
        (read_mooncake, " " * 2_000_000, "line 1: it is longer than"),
        (read_azure, "TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests"),
    ],
)
def test_what_cannot_be_read_is_named(reader: object, text: str, where: str, tmp_path: Path) -> None:
    assert callable(reader)
    with pytest.raises(TraceError, match=where):
        reader(write(tmp_path / "trace", text))


@pytest.mark.parametrize("text", [AZURE, BURSTGPT, MOONCAKE], ids=["azure", "burstgpt", "mooncake"])
@pytest.mark.parametrize(
    "encode",
    [
        lambda text: text.replace("\n", "\r\n").encode(),
        lambda text: b"\xef\xbb\xbf" + text.encode(),
        lambda text: text.rstrip("\n").encode(),
        lambda text: gzip.compress(text.encode()),
    ],
    ids=["CRLF", "byte order mark", "no last line end", "gzip"],
)
def test_files_as_other_programs_write_them(text: str, encode: Callable[[str], bytes], tmp_path: Path) -> None:
    reader = {AZURE: read_azure, BURSTGPT: read_burstgpt, MOONCAKE: read_mooncake}[text]
    (tmp_path / "other").write_bytes(encode(text))
    assert reader(tmp_path / "other").arrivals == reader(write(tmp_path / "plain", text)).arrivals


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", gzip.compress(AZURE.encode())[:-12], b"\x1f\x8bnothing"])
def test_what_is_neither_text_nor_gzip_is_said(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "trace").write_bytes(content)
    with pytest.raises(TraceError, match="neither text nor a whole gzip file"):
        read_azure(tmp_path / "trace")


def test_the_shipped_trace_is_the_published_one() -> None:
    trace = read_shipped("azure_llm_2023_conv")
    assert len(trace.arrivals) == 19366
    assert sum(arrival.prompt_tokens for arrival in trace.arrivals) == 22361870
    assert trace.seconds == pytest.approx(3501.7, abs=0.1)


def test_slices_rates_and_cuts() -> None:
    trace = read_shipped("azure_llm_2023_conv").slice(600, 660)
    assert trace.arrivals[0].time < 2
    assert trace.seconds == 60
    assert trace.at_rate(2).seconds == 30
    assert all(a.prompt_tokens + a.output_tokens <= 256 for a in trace.within(256).arrivals)


def test_generators_have_their_rates() -> None:
    assert steady(2)(5) == 2
    assert [ramp(1, 3, 10)(now) for now in (0, 5, 20)] == [1, 2, 3]
    assert [step(1, 3, 10)(now) for now in (9, 10)] == [1, 3]
    assert [spike(1, 3, 10, 5)(now) for now in (9, 10, 14, 15)] == [1, 3, 3, 1]
    assert [round(diurnal(1, 3, 100)(now), 3) for now in (0, 50, 100)] == [1, 3, 1]
    assert [on_off(1, 3, 10, 20)(now) for now in (0, 19, 20, 29, 30)] == [1, 1, 3, 3, 1]
    load = generate("s", steady(5), 1000, seed=1)
    assert len(load.arrivals) == pytest.approx(5000, rel=0.05)
    assert load == generate("s", steady(5), 1000, seed=1)
    assert load != generate("s", steady(5), 1000, seed=2)


def test_loads_on_the_command_line() -> None:
    load = parse_load("on-off:low=1,high=2,on=10,off=10", seconds=100, seed=0)
    assert load.seconds == 100
    assert parse_settings("a=1,b-c=2.5,d=none") == {"a": 1, "b_c": 2.5, "d": None}


@pytest.mark.parametrize(
    "text",
    [
        "tide:low=1",
        "ramp:start=1",
        "steady:rate=0",
        "steady:rate=x",
        "burstgpt",
        "steady:pace=1",
        "diurnal:low=0,high=1,period=0",
        "steady:rate=none",
        "steady:rate=nan",
        "steady:rate=1e300",
        "steady:rate=1,rate=2",
        "spike:low=-1,high=1,at=0,seconds=1",
        "ramp:start=1,end=2,seconds=0",
    ],
)
def test_loads_that_are_none(text: str) -> None:
    with pytest.raises(SpecError):
        parse_load(text, seconds=10, seed=0)


def test_shipped_profiles_name_their_sources() -> None:
    names = shipped_profiles()
    assert {"h100-qwen3-32b", "h200-qwen3-32b"} <= set(names)
    for name in names:
        assert len(load_profile(name).source) > 40


@pytest.mark.parametrize(
    ("text", "what"),
    [("{", "profile"), ('{"name": "x"}', "profile"), ("[]", "profile")],
)
def test_profiles_that_are_none(text: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=what):
        load_profile(str(write(tmp_path / "p.json", text)))
    with pytest.raises(ProfileError, match="no profile"):
        load_profile(str(tmp_path / "absent"))


def test_prompts_are_private_without_a_prefix() -> None:
    assert set(prompt_of(1, Arrival(0, 20, 1))).isdisjoint(prompt_of(2, Arrival(0, 20, 1)))
