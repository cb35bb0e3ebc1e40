"""Writes docs/flags.md from the server's settings.

python tools/flag_docs.py [--check]
"""

import argparse
import sys
from itertools import groupby
from pathlib import Path

from pagefleet_server.cli import Flag, list_flags

PAGE = Path(__file__).resolve().parents[1] / "docs" / "flags.md"
HEAD = """# Flags of pagefleet-server

Generated from the settings by `tools/flag_docs.py`. Every flag has an environment variable; the flag wins. Sizes take
units (`512MiB`, `2GiB`), durations are in seconds unless the name says otherwise.
"""


def render() -> str:
    """The page."""
    parts = [HEAD]
    for subject, flags in groupby(list_flags(), key=lambda flag: flag.subject):
        parts.append(f"\n## {subject}\n\n| Flag, variable | Default | Meaning |\n| --- | --- | --- |\n")
        parts += [_row(flag) for flag in flags]
    return "".join(parts)


def _row(flag: Flag) -> str:
    meaning = " ".join(flag.help.split()).replace("|", "\\|")
    if flag.choices:
        meaning += f" One of {', '.join(f'`{value}`' for value in flag.choices)}."
    bounds = _bounds(flag)
    default = (
        "required" if flag.required else "" if flag.default in (None, "") or flag.kind is bool else f"`{flag.default}`"
    )
    return f"| `{flag.option}`<br>`{flag.variable}` | {default} | {meaning}{bounds} |\n"


def _bounds(flag: Flag) -> str:
    meta = flag.meta
    if meta is None or flag.kind is str:
        return ""
    low = f"{meta.ge}" if meta.ge is not None else f"more than {meta.gt}" if meta.gt is not None else ""
    high = f"{meta.le}" if meta.le is not None else f"less than {meta.lt}" if meta.lt is not None else ""
    if low and high:
        return f" Bounds: {low} to {high}."
    return f" At least {low}." if low and meta.ge is not None else f" {low.capitalize()}." if low else ""


def main() -> None:
    """Write it, or with --check say whether it is what this script makes (exit code 1 if not)."""
    parser = argparse.ArgumentParser(description="Writes docs/flags.md from the server's settings.")
    parser.add_argument("--check", action="store_true", help="only compare")
    text = render()
    if not parser.parse_args().check:
        PAGE.write_text(text)
    elif not PAGE.exists() or PAGE.read_text() != text:
        sys.exit("docs/flags.md is not what tools/flag_docs.py makes: run it and commit")


if __name__ == "__main__":
    main()
