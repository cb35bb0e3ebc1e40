"""A small model of the same architecture: our attention on chunked, mixed batches against transformers' eager one.

An architecture that passes the structural checks may still compute something from the batch as a whole (positions from
a row's index, state between rows) or ask for attention in a way that our hook does not see. Then these differ.
"""

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from pagefleet_server.model_errors import ModelRefused, ModelUnverified
from pagefleet_server.models import attention_hook
from pagefleet_server.models.attention_hook import CONTEXT_ARGUMENT
from pagefleet_server.models.dense_context import DenseCache, DenseContext
from pagefleet_server.models.gate import check_config, check_module, keeps_logit_rows
from pagefleet_server.models.shrunken import shrink

MAX_RELATIVE_ERROR = 1e-4
"""Of the largest logit, in float32. A correct architecture is at about 1e-6, a wrong one above 1e-2."""
STEPS = (((0, 40), (1, 17)), ((0, 1), (1, 20), (2, 3)), ((1, 1), (0, 35)), ((2, 1), (0, 1), (1, 7)))
"""(sequence, rows) of each flat batch: prompts in chunks, decodes among them, contexts beyond two windows."""
SEED = 0


@dataclass(frozen=True, slots=True)
class SelfTestResult:
    """What a passed test saw."""

    relative_error: float
    """Largest difference of a logit, as a part of the largest logit."""
    num_layers: int


def self_test(config: PreTrainedConfig) -> SelfTestResult:
    """Run it on the CPU in float32: about a second. Raises ModelRefused or ModelUnverified with the reason."""
    check_config(config)
    try:
        small = shrink(config)
        module = build_small(small)
    except Exception as error:
        raise ModelUnverified(f"no small copy of it can be built for the self-test: {_first_line(error)}") from error
    try:
        layers = check_module(module)
        return SelfTestResult(_relative_error(module), len(layers))
    except ModelRefused:
        raise
    except Exception as error:
        raise ModelUnverified(f"the self-test of a small copy of it failed: {_first_line(error)}") from error


def build_small(small: PreTrainedConfig) -> PreTrainedModel:
    """A random model in float32 whose every part moves its logits, on our attention; the same in every process."""
    attention_hook.register()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        module = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            small, dtype=torch.float32, attn_implementation=attention_hook.IMPLEMENTATION
        )
        assert isinstance(module, PreTrainedModel)
        _stir(module)
    torch.nn.Module.eval(module).requires_grad_(False)
    return module


def _stir(module: torch.nn.Module) -> None:
    """Weights large enough that every part of the model moves the logits: fresh ones make uniform attention, zero
    biases and zero sinks, and an error in them would not show."""
    for parameter in module.parameters():
        if parameter.dim() >= 2:
            parameter.data.normal_(0.0, 1.5 / max(1, parameter.shape[-1]) ** 0.5)
        else:
            parameter.data.add_(torch.randn_like(parameter) * 0.2)


@torch.inference_mode()
def _relative_error(module: PreTrainedModel) -> float:
    lengths = {s: sum(n for step in STEPS for at, n in step if at == s) for s in range(3)}
    vocabulary = int(module.config.get_text_config(decoder=True).vocab_size)
    draws = torch.Generator().manual_seed(SEED)
    # Not the first ids: a padding token means something else to some architectures.
    texts = {s: torch.randint(4, vocabulary, (n,), generator=draws) for s, n in lengths.items()}
    got = _paged(module, texts)
    module.set_attn_implementation("eager")
    worst = largest = 0.0
    for sequence, token_ids in texts.items():
        want = module(input_ids=token_ids.unsqueeze(0), use_cache=False).logits[0].float()
        if not torch.isfinite(want).all():
            raise ModelUnverified("a small copy of it gives logits that are no finite numbers; the self-test is void")
        worst = max(worst, float((got[sequence] - want).abs().max()))
        largest = max(largest, float(want.abs().max()))
    error = worst / largest if largest else float("inf")
    if not error <= MAX_RELATIVE_ERROR:
        raise ModelUnverified(
            f"on our attention a small copy of it gives logits that are off by {error:.1e} of the largest; at most "
            f"{MAX_RELATIVE_ERROR:.0e} is rounding"
        )
    return error


def _paged(module: PreTrainedModel, texts: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Logits [T, V] of every sequence, computed in STEPS."""
    cache = DenseCache()
    keeps_rows = keeps_logit_rows(module)
    done = dict.fromkeys(texts, 0)
    logits: dict[int, list[torch.Tensor]] = {s: [] for s in texts}
    for step in STEPS:
        rows = [(s, torch.arange(done[s], done[s] + count)) for s, count in step]
        num_rows = sum(count for _, count in step)
        # Backwards: a model that takes the rows for a count, or ignores them, would differ.
        wanted = torch.arange(num_rows).flip(0) if keeps_rows else None
        output = module(
            input_ids=torch.cat([texts[s][at] for s, at in rows]).unsqueeze(0),
            position_ids=torch.cat([at for _, at in rows]).unsqueeze(0),
            use_cache=False,
            **{CONTEXT_ARGUMENT: DenseContext(cache, step)},
            **({} if wanted is None else {"logits_to_keep": wanted}),
        ).logits[0]
        if wanted is not None:
            output = output.flip(0)
        for (sequence, at), part in zip(rows, output.float().split([n for _, n in step]), strict=True):
            logits[sequence].append(part)
            done[sequence] += len(at)
    return {s: torch.cat(parts) for s, parts in logits.items()}


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"[:200]
