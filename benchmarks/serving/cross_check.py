"""Workload A once more by somebody else's client, `vllm bench serve`, to keep our client honest."""

import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.serving.paths import Paths
from benchmarks.serving.peers import SERVED_NAME


def available(paths: Paths) -> bool:
    """Whether vLLM, which brings the client, is installed."""
    return paths.program("vllm", "vllm").exists()


def cross_check(paths: Paths, name: str, url: str) -> str:
    """One line: what that client measured (64 random prompts of 64 tokens, 128 out, 16 at a time)."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command: Sequence[str | Path] = [
            *(paths.program("vllm", "vllm"), "bench", "serve", "--backend", "openai", "--base-url", url),
            *(
                "--model",
                SERVED_NAME,
                "--tokenizer",
                paths.model,
                "--dataset-name",
                "random",
                "--random-input-len",
                "64",
            ),
            *("--random-output-len", "128", "--num-prompts", "64", "--max-concurrency", "16", "--ignore-eos"),
            *("--save-result", "--result-filename", result),
        ]
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, timeout=900)
        if not result.exists():
            return f"{name}: vllm bench serve failed: {done.stderr[-300:]}"
        found = json.loads(result.read_text())
    return (
        f"{name}: {found['output_throughput']:.0f} out tok/s, TTFT p50 {found['median_ttft_ms']:.0f} ms, "
        f"ITL p50 {found['median_itl_ms']:.1f} ms, {found['completed']} of {found['num_prompts']} requests completed"
    )
