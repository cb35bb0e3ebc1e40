"""`pagefleet-sim` as a user runs it."""

import json
from pathlib import Path
from unittest.mock import patch

import pytest

import pagefleet_simulator.main as main_module
from pagefleet_simulator.main import main

SHORT = ["--load", "spike:low=0.3,high=2,at=60,seconds=60", "--seconds", "240", "--start-seconds", "30"]


def test_a_run_prints_a_table_and_draws_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = tmp_path / "out.json"
    plot = ["--plot", str(tmp_path / "run"), "--json", str(numbers)]
    assert main(["run", *SHORT, "--policy", "pagefleet", "--policy", "static:replicas=2", *plot]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines if line.startswith("|")][2:] == ["PageFleet", "Static"]
    results = json.loads(numbers.read_text())["results"]
    assert results["Static"]["device_hours"] == pytest.approx(2 * 240 / 3600, abs=1e-3)
    drawn = sorted(path.name for path in tmp_path.iterdir() if path.suffix in (".png", ".svg"))
    assert drawn == ["run-pagefleet.png", "run-pagefleet.svg", "run-static.png", "run-static.svg"]
    assert (tmp_path / "run-static.png").read_bytes().startswith(b"\x89PNG")


def test_profiles_are_listed_with_their_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profiles"]) == 0
    assert "NVIDIA H100" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--policy", "magic"], "none of"),
        (["--policy", "hpa:speed=3"], "speed"),
        (["--policy", "hpa:waiting"], "name=number"),
        (["--profile", "none"], "no profile"),
        (["--min", "5"], "min 5"),
        (["--load", "burstgpt:/nonexistent"], "No such file"),
        (["--rate", "0"], "above 0"),
        (["--rate", "inf"], "at most a year"),
        (["--rate", "1e-300"], "at most a year"),
        (["--seconds", "1e9"], "to a year"),
        (["--policy", "hpa:waiting=0"], "waiting is 0; it must be above 0"),
        (["--policy", "kpa:target_concurrency=nan"], "target_concurrency is nan"),
        (["--policy", "wva2:scale_up_utilisation=none"], "scale_up_utilisation cannot be none"),
        (["--policy", "static:replicas=2.5"], "whole number"),
        (["--policy", "static:replicas=none"], "whole number"),
        (["--policy", "pagefleet:kv_block_occupancy_percent=0"], "1 to 100"),
        (["--policy", "pagefleet:memory=3"], "no setting 'memory'"),
        (["--policy", "pagefleet-learnt"], "only `compare`"),
        (["--policy", "hpa", "--policy", "hpa"], "given twice"),
        (["--plot", "."], "it must be a file"),
        (["--json", "/"], "it must be a file"),
        (["--seconds", "0"], "--seconds 0"),
        (["--seconds", "nan"], "--seconds nan"),
        (["--from", "-1"], "--from -1"),
        (["--from", "1e9"], "no request of"),
        (["--ttft", "-1"], "time_to_first_token_seconds is -1.0; it must be above 0"),
        (["--start-seconds", "inf"], "above 0 and finite"),
        (["--crash-every", "0"], "crash_every_seconds is 0.0; it must be above 0"),
        (["--devices", "0"], "devices is 0; at least 1"),
        (["--json", "/nonexistent/x.json"], "there is no folder /nonexistent"),
        (["--plot", "/nonexistent/x"], "there is no folder /nonexistent"),
    ],
)
def test_what_cannot_be_simulated_is_said(arguments: list[str], what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *SHORT, *arguments]) == 2
    assert what in capsys.readouterr().err


def test_the_last_policy_is_read_before_the_first_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with patch.object(main_module, "simulate", side_effect=AssertionError("minutes of work")):
        assert main(["run", *SHORT, "--policy", "pagefleet", "--policy", "magic"]) == 2
    assert "none of" in capsys.readouterr().err


def test_the_same_policy_with_other_settings_is_another_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both were called the same: the JSON kept only the last one, and so did the plot."""
    numbers, both = tmp_path / "out.json", ["hpa:waiting=1", "hpa:waiting=5"]
    given = [argument for text in both for argument in ("--policy", text)]
    assert main(["run", *SHORT, *given, "--json", str(numbers), "--plot", str(tmp_path / "v1.5")]) == 0
    assert list(json.loads(numbers.read_text())["results"]) == both
    drawn = sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".png")
    assert drawn == ["v1.5-hpa-1.png", "v1.5-hpa-2.png"]
    out = capsys.readouterr().out
    assert all(f"| {text}" in out for text in both)


@pytest.mark.parametrize(("ttft", "tpot"), [("1e-5", "0.1"), ("3", "1e-9")])
def test_an_objective_below_a_millisecond_is_one(ttft: str, tpot: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *SHORT, "--ttft", ttft, "--tpot", tpot]) == 0
    assert "| PageFleet |" in capsys.readouterr().out


def test_an_interruption_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with patch.object(main_module, "simulate", side_effect=KeyboardInterrupt):
        assert main(["run", *SHORT]) == 130
    assert capsys.readouterr().err == "pagefleet-sim: interrupted\n"


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--policies", "magic"], "policy 'magic' is none of"),
        (["--policies", "hpa,hpa"], "policy 'hpa' is given twice"),
        (["--loads", "magic"], "load 'magic' is none of"),
        (["--loads", ""], "load '' is none of"),
        (["--routings", "magic"], "routing 'magic' is none of"),
        (["--start-seconds", "30,nan"], "above 0 and finite"),
        (["--start-seconds", "soon"], "could not convert"),
        (["--scale", "0"], "--scale 0"),
        (["--scale", "nan"], "--scale nan"),
        (["--grid", "/nonexistent"], "No such file"),
        (["--json", "/"], "it must be a file"),
        (["--markdown", "/nonexistent/x.md"], "there is no folder"),
    ],
)
def test_what_cannot_be_compared_is_said_at_once(
    arguments: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with patch.object(main_module, "compare", side_effect=AssertionError("minutes of work")):
        assert main(["compare", *arguments]) == 2
    assert what in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "[]", "5", '{"trials": [{}], "cells": []}'])
@pytest.mark.parametrize("flag", ["--grid", "--keep"])
def test_an_earlier_comparison_that_is_none_is_said_at_once(
    flag: str, content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "old.json").write_text(content)
    with patch.object(main_module, "compare", side_effect=AssertionError("minutes of work")):
        assert main(["compare", flag, str(tmp_path / "old.json")]) == 2
    assert "is no --json of `pagefleet-sim compare`" in capsys.readouterr().err


def test_a_short_comparison_keeps_what_it_did_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The published table in small: two policies, one trace, one start-up time."""
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    common = ["compare", "--scale", "0.1", "--loads", "spike", "--start-seconds", "30", "--workers", "1"]
    assert main([*common, "--policies", "pagefleet,static", "--json", str(first)]) == 0
    text = capsys.readouterr().out
    assert "### spike, 30 s" in text
    assert "| static " in text
    assert any(word in text for word in ("wins", "ties", "trades", "loses"))
    report = tmp_path / "table.md"
    report.write_text("Words before.\n<!-- tables: begin -->stale<!-- tables: end -->\nWords after.\n")
    again = [*common, "--policies", "pagefleet", "--keep", str(first), "--json", str(second), "--markdown", str(report)]
    assert main(again) == 0
    assert json.loads(first.read_text()) == json.loads(second.read_text())
    page = report.read_text()
    assert "**replicas" in page
    assert "stale" not in page
    assert page.startswith("Words before.")
    assert page.endswith("Words after.\n")


def test_a_load_that_comes_again_is_tuned_as_it_was_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its grid is that of the first load, and what is known of it is not run again."""
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    common = ["compare", "--scale", "0.1", "--start-seconds", "30", "--workers", "1", "--policies", "static"]
    assert main([*common, "--loads", "spike", "--json", str(first)]) == 0
    known = json.loads(first.read_text())["trials"]
    for trial in known:
        trial["result"]["attainment_percent"] = 99.0 if trial["settings"]["replicas"] == 5 else 1.0
    first.write_text(json.dumps({"trials": known, "cells": []}))
    assert main([*common, "--loads", "spike-again", "--grid", str(first), "--json", str(second)]) == 0
    assert "### spike-again, 30 s" in capsys.readouterr().out
    found = json.loads(second.read_text())
    assert found["trials"] == known
    assert [cell["settings"] for cell in found["cells"]] == [{"replicas": 5}]
