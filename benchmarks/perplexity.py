"""Perplexity of a model on fixed texts, in several settings side by side: what a way to hold weights costs in quality.

    python -m benchmarks.perplexity                                        SmolLM2's .gguf file, in every setting
    python -m benchmarks.perplexity --model DIR --settings bfloat16 bfloat16:q8_0 [--text FILE ...]

A setting is DTYPE or DTYPE:QUANTIZATION, the flags' values. A text is read from its first token on, all before it in
view; default: this project's licence, and its decision pages one after another.
"""

import argparse
import hashlib
import math
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.serving.machine import facts
from benchmarks.serving.paths import ROOT, quantised_gguf
from pagefleet_server.core.sampling_params import SamplingParams
from pagefleet_server.core.step import ScheduledRequest, SchedulerOutput
from pagefleet_server.models.checkpoint import open_checkpoint
from pagefleet_server.runner.flat_batch import flatten
from pagefleet_server.runner.paged_context import PagedContext
from pagefleet_server.runner.runner import Runner, build_runner
from pagefleet_server.settings import CacheSettings, EngineSettings, ModelSettings, SchedulerSettings
from pagefleet_server.tokenizer import load_tokenizer

CHUNK = 256
"""Tokens of a step: their logits take CHUNK times the vocabulary."""
MAX_TOKENS = 4096
SETTINGS = ("float32", "bfloat16", "float32:gguf", "bfloat16:gguf", "bfloat16:q8_0", "bfloat16:q4_1")


def default_texts() -> dict[str, str]:
    """Name -> text."""
    pages = sorted((ROOT / "docs" / "decisions").glob("0*.md"))
    return {"licence": (ROOT / "LICENSE").read_text(), "decisions": "\n".join(page.read_text() for page in pages)}


def make_runner(model: str, setting: str) -> Runner:
    """On one thread's worth of everything, without warm-up of any kind."""
    dtype, _, quantization = setting.partition(":")
    settings = EngineSettings(
        model=ModelSettings(model=model, device="cpu", dtype=dtype, quantization=quantization or "none"),
        cache=CacheSettings(num_kv_blocks=MAX_TOKENS // CacheSettings().block_size),
        scheduler=SchedulerSettings(max_num_batched_tokens=CHUNK),
    )
    return build_runner(settings, lambda *about, **numbers: None)


def steps(token_ids: list[int], block_size: int) -> Iterator[SchedulerOutput]:
    """The text in chunks."""
    blocks = tuple(range(1, 1 + -(-len(token_ids) // block_size)))
    greedy = SamplingParams(max_tokens=1, temperature=0.0)
    for start in range(0, len(token_ids), CHUNK):
        chunk = tuple(token_ids[start : start + CHUNK])
        yield SchedulerOutput((ScheduledRequest("text", chunk, start, blocks, True, greedy),), 0, len(chunk))


@torch.inference_mode()
def perplexity(runner: Runner, token_ids: list[int]) -> float:
    """exp of the mean negative log-probability of every token but the first."""
    following = torch.tensor([*token_ids[1:], 0])
    total = 0.0
    for step in steps(token_ids, runner.block_size):
        batch = flatten(step, block_size=runner.block_size, device=torch.device("cpu"))
        context = PagedContext(runner.backend, runner.caches, batch.attention)
        logits = runner.model.forward(batch.token_ids, batch.positions, context, torch.arange(step.num_tokens))
        start = step.scheduled[0].start
        wanted = following[start : start + step.num_tokens]
        known = wanted.shape[0] - (1 if start + step.num_tokens == len(token_ids) else 0)
        log_probabilities = torch.log_softmax(logits[:known].double(), dim=-1)
        total -= float(log_probabilities.gather(1, wanted[:known].unsqueeze(1)).sum())
    return math.exp(total / (len(token_ids) - 1))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory or .gguf file; default: SmolLM2")
    parser.add_argument("--settings", nargs="+", default=SETTINGS, metavar="DTYPE[:QUANTIZATION]")
    parser.add_argument("--text", nargs="+", type=Path, metavar="FILE")
    options = parser.parse_args()
    model = options.model or str(quantised_gguf())
    texts = {path.name: path.read_text() for path in options.text} if options.text else default_texts()
    tokenizer = load_tokenizer(Path(model)).tokenizer
    encoded = {name: tokenizer.encode(text, add_special_tokens=False).ids[:MAX_TOKENS] for name, text in texts.items()}
    open_checkpoint(model, need_weights=True)
    print(" · ".join(f"{key} {value}" for key, value in facts().items()))
    heads = [
        f"{name}: {len(ids)} tokens, {hashlib.sha256(str(ids).encode()).hexdigest()[:8]}"
        for name, ids in encoded.items()
    ]
    print("| setting | weights, MiB | " + " | ".join(heads) + " |\n|---|---|" + "---|" * len(heads))
    for setting in options.settings:
        runner = make_runner(model, setting)
        found = " | ".join(f"{perplexity(runner, ids):.3f}" for ids in encoded.values())
        print(f"| {setting} | {runner.model.num_weight_bytes / 2**20:.0f} | {found} |", flush=True)


if __name__ == "__main__":
    main()
