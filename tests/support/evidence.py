"""Long proofs leave a dated record in docs/evidence/."""

import json
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "evidence"


def write_evidence(name: str, facts: Mapping[str, object]) -> Path:
    """`docs/evidence/DATE-NAME.json`: when, at which commit (`+` with local changes), and the facts."""
    described = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    commit = subprocess.run(described, cwd=ROOT, capture_output=True, text=True, check=False)
    now = datetime.now(UTC)
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{now:%Y-%m-%d}-{name}.json"
    record = {"time": now.isoformat(timespec="seconds"), "commit": commit.stdout.strip(), **facts}
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path
