"""`pagefleet-sim` as a user runs it."""

import json
from pathlib import Path

import pytest

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
