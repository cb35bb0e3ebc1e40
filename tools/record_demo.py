"""Runs the demo and draws what it printed: docs/pictures/demo.svg moves, docs/pictures/plugin.svg stands.

    python tools/record_demo.py [--output docs/pictures]

The moving picture is the demo's own lines at ten times the speed; pauses are cut to a second. The other is what
`kubectl pagefleet top` and `explain` print while the demo's load runs. Ends with the demo's exit code.
"""

import argparse
import html
import io
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
LINE = re.compile(r"^\[\s*(\d+\.\d)s\] (.*)$")
SPEED, LONGEST_PAUSE_SECONDS, HOLD_SECONDS = 10.0, 1.0, 6.0
COLUMNS, ROWS, CHAR_WIDTH, LINE_HEIGHT = 118, 26, 7.25, 17
LOADED = "the load goes on"
"""The demo's line at which the fleet is at its largest and busy."""


@dataclass(frozen=True, slots=True)
class Shown:
    """One line of the demo."""

    seconds: float
    text: str


def run_demo(pictures: Path) -> tuple[int, list[Shown]]:
    """The demo's exit code and lines; takes the plugin's picture on the way."""
    lines: list[Shown] = []
    command = [sys.executable, "-u", "-m", "demo"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if found := LINE.match(line):
                lines.append(Shown(float(found[1]), found[2]))
            if LOADED in line:
                draw_plugin(pictures)
    return process.returncode, lines


def draw_plugin(pictures: Path) -> None:
    """What the plugin prints now, on the demo's cluster."""
    newest = max((ROOT / ".demo").glob("*/kubeconfig"), key=lambda path: path.stat().st_mtime)
    environment = os.environ | {"KUBECONFIG": str(newest), "PATH": f"{BIN}:{os.environ['PATH']}", "FORCE_COLOR": "1"}
    console = Console(record=True, width=132, file=io.StringIO())
    for arguments in (["top", "--once"], ["explain", "smollm2"]):
        command = [str(BIN / "kubectl"), "pagefleet", *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
        console.print(f"$ kubectl pagefleet {' '.join(arguments)}", style="bold", highlight=False)
        console.print(Text.from_ansi(done.stdout or done.stderr))
    console.save_svg(str(pictures / "plugin.svg"), title="kubectl pagefleet")


def draw(lines: Sequence[Shown]) -> str:
    """An SVG in which the lines come one after another, the last ones stay in view, and it begins again."""
    moments = _moments(lines)
    total = moments[-1] + HOLD_SECONDS
    width, height = round(COLUMNS * CHAR_WIDTH) + 24, ROWS * LINE_HEIGHT + 24
    rows, rules = [], []
    for index, (line, moment) in enumerate(zip(lines, moments, strict=True)):
        text = html.escape(f"[{line.seconds:5.1f}s] {line.text}"[:COLUMNS])
        rows.append(f'<text class="l l{index}" x="12" y="{(index + 1) * LINE_HEIGHT}">{text}</text>')
        share = 100 * moment / total
        rules.append(f"@keyframes k{index}{{0%,{share:.2f}%{{opacity:0}}{share + 0.01:.2f}%,100%{{opacity:1}}}}")
        rules.append(f".l{index}{{animation:k{index} {total:.1f}s infinite}}")
    rules.append(_scrolling(moments, total))
    style = "text{font:12px ui-monospace,Menlo,Consolas,monospace;fill:#d6deeb;white-space:pre}.l{opacity:0}" + "".join(
        rules
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f"<title>make demo</title><style>{style}</style>"
        f'<rect width="100%" height="100%" rx="8" fill="#0b1220"/>'
        f'<svg x="0" y="8" width="{width}" height="{ROWS * LINE_HEIGHT}"><g class="s">{"".join(rows)}</g></svg></svg>\n'
    )


def _moments(lines: Sequence[Shown]) -> list[float]:
    """When each line comes, in the picture's seconds."""
    moments, before, now = [], lines[0].seconds, 0.0
    for line in lines:
        now += min((line.seconds - before) / SPEED, LONGEST_PAUSE_SECONDS)
        before = line.seconds
        moments.append(now)
    return moments


def _scrolling(moments: Sequence[float], total: float) -> str:
    """Moves all rows up by one for each line that would be below the frame."""
    stops = ["0%{transform:translateY(0)}"]
    for index, moment in enumerate(moments):
        over = max(0, index + 1 - ROWS + 1) * LINE_HEIGHT
        if over:
            stops.append(f"{100 * moment / total:.2f}%{{transform:translateY(-{over}px)}}")
    last = max(0, len(moments) - ROWS + 1) * LINE_HEIGHT
    stops.append(f"100%{{transform:translateY(-{last}px)}}")
    return f"@keyframes scroll{{{''.join(stops)}}}.s{{animation:scroll {total:.1f}s step-end infinite}}"


def main() -> int:
    """Record both."""
    parser = argparse.ArgumentParser(description="Runs the demo and draws what it printed.")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "pictures")
    pictures = parser.parse_args().output
    pictures.mkdir(parents=True, exist_ok=True)
    code, lines = run_demo(pictures)
    if code == 0:
        (pictures / "demo.svg").write_text(draw(lines))
    return code


if __name__ == "__main__":
    sys.exit(main())
