"""Writes docs/decisions/index.md: every decision by number and title.

python tools/decision_index.py [--check]
"""

import argparse
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "decisions"
HEAD = "# Decisions\n\nWhat was decided and why, in order. Written by `tools/decision_index.py`.\n\n"


def render() -> str:
    """The page."""
    lines = []
    for path in sorted(FOLDER.glob("[0-9]*.md")):
        title = path.read_text().splitlines()[0].lstrip("# ").lstrip("0123456789").lstrip(".: ")
        lines.append(f"- [{path.name[:4]}]({path.name}) {title}\n")
    return HEAD + "".join(lines)


def main() -> None:
    """Write it, or with --check say whether it is what this script makes (exit code 1 if not)."""
    parser = argparse.ArgumentParser(description="Writes the index of the decisions.")
    parser.add_argument("--check", action="store_true", help="only compare")
    page = FOLDER / "index.md"
    if not parser.parse_args().check:
        page.write_text(render())
    elif not page.exists() or page.read_text() != render():
        sys.exit("docs/decisions/index.md is not current: run tools/decision_index.py and commit")


if __name__ == "__main__":
    main()
