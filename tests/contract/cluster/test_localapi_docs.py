"""docs/localcluster.md lists exactly the cases that no real server has confirmed."""

import ast
import json
import re
from pathlib import Path

FOLDER = Path(__file__).parent
RECORDED = FOLDER / "recorded" / "1.36.2"
DOCS = FOLDER.parents[2] / "docs" / "localcluster.md"


def _cases() -> list[tuple[str, list[str]]]:
    """(case, its decorators) of the contract suite."""
    found = []
    for path in sorted(FOLDER.glob("test_cluster_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef) and node.name.startswith("test_"):
                found.append((node.name, [ast.unparse(decorator) for decorator in node.decorator_list]))
    return found


def test_the_list_of_unverified_cases_is_honest() -> None:
    block = DOCS.read_text().partition("<!-- unverified")[2].partition("<!-- end -->")[0]
    listed = re.findall(r"^- `(\w+)`$", block, re.MULTILINE)
    shown = {case.partition("[")[0] for case in json.loads((RECORDED / "cases" / "cases.json").read_text())}
    assert listed == [
        name for name, marks in _cases() if name not in shown and not any("mark.recorded" in mark for mark in marks)
    ]


def test_every_recorded_step_that_a_case_names_exists() -> None:
    steps = set()
    for path in RECORDED.glob("*.json"):
        steps |= {f"{path.stem}/{name}" for name in re.findall(r'^\s*"name": "(.*)",$', path.read_text(), re.MULTILINE)}
    for name, marks in _cases():
        for mark in marks:
            if "mark.recorded" in mark:
                call = ast.parse(mark, mode="eval").body
                assert isinstance(call, ast.Call)
                named = [ast.literal_eval(argument) for argument in call.args]
                assert set(named) <= steps, (name, set(named) - steps)
