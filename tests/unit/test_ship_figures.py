"""Figures on the pages: each stands in a record or in the table that a record gave."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.serving.__main__ import read_files
from benchmarks.serving.report import between_marks, markdown

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PERFORMANCE = DOCS / "performance.md"
PEERS = ("vllm", "llama-bf16")


def cells_of(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|\n").split("|")]


def rows_of(text: str) -> list[list[str]]:
    return [cells_of(row) for row in re.findall(r"^\|.*$", text, re.M)]


def first_number(text: str) -> str:
    (found,) = re.findall(r"^[\d.]+", text)
    return str(found)


def recorded(page: Path, name: str) -> Path:
    """The record that a page links to."""
    (link,) = set(re.findall(rf"\((?:docs/)?(evidence/[\d-]+{name}\.json)\)", page.read_text()))
    return DOCS / str(link)


def measured() -> dict[tuple[str, str], float]:
    """(workload or "start", server) -> ours / theirs, or seconds, of the tables side by side."""
    found: dict[tuple[str, str], float] = {}
    workload = ""
    for cells in rows_of(PERFORMANCE.read_text().partition("<!-- /measured -->")[0].partition("<!-- measured -->")[2]):
        if cells[0] == "server":
            workload = "start"
        elif re.fullmatch("[A-E]", cells[0]):
            workload = cells[0]
        elif workload == "start" and re.match(r"\d", cells[1]):
            found[workload, cells[0].partition(" ")[0]] = float(cells[1])
        elif len(cells) == 7 and re.match(r"[\d.]+", cells[2]):
            found[workload, cells[0]] = float(first_number(cells[2]))
    return found


def rounds_to(said: str, value: float) -> bool:
    """Whether a figure is that value with as many digits as it has."""
    return float(said) == pytest.approx(value, abs=0.51 * 10 ** -len(said.partition(".")[2]))


def test_the_tables_side_by_side_are_those_of_the_record() -> None:
    tables = markdown(read_files([recorded(PERFORMANCE, "serving_peers")]))
    assert between_marks(PERFORMANCE.read_text(), "measured", tables) == PERFORMANCE.read_text()


def test_the_ratios_of_a_billion_weights_are_those_of_the_record() -> None:
    rows = rows_of(markdown(read_files([recorded(PERFORMANCE, "serving_1b")])))
    want = [cells[2] for cells in rows if cells[0] == "vllm" and len(cells) == 7]
    table = PERFORMANCE.read_text().partition("| | ours | vLLM | ours / vLLM |")[2].partition("\n\n")[0]
    assert [cells[3] for cells in rows_of(table) if cells[0][:2] in ("A,", "D,") and cells[3]] == want


def test_the_goals_name_the_ratios_that_were_measured() -> None:
    goals = PERFORMANCE.read_text().partition("### Goals")[2].partition("\n### ")[0]
    names = {
        "vLLM": "vllm",
        "llama.cpp": "llama-bf16",
        "llama.cpp in bfloat16": "llama-bf16",
        "OpenVINO": "openvino-q4",
    }
    checked = 0
    for cells in rows_of(goals):
        for said, name in re.findall(
            r"([\d.]+) times (llama\.cpp in bfloat16|llama\.cpp(?! on)|vLLM|OpenVINO)", cells[2]
        ):
            if cells[0] in "ABCD":
                assert rounds_to(said, measured()[cells[0], names[name]]), f"{cells[0]}: {said} times {name}"
                checked += 1
    assert checked >= 5, "the search finds none"


def test_the_readme_has_the_ratios_that_were_measured() -> None:
    table = README.read_text().partition("## How fast")[2].partition("\n## ")[0]
    begins = {"16 streams": "A", "one stream": "D", "a shared prompt": "C", "prompts of": "B"}
    rows = {
        letter: cells[1:] for cells in rows_of(table) for begin, letter in begins.items() if cells[0].startswith(begin)
    }
    assert rows.keys() == set("ABCD")
    for letter, cells in rows.items():
        for peer, cell in zip(PEERS, cells, strict=True):
            assert rounds_to(first_number(cell), measured()[letter, peer]), f"{letter}, {peer}"


def test_the_first_table_of_the_readme_has_the_ratios_that_were_measured() -> None:
    (row,) = [line for line in README.read_text().splitlines() if line.startswith("| vLLM, llama.cpp as the server")]
    found = re.search(r"([\d.]+) and ([\d.]+) times the tokens/s with 16 streams, ([\d.]+) and ([\d.]+) times", row)
    assert found is not None
    for said, key in zip(found.groups(), [(letter, peer) for letter in "AD" for peer in PEERS], strict=True):
        assert rounds_to(said, measured()[key]), f"{key}: {said}"
    seconds = re.search(r"([\d.]+) s against ([\d.]+) s and ([\d.]+) s", row)
    assert seconds is not None
    for said, server in zip(seconds.groups(), ("ours", *PEERS), strict=True):
        assert rounds_to(said, measured()["start", server]), f"{server}: {said} s"


@pytest.mark.parametrize("page", [README, DOCS / "comparison.md"], ids=lambda page: page.name)
def test_the_streams_of_the_scale_ins_are_those_of_the_record(page: Path) -> None:
    facts = json.loads(recorded(page, "autoscaling_scale_ins").read_text())
    assert facts["scale_ins"] == 100 and facts["streams"]["broken"] == 0
    (said,) = re.findall(r"broke none of ([\d,]+)", page.read_text())
    assert int(said.replace(",", "")) == facts["streams"]["opened"] == facts["streams"]["finished"]


def test_what_the_readme_says_of_simulated_autoscalers_stands_in_a_table_of_theirs() -> None:
    (said,) = [row for row in README.read_text().splitlines() if "autoscaling-comparison.md" in row]
    pairs = re.findall(r"(\d+\.\d) %[^%]*? for (\d+\.\d)", said)
    rows = rows_of((DOCS / "autoscaling-comparison.md").read_text())
    results = {(cells[1].removesuffix(" %"), cells[3]) for cells in rows if len(cells) == 7}
    assert len(pairs) >= 2
    assert set(pairs) <= results
