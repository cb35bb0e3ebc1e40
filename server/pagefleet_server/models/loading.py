"""From a path to a model that runs on paged attention."""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    GgufConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from pagefleet_server import host_memory
from pagefleet_server.model_errors import ModelError, ModelRefused, ModelUnverified
from pagefleet_server.models import attention_hook
from pagefleet_server.models.checkpoint import Checkpoint, open_checkpoint
from pagefleet_server.models.dtype import resolve_device, resolve_dtype
from pagefleet_server.models.eos import eos_token_ids
from pagefleet_server.models.gate import check_config, check_module, keeps_logit_rows
from pagefleet_server.models.gguf_llama import llama_config, llama_state
from pagefleet_server.models.load_progress import LoadProgress, tell_nobody, told_by_memory
from pagefleet_server.models.paged_model import PagedModel
from pagefleet_server.models.pooling import pooling_of
from pagefleet_server.models.verification import distrust, verify
from pagefleet_server.models.weight_memory import check_weights_fit, weight_bytes
from pagefleet_server.settings import ModelSettings

_OF_QUANTISED = ("scale", "scales", "scale_inv", "qweight", "qzeros", "g_idx", "zero_point", "absmax", "quant_map")
"""Ends of tensor names without which the weights beside them mean something else."""
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
"""A layer's number in a tensor's name."""
AutoClass = type[AutoModel] | type[AutoModelForCausalLM]


def load_model(settings: ModelSettings, tell: LoadProgress = tell_nobody) -> PagedModel:
    """Load, gate and dry-run the model. Raises ModelError (cannot be loaded) or ModelRefused (would be wrong)."""
    if settings.load_format not in ("auto", "dummy"):
        raise ModelError(f"--load-format {settings.load_format!r}: expected auto or dummy")
    dummy = settings.load_format == "dummy"
    device = resolve_device(settings.device)
    checkpoint = open_checkpoint(settings.model, need_weights=not dummy)
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    attention_hook.register()
    try:
        config = _load_config(checkpoint)
        _check_quantization(config)
        _check_rope(config)
        _check_architecture(config, trust=settings.trust_unverified_model)
        dtype = resolve_dtype(settings.dtype, _checkpoint_dtype(checkpoint, config), device)
        pooling = pooling_of(settings)
        auto_class = AutoModelForCausalLM if pooling is None else AutoModel
        needed = _random_bytes(auto_class, config, dtype) if dummy else weight_bytes(checkpoint, dtype)
        check_weights_fit(checkpoint.path, needed, dtype, device)
        with told_by_memory(needed, tell, held_bytes=host_memory.resident_bytes):
            module = (
                _random_module(auto_class, config, dtype)
                if dummy
                else _load_module(auto_class, checkpoint, config, dtype, trust=settings.trust_unverified_model)
            )
        torch.nn.Module.to(module, device)
        torch.nn.Module.eval(module).requires_grad_(False)
        layers = check_module(module)
    except ModelRefused as error:
        raise type(error)(f"{checkpoint.path}: cannot be served: {error}") from error
    text = config.get_text_config(decoder=True)
    return PagedModel(
        module=module,
        layers=layers,
        vocab_size=int(text.vocab_size),
        max_positions=_max_positions(text),
        eos_token_ids=eos_token_ids(checkpoint, getattr(text, "eos_token_id", None)),
        dtype=dtype,
        device=device,
        keeps_logit_rows=keeps_logit_rows(module),
        pooling=pooling,
    )


def _check_quantization(config: PreTrainedConfig) -> None:
    """transformers only warns of a method that it does not know, and takes the numbers for plain weights."""
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return
    values = quantization if isinstance(quantization, dict) else quantization.to_dict()
    method = str(values.get("quant_method"))
    if method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        raise ModelRefused(
            f"its weights are quantised by {method[:80]!r}; transformers {transformers.__version__} knows "
            f"{', '.join(sorted(AUTO_QUANTIZATION_CONFIG_MAPPING))}"
        )


def _check_rope(config: PreTrainedConfig) -> None:
    """An unknown kind of rotary embedding fails far from its reason."""
    parameters = getattr(config.get_text_config(decoder=True), "rope_parameters", None)
    if not isinstance(parameters, dict):
        return
    known = {"default", *ROPE_INIT_FUNCTIONS}
    for kinds in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        kind = kinds.get("rope_type", "default")
        if kind not in known:
            raise ModelRefused(
                f"its rotary embedding is of rope_type {str(kind)[:80]!r}; transformers {transformers.__version__} "
                f"knows {', '.join(sorted(known))}"
            )


def _check_architecture(config: PreTrainedConfig, *, trust: bool) -> None:
    try:
        check_config(config)
    except ModelUnverified as error:
        distrust(error, trust=trust)
        return
    verify(config, trust=trust)


def _load_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    extra = {} if checkpoint.gguf_file is None else {"gguf_file": checkpoint.gguf_file}
    direct = None if checkpoint.gguf is None else llama_config(checkpoint.gguf)
    if direct is not None:
        return direct
    try:
        config = AutoConfig.from_pretrained(checkpoint.directory, local_files_only=True, **extra)
    except Exception as error:  # foreign code over a foreign file: whatever it raises means the same
        raise ModelError(f"{checkpoint.path}: its configuration is not understood: {str(error)[:300]}") from error
    if not isinstance(config, PreTrainedConfig):
        raise ModelError(f"{checkpoint.path}: its configuration is not understood: got {type(config).__name__}")
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ModelRefused(f"{config.model_type} is no causal language model that transformers knows")
    return config


def _load_module(
    auto_class: AutoClass, checkpoint: Checkpoint, config: PreTrainedConfig, dtype: torch.dtype, *, trust: bool
) -> PreTrainedModel:
    common: dict[str, Any] = {
        "config": config,
        "local_files_only": True,
        "dtype": dtype,
        "attn_implementation": attention_hook.IMPLEMENTATION,
        # Both are told below, by name, instead of a random tensor or a bare "sizes differ".
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,
    }
    loaded: Any
    try:
        if checkpoint.gguf is None:
            loaded = auto_class.from_pretrained(checkpoint.directory, **common)
        elif (
            auto_class is AutoModelForCausalLM
            and isinstance(config, LlamaConfig)
            and llama_config(checkpoint.gguf) is not None
        ):
            state = llama_state(checkpoint.gguf, dtype)
            loaded = LlamaForCausalLM.from_pretrained(None, state_dict=state, **common)
        else:
            plain = GgufConfig(dequantize=True)
            loaded = auto_class.from_pretrained(
                checkpoint.directory, gguf_file=checkpoint.gguf_file, quantization_config=plain, **common
            )
    except Exception as error:  # as above
        raise ModelError(f"{checkpoint.path}: cannot be loaded: {str(error)[:300]}") from error
    module, told = loaded
    _check_complete(checkpoint, told)
    _check_layers(checkpoint, told, int(config.get_text_config(decoder=True).num_hidden_layers), trust=trust)
    return _module(module)


def _check_complete(checkpoint: Checkpoint, told: Mapping[str, Collection[object]]) -> None:
    """transformers fills what a checkpoint lacks with random numbers; nobody would notice but by the answers."""
    missing = sorted(str(name) for name in told.get("missing_keys", ()))
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ModelError(
            f"{checkpoint.path}: holds no weights for {', '.join(missing[:3])}{more}; fetch it again, with the "
            "configuration that belongs to it"
        )
    scales = sorted(str(name) for name in told.get("unexpected_keys", ()) if str(name).endswith(_OF_QUANTISED))
    if scales:
        raise ModelError(
            f"{checkpoint.path}: holds {scales[0]} and {len(scales) - 1} more numbers of quantised weights, but its "
            "configuration has no quantization_config that uses them; fetch the configuration that belongs to it"
        )
    for entry in told.get("mismatched_keys", ()):
        name, found, want = entry if isinstance(entry, tuple) else (entry, "?", "?")
        raise ModelError(
            f"{checkpoint.path}: tensor {name} has shape {_shape(found)}, by the configuration it has {_shape(want)}; "
            "fetch it again, with the configuration that belongs to it"
        )


def _check_layers(
    checkpoint: Checkpoint, told: Mapping[str, Collection[object]], num_layers: int, *, trust: bool
) -> None:
    """transformers leaves out what the configuration does not ask for, and a model with half of its layers answers,
    too. (Layers for speculation that an architecture knows of are not told here.)"""
    numbers = [
        (int(found[1]), str(name)) for name in told.get("unexpected_keys", ()) if (found := _LAYER.search(str(name)))
    ]
    beyond = max((number for number in numbers if number[0] >= num_layers), default=None)
    if beyond is not None:
        error = ModelUnverified(
            f"{checkpoint.path}: holds {beyond[1][:200]}, but its configuration has {num_layers} layers "
            "(num_hidden_layers)"
        )
        distrust(error, trust=trust)


def _shape(value: object) -> str:
    return str(list(value)) if isinstance(value, Iterable) and not isinstance(value, str) else str(value)


def _random_bytes(auto_class: AutoClass, config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Of the weights that _random_module would make."""
    with torch.device("meta"):
        module = auto_class.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    return sum(parameter.nbytes for parameter in _module(module).parameters())


def _random_module(auto_class: AutoClass, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Weights from the configuration alone, the same in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = auto_class.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, attn_implementation=attention_hook.IMPLEMENTATION
        )
    return _module(module)


def _module(module: object) -> PreTrainedModel:
    if not isinstance(module, PreTrainedModel):
        raise ModelRefused(f"transformers gave a {type(module).__name__}")
    return module


def _checkpoint_dtype(checkpoint: Checkpoint, config: PreTrainedConfig) -> torch.dtype | None:
    """The files' own dtype; None for a .gguf file, whose weights are dequantised to what we ask for."""
    dtype = None if checkpoint.gguf_file is not None else getattr(config, "dtype", None)
    if dtype is None and checkpoint.gguf_file is None:
        return torch.float32
    return dtype if isinstance(dtype, torch.dtype) else None


def _max_positions(text: PreTrainedConfig) -> int:
    """The model's own limit. RoPE kinds that rescale beyond a length, by the longest sequence of the batch, are held
    below it: there one request would change its neighbours."""
    limit = getattr(text, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        raise ModelError("its configuration has no max_position_embeddings; the context length is unknown")
    rope = getattr(text, "rope_parameters", None)
    original = rope.get("original_max_position_embeddings") if isinstance(rope, dict) else None
    if isinstance(rope, dict) and rope.get("rope_type") in ("dynamic", "longrope") and isinstance(original, int):
        return min(limit, original)
    return limit
