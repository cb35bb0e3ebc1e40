"""lm-eval scores our server (local-completions) as it scores transformers: same answers, same log-likelihoods."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.api_server import RunningServer
from support.evidence import write_evidence
from support.smollm2 import smollm2_gguf
from support.third_party import SERVED_NAME, call, needs, serving, write_model

pytestmark = pytest.mark.long
TOLERANCE = 2e-3
"""Of a log-likelihood summed over a few tokens in float32, and printed by the API with some digits."""
CAPITALS = {
    "France": "Paris", "Japan": "Tokyo", "Italy": "Rome", "Spain": "Madrid", "Egypt": "Cairo", "Greece": "Athens",
    "Russia": "Moscow", "China": "Beijing", "Germany": "Berlin", "Portugal": "Lisbon", "Austria": "Vienna",
    "Poland": "Warsaw", "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki", "Ireland": "Dublin",
    "Cuba": "Havana", "Peru": "Lima", "Chile": "Santiago", "Kenya": "Nairobi",
}  # fmt: skip
CHOICE_TASK = """
task: capitals_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "The capital of {{{{country}}}} is"
doc_to_choice: choices
doc_to_target: label
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
GENERATE_TASK = """
task: capitals_generate
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "Q: What is the capital of France?\\nA: Paris\\nQ: What is the capital of {{{{country}}}}?\\nA:"
doc_to_target: " {{{{capital}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 12, do_sample: false, temperature: 0.0}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true, ignore_case: true}}]
"""
ROLLING_TASK = """
task: capitals_rolling
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{capital}}}} is the capital of {{{{country}}}}, a country with many cities and 3 rivers."
metric_list: [{{metric: word_perplexity}}]
"""
TASKS = {"capitals_choice": CHOICE_TASK, "capitals_generate": GENERATE_TASK, "capitals_rolling": ROLLING_TASK}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("lm-eval-model"), dtype="float32")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with serving(model, tmp_path_factory.mktemp("lm-eval") / "server.log", "--dtype", "float32") as started:
        yield started


def write_tasks(folder: Path) -> Path:
    """Local tasks of every kind of request that lm-eval makes: log-likelihood, generation, rolling."""
    names = sorted(CAPITALS.values())
    with (folder / "capitals.jsonl").open("w") as file:
        for index, (country, capital) in enumerate(CAPITALS.items()):
            others = [names[(index * 7 + step * 5) % len(names)] for step in range(1, 5)]
            choices = sorted({" " + capital, *(" " + other for other in others)})
            row = {"country": country, "capital": capital, "choices": choices, "label": choices.index(" " + capital)}
            file.write(json.dumps(row) + "\n")
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(text.format(data=folder / "capitals.jsonl"))
    return folder


def evaluate(tasks: Path, output: Path, model_kind: str, model_args: str) -> tuple[dict[str, float], dict[str, Any]]:
    """lm-eval's scores, and its samples by task."""
    lm_eval = needs("clients", "lm_eval").program("clients", "lm_eval")
    command: list[str | Path] = [lm_eval, "--model", model_kind, "--model_args", model_args, "--tasks", ",".join(TASKS)]
    flags: list[str | Path] = [
        "--include_path",
        tasks,
        "--output_path",
        output,
        "--log_samples",
        "--batch_size",
        "1",
        "--device",
        "cpu",
    ]
    call([*command, *flags], timeout=1500)
    (results,) = output.rglob("results_*.json")
    scores = {
        f"{task} {metric.split(',')[0]}": float(value)
        for task, metrics in json.loads(results.read_text())["results"].items()
        for metric, value in metrics.items()
        if isinstance(value, float) and "stderr" not in metric
    }
    samples = {
        task: [json.loads(line) for line in next(output.rglob(f"samples_{task}_*.jsonl")).read_text().splitlines()]
        for task in TASKS
    }
    return scores, samples


def test_scores_equal_those_of_transformers(server: RunningServer, model: Path, tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path)
    theirs, their_samples = evaluate(tasks, tmp_path / "hf", "hf", f"pretrained={model},dtype=float32")
    url = f"{server.base_url}/v1/completions"
    arguments = f"model={SERVED_NAME},base_url={url},tokenizer={model},num_concurrent=8,max_retries=1,max_length=2048"
    ours, our_samples = evaluate(tasks, tmp_path / "ours", "local-completions", arguments)
    worst = 0.0
    for task in TASKS:
        assert len(our_samples[task]) == len(their_samples[task]) == len(CAPITALS)
        for mine, other in zip(by_document(our_samples[task]), by_document(their_samples[task]), strict=True):
            if task == "capitals_generate":
                assert mine["resps"] == other["resps"], mine["doc"]
            else:
                pairs = zip(numbers(mine["resps"]), numbers(other["resps"]), strict=True)
                worst = max(worst, *(abs(a - b) for a, b in pairs))
    assert worst < TOLERANCE, worst
    for name, value in theirs.items():
        assert ours[name] == pytest.approx(value, rel=1e-4), name
    assert theirs["capitals_choice acc"] > 0.5, "the model knows capitals: the task says something"
    write_evidence("client_lm_eval", {"ours": ours, "transformers": theirs, "largest_difference": worst})


QUANTISED = {
    "bfloat16": ("--dtype", "bfloat16"),
    "gguf": ("--quantization", "gguf"),
    "q8_0": ("--quantization", "q8_0"),
    "q4_1": ("--quantization", "q4_1"),
}


def test_quantised_weights_are_scored_beside_bfloat16(model: Path, tmp_path: Path) -> None:
    """The gguf's own scales are those that bfloat16's weights were read from; q8_0 and q4_1 round those again."""
    tasks, scores = write_tasks(tmp_path), dict[str, dict[str, float]]()
    for name, flags in QUANTISED.items():
        served = smollm2_gguf() if name == "gguf" else model
        with serving(served, tmp_path / f"{name}.log", *flags) as server:
            url = f"{server.base_url}/v1/completions"
            client = f"base_url={url},tokenizer={model},num_concurrent=8,max_retries=1,max_length=2048"
            arguments = f"model={SERVED_NAME},{client}"
            scores[name], _ = evaluate(tasks, tmp_path / name, "local-completions", arguments)
    write_evidence("client_lm_eval_quantised", scores)
    perplexity = {name: found["capitals_rolling word_perplexity"] for name, found in scores.items()}
    assert perplexity["q8_0"] == pytest.approx(perplexity["bfloat16"], rel=0.05)
    assert perplexity["gguf"] == pytest.approx(perplexity["bfloat16"], rel=0.05)
    assert perplexity["q4_1"] < 2 * perplexity["bfloat16"]
    choices = {name: found["capitals_choice acc"] for name, found in scores.items()}
    assert min(choices.values()) > 0.5, choices


def by_document(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(samples, key=lambda sample: sample["doc_id"])


def numbers(value: Any) -> list[float]:
    """All numbers of nested lists; lm-eval writes them as text, beside whether the choice is the greedy one."""
    if isinstance(value, list):
        return [number for item in value for number in numbers(item)]
    try:
        return [float(value)]
    except (TypeError, ValueError):
        return []
