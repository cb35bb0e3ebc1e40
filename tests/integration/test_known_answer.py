"""The real model answers a real question, in the types that it is served in."""

import random
from typing import Any

import jinja2
import pytest
import torch

from pagefleet_server.runner.runner import build_runner
from pagefleet_server.settings import CacheSettings, EngineSettings, ModelSettings
from pagefleet_server.tokenizer import load_tokenizer
from support.smollm2 import smollm2_gguf
from support.stepping import Blocks, quiet, step_of


@pytest.mark.parametrize("executor", ["fused", "transformers"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_smollm2_knows_the_capital_of_japan(dtype: str, executor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits are float32 and not rounded to the model's type: once the two best of another question, 25.33 and 25.24,
    were the same number in bfloat16, and the lower id won. (That question still hangs on how bfloat16 layers round:
    its answers lie within a tenth of a logit. In this one the first choice leads by about one at every token.)"""
    loaded = load_tokenizer(smollm2_gguf())
    assert loaded.chat_template is not None
    prompt = jinja2.Template(loaded.chat_template).render(
        messages=[{"role": "user", "content": "What is the capital of Japan?"}], add_generation_prompt=True
    )
    settings = EngineSettings(
        model=ModelSettings(model=str(smollm2_gguf()), device="cpu", dtype=dtype, threads=1, executor=executor),
        cache=CacheSettings(num_kv_blocks=16),
    )
    runner = build_runner(settings, quiet)
    if runner.linear_backend == "torch" and dtype == "bfloat16":
        pytest.skip("torch's own linears round the logits")
    seen: list[torch.Tensor] = []
    kind = type(runner.model)
    forward = kind.forward

    def watched(*arguments: Any) -> torch.Tensor:
        seen.append(forward(*arguments))
        return seen[-1]

    monkeypatch.setattr(kind, "forward", watched)
    ids = loaded.tokenizer.encode(prompt, add_special_tokens=False).ids
    sequence = Blocks(runner, random.Random(0)).sequence("s", ids, room=16)
    while sequence.token_ids[-1] not in runner.eos_token_ids or len(sequence.token_ids) == len(ids):
        step = step_of([(sequence, len(sequence.token_ids) - sequence.computed)])
        sequence.token_ids.append(runner.execute(step).sampled["s"])
        assert len(sequence.token_ids) < len(ids) + 16
    assert loaded.tokenizer.decode(sequence.token_ids[len(ids) :]) == "The capital of Japan is Tokyo."
    for logits in seen:
        assert logits.dtype == torch.float32
        assert (logits.to(torch.bfloat16).to(torch.float32) != logits).float().mean() > 0.9, "rounded"
