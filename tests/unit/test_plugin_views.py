"""kubectl pagefleet: what it makes of a status, whole, young or damaged."""

import dataclasses
import io
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from pagefleet_operator import fleet_metrics
from pagefleet_operator.conditions import OBJECTIVE_MESSAGES
from pagefleet_plugin import top
from pagefleet_plugin.bench import Outcome, summarise
from pagefleet_plugin.deployment import Deployment
from pagefleet_plugin.explain import RULES, explain
from pagefleet_plugin.kubectl import own_words
from pagefleet_plugin.main import parse_arguments

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


def body(**status: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "chat", "namespace": "team"},
        "spec": {"replicas": 3, "autoscaling": {"minReplicas": 1, "maxReplicas": 8}},
        "status": {
            "phase": "Scaling",
            "replicas": 3,
            "readyReplicas": 2,
            "kvBlocks": {"used": 60, "cached": 20, "total": 100, "waiting": 12},
            "requests": {"running": 9, "waiting": 4},
            "slo": {"timeToFirstTokenMilliseconds": 730, "attainment": "97%"},
            "pods": [
                {"name": "chat-a", "state": "Ready", "occupancy": "95%", "waiting": 4},
                {"name": "chat-b", "state": "Starting"},
            ],
            "autoscaling": {
                "desiredReplicas": 3,
                "decisions": [
                    {"time": "2026-03-01T11:00:00Z", "from": 1, "to": 2, "reason": "Queue", "inputs": "5 wait."},
                    {
                        "time": "2026-03-01T11:59:30Z",
                        "from": 2,
                        "to": 3,
                        "reason": "KVBlocks, limited by TooManyReplicas",
                        "inputs": "demand 212 blocks",
                    },
                ],
            },
            "conditions": [
                {"type": "AbleToScale", "status": "True", "reason": "ScaleDownStabilized", "message": "waits 200 s"},
                {"type": "ScalingActive", "status": "True", "reason": "ValidMetricFound", "message": "fine"},
                {"type": "SLOMet", "status": "False", "reason": "ObjectiveMissed", "message": "more are asked for"},
                {"type": "Degraded", "status": "True", "reason": "CrashLoop", "message": "chat-c: exit 3"},
            ],
        }
        | status,
    }


def printed(*deployments: Deployment) -> str:
    out = io.StringIO()
    Console(file=out, width=200, color_system=None).print(top.table(deployments))
    return out.getvalue()


def test_the_table_shows_the_fleet_and_each_pod() -> None:
    head, first, pod, young = printed(Deployment.read(body())).splitlines()
    assert head.split() == [
        *("NAME", "READY", "BLOCKS", "KV%", "USED", "WAITING", "RUNNING", "QUEUE", "TTFT", "ITL", "SLO", "PHASE")
    ]
    assert first.split() == [
        *("team/chat", "2/3", "█" * 12 + "▒" * 4 + "·" * 4, "60%", "60/100", "12", "9", "4"),
        *("730", "ms", "-", "97%", "Scaling"),
    ]
    assert pod.split() == ["chat-a", "█" * 19 + "·", "95%", "4", "Ready"]
    assert young.split() == ["chat-b", "-", "-", "-", "Starting"]


def test_the_fullest_comes_first() -> None:
    full = body(kvBlocks={"used": 99, "total": 100})
    full["metadata"]["name"] = "full"
    text = printed(Deployment.read(body()), Deployment.read(full))
    assert text.index("team/full") < text.index("team/chat")


def test_a_dry_run_shows_what_it_would_do() -> None:
    made = body(autoscaling={"desiredReplicas": 5})
    made["spec"]["autoscaling"]["mode"] = "DryRun"
    assert "2/3→5" in printed(Deployment.read(made))


@given(used=st.floats(-1, 2), cached=st.floats(-1, 2), cells=st.integers(1, 60))
def test_a_bar_always_fills_its_cells(used: float, cached: float, cells: int) -> None:
    assert len(top.bar(used, cached, cells=cells)) == cells


def test_explaining_gives_the_number_the_cause_the_brake_and_the_trouble() -> None:
    lines = explain(Deployment.read(body()), now=NOW)
    assert lines == [
        "team/chat wants 3 replicas; 2 ready. The autoscaler may choose 1 to 8.",
        "Now: 60 of 100 blocks in use (60%), 12 more needed by 4 waiting requests, 9 running.",
        "Last change, 30 s ago: 2 → 3, because of the KV-cache blocks in use, and those that the queue will need"
        " (limited by TooManyReplicas). demand 212 blocks",
        "Before that, 1 h ago: 1 → 2, because of the requests that run and wait. 5 wait.",
        "AbleToScale is True, ScaleDownStabilized: waits 200 s",
        "Objective: ObjectiveMissed. more are asked for",
        "Trouble: CrashLoop: chat-c: exit 3",
    ]


def test_explaining_one_without_autoscaling_says_who_scales_it() -> None:
    made = body(autoscaling={}, conditions=[])
    del made["spec"]["autoscaling"]
    assert "an HPA or KEDA" in explain(Deployment.read(made), now=NOW)[0]


def test_the_objectives_reasons_are_the_operators() -> None:
    """A missed objective must never be taken for a quiet one."""
    for reason in OBJECTIVE_MESSAGES:
        made = body(conditions=[{"type": "SLOMet", "status": "False", "reason": reason, "message": "m"}])
        assert f"Objective: {reason}. m" in explain(Deployment.read(made), now=NOW)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
SHAPES = [field.name for field in dataclasses.fields(Deployment)]
KEYS = st.sampled_from(
    ["kvBlocks", "requests", "slo", "pods", "autoscaling", "conditions", "rollout", "phase", "model"]
)


@settings(max_examples=30, deadline=None)
@given(
    damage=st.dictionaries(KEYS, JSON | st.lists(st.dictionaries(st.text(max_size=9), JSON, max_size=3), max_size=3))
)
def test_any_status_can_be_read_shown_and_explained(damage: dict[str, Any]) -> None:
    found = Deployment.read(body(**damage))
    assert found.name in printed(found)
    assert explain(found, now=NOW)
    assert set(SHAPES) - {"decisions", "conditions"} <= set(top.document([found])[0])


@settings(max_examples=30, deadline=None)
@given(text=st.text(alphabet=st.characters(max_codepoint=0xA0), max_size=20))
def test_no_text_of_a_cluster_steers_the_terminal(text: str) -> None:
    """Messages come from whoever may write the object: escape sequences and rich's own markup are only text."""
    status = body(
        phase=text,
        slo={"attainment": text},
        pods=[{"name": text, "state": text}],
        conditions=[{"type": "Degraded", "status": "True", "reason": text, "message": text}],
        rollout={"message": text},
    )
    found = Deployment.read(status | {"metadata": {"name": text, "namespace": "[red]" + text}})
    shown = "\n".join(explain(found, now=NOW)) + printed(found)
    assert not {char for char in shown if ord(char) < 32 or 0x7F <= ord(char) < 0xA0} - {"\n", "\t"}
    assert "[red]" in printed(found)


@pytest.mark.parametrize("missing", ["metadata", "spec", "status"])
def test_an_object_without_a_part_is_read(missing: str) -> None:
    made = body()
    del made[missing]
    assert explain(Deployment.read(made), now=NOW)


def test_the_figures_of_a_load_test() -> None:
    outcomes = [
        Outcome(0.1, (0.01, 0.03), 3),
        Outcome(0.3, (0.02, 0.02), 3),
        Outcome(None, (), 0, "the server answered 503: full"),
        Outcome(None, (), 0, "the server answered 503: full"),
    ]
    found = summarise(outcomes, 2.0)
    assert (found.requests, found.failed, found.tokens_per_second) == (4, 2, 3.0)
    assert found.first_token_ms["p50"] == 200.0
    assert found.inter_token_ms["p50"] == 20.0
    assert found.errors == ("the server answered 503: full",)


def test_a_load_test_in_which_everything_failed_has_no_latencies() -> None:
    found = summarise([Outcome(None, (), 0, "gone")], 1.0)
    assert (found.first_token_ms, found.inter_token_ms, found.tokens_per_second) == ({}, {}, 0.0)


@pytest.mark.parametrize(
    "argv",
    [
        ["chat", "smollm2", "why?"],
        ["chat", "smollm2", "--temperature", "0", "why?"],
        ["chat", "smollm2", "why?", "--temperature", "0"],
        ["chat", "--temperature", "0", "smollm2", "why?"],
        ["chat", "-n", "team", "smollm2", "--temperature", "0", "--max-tokens", "9", "why?"],
    ],
)
def test_a_question_may_stand_before_or_after_the_options(argv: list[str]) -> None:
    """It was refused as an unknown argument behind an option."""
    found = parse_arguments(argv)
    assert (found.name, found.question) == ("smollm2", "why?")


@pytest.mark.parametrize(
    "argv",
    [
        ["top", "--interval", "0"],
        ["top", "--interval", "nan"],
        ["bench", "chat", "--requests", "0"],
        ["bench", "chat", "--concurrency", "-1"],
        ["bench", "chat", "--max-tokens", "many"],
        ["explain"],
        ["chat", "smollm2", "why", "not"],
        ["chat", "smollm2", "--temperature", "0", "why", "not"],
        ["chat", "smollm2", "--loud"],
        ["explain", "smollm2", "why?"],
        ["explain", "../smollm2"],
        ["bench", "chat", "--requests", "²"],
        ["chat", "smollm2", "--url", "localhost:8000"],
        ["chat", "smollm2", "--temperature", "nan"],
        ["chat", "smollm2", "--temperature", "3"],
        ["chat", "smollm2", " "],
        [],
    ],
)
def test_arguments_that_mean_nothing_are_refused(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_arguments(argv)
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("stderr", "want"),
    [
        ('E1130 13:23:15.9 1 memcache.go:381] "err"\nThe connection was refused\n', "The connection was refused"),
        ("error: the server is away\n", "the server is away"),
        ("Error from server (NotFound): no such thing", "Error from server (NotFound): no such thing"),
        ("", ""),
    ],
)
def test_of_what_kubectl_prints_its_own_words_are_shown(stderr: str, want: str) -> None:
    assert own_words(stderr) == want


def test_every_rule_of_the_autoscaler_has_its_sentence() -> None:
    assert set(fleet_metrics.RULES) <= set(RULES)
