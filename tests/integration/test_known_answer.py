"""The real model answers a real question, in the types that it is served in."""

import random

import jinja2
import pytest

from pagefleet_server.runner.runner import build_runner
from pagefleet_server.settings import CacheSettings, EngineSettings, ModelSettings
from pagefleet_server.tokenizer import load_tokenizer
from support.smollm2 import smollm2_gguf
from support.stepping import Blocks, quiet, step_of


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_smollm2_knows_the_capital_of_france(dtype: str) -> None:
    """Once answered "L'Étoile, la Marseillaise": the two best logits, 25.33 and 25.24, are the same number in bfloat16,
    and the lower id won. Logits stay in float32 since."""
    loaded = load_tokenizer(smollm2_gguf())
    assert loaded.chat_template is not None
    prompt = jinja2.Template(loaded.chat_template).render(
        messages=[{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True
    )
    settings = EngineSettings(
        model=ModelSettings(model=str(smollm2_gguf()), device="cpu", dtype=dtype, threads=1),
        cache=CacheSettings(num_kv_blocks=16),
    )
    runner = build_runner(settings, quiet)
    if runner.linear_backend == "torch" and dtype == "bfloat16":
        pytest.skip("torch's own linears round the logits")
    ids = loaded.tokenizer.encode(prompt, add_special_tokens=False).ids
    sequence = Blocks(runner, random.Random(0)).sequence("s", ids, room=16)
    while sequence.token_ids[-1] not in runner.eos_token_ids or len(sequence.token_ids) == len(ids):
        step = step_of([(sequence, len(sequence.token_ids) - sequence.computed)])
        sequence.token_ids.append(runner.execute(step).sampled["s"])
        assert len(sequence.token_ids) < len(ids) + 16
    assert loaded.tokenizer.decode(sequence.token_ids[len(ids) :]) == "The capital of France is Paris."
