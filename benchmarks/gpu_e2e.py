"""The whole server on a GPU, without a download: is it right, does it fit, how fast is it. One call, under 8 minutes.

    python benchmarks/gpu_e2e.py [--out report.json] [--stages parity decode ...]
    python benchmarks/gpu_e2e.py --device cpu --tiny        (tries the script itself, anywhere)

Stages, each in a process of its own, so that one that breaks the device does not take the others with it:

    environment            versions, device, missing packages
    kernels                every kernel against float64
    parity                 two layers in float32: greedy tokens of both executors against transformers
    decode                 1.2 billion random weights, bf16: KV sized by itself, the largest step, graphs against eager
    paged_against_static   the engine's scheduler over real steps, same KV bytes
    server                 both processes and HTTP, parallel requests

Needs the extra `server` (torch with CUDA, triton, transformers, msgspec, llguidance ...); the package itself need not
be installed. Prints a line a stage and writes all facts as JSON; the exit code is 1 when a stage failed. Without a
CUDA device it says "not measured" and exits 0.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "kernels"), str(ROOT / "server"), str(ROOT)]

import torch  # noqa: E402

from benchmarks.gpu_e2e_setting import Setting, StageFailedError  # noqa: E402
from benchmarks.gpu_e2e_stages import STAGES, quiet_environment  # noqa: E402

BUDGET_SECONDS = 460.0
"""Stages that would start later are skipped; the one that runs then is ended."""
MARK = "RESULT "
"""Before the line of JSON that a stage's process prints."""


def run_here(name: str, setting: Setting) -> dict[str, Any]:
    """One stage in this process."""
    try:
        return {"ok": True, "facts": STAGES[name](setting)}
    except StageFailedError as failure:
        return {"ok": False, "error": str(failure), "facts": failure.facts}
    except Exception as error:  # noqa: BLE001  whatever it is, the report holds it
        return {
            "ok": False,
            "error": f"{type(error).__name__}: {error}"[:2000],
            "trace": traceback.format_exc()[-4000:],
        }


def run_apart(name: str, setting: Setting, timeout: float) -> dict[str, Any]:
    """One stage in a process of its own; its output goes to stderr as it comes. Late, it is ended with all that it
    started: a server that stays would hold the device's memory."""
    command = [sys.executable, __file__, "--one-stage", name, "--device", setting.device]
    command += ["--tiny"] if setting.tiny else []
    began = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=quiet_environment(), start_new_session=True
    )
    try:
        printed, _ = process.communicate(timeout=timeout)
        ending = f"it ended with exit code {process.returncode} and no result"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        printed, _ = process.communicate()
        ending = f"it was ended after {timeout:.0f} s"
    except KeyboardInterrupt:  # which the stage, in a session of its own, does not get
        os.killpg(process.pid, signal.SIGKILL)
        raise
    lines = [line for line in printed.splitlines() if line.startswith(MARK)]
    result: dict[str, Any] = json.loads(lines[-1][len(MARK) :]) if lines else {"ok": False, "error": ending}
    return {**result, "seconds": round(time.monotonic() - began, 1)}


def line_of(name: str, result: dict[str, Any]) -> str:
    """For people."""
    facts = result.get("facts", {})
    shown = [f"{key} {value}" for key, value in facts.items() if not isinstance(value, dict | list) and key != "log"]
    shown += [
        f"{key}: {', '.join(f'{k} {v}' for k, v in value.items())}"
        for key, value in facts.items()
        if isinstance(value, dict)
    ]
    word = "ok" if result["ok"] else "FAILED"
    text = f"{name:22s} {word:7s} {result.get('seconds', 0.0):6.1f} s  " + "; ".join(shown)
    return text if result["ok"] else f"{text}\n    {result.get('error')}"


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of a few thousand weights")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--out", type=Path, help="write the report as JSON")
    parser.add_argument("--one-stage", choices=STAGES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    setting = Setting(options.device, options.tiny)
    if options.one_stage:
        print(MARK + json.dumps(run_here(options.one_stage, setting)), flush=True)
        return
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    report: dict[str, Any] = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip() or "unknown",
        "device": options.device,
        "tiny": options.tiny,
        "stages": {},
    }
    if options.device == "cuda" and not torch.cuda.is_available():
        report["not_measured"] = "no CUDA device"
        print(f"not measured: no CUDA device (stages: {', '.join(options.stages)})")
    else:
        began = time.monotonic()
        for name in options.stages:
            left = BUDGET_SECONDS - (time.monotonic() - began)
            if left < 10:
                report["stages"][name] = {"ok": False, "error": "skipped: no time left"}
            else:
                report["stages"][name] = run_apart(name, setting, left)
            print(line_of(name, report["stages"][name]), flush=True)
            if options.out:  # after each stage: whatever ends this run, what was found is there
                options.out.write_text(json.dumps(report, indent=1), encoding="utf-8")
    if options.out:
        options.out.write_text(json.dumps(report, indent=1), encoding="utf-8")
    sys.exit(0 if all(stage["ok"] for stage in report["stages"].values()) else 1)


if __name__ == "__main__":
    main()
