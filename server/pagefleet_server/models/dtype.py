"""Which dtype and device a model runs in."""

from pathlib import Path

import torch

from pagefleet_server.model_errors import ModelError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def resolve_device(setting: str) -> torch.device:
    """auto, cpu or cuda -> the device. Raises ModelError when cuda is asked for and is not there."""
    if setting == "auto":
        setting = "cuda" if torch.cuda.is_available() else "cpu"
    if setting == "cuda" and not torch.cuda.is_available():
        raise ModelError("--device cuda: no CUDA device is visible to this process; use --device cpu or auto")
    if setting not in ("cpu", "cuda"):
        raise ModelError(f"--device {setting!r}: expected auto, cpu or cuda")
    return torch.device(setting, 0) if setting == "cuda" else torch.device("cpu")


def resolve_dtype(setting: str, checkpoint: torch.dtype | None, device: torch.device) -> torch.dtype:
    """auto or a name -> the dtype. checkpoint: the files' own, None when they are quantised and have none.

    auto: the checkpoint's (bfloat16 when it has none); on a CPU float32 unless it computes bfloat16 natively, since
    emulated halves are slower than float32 and less exact. float16 has no fast path on CPUs: bfloat16 there.
    """
    if setting != "auto":
        if setting not in DTYPES:
            raise ModelError(f"--dtype {setting!r}: expected auto, {', '.join(DTYPES)}")
        return DTYPES[setting]
    wanted = checkpoint if checkpoint in DTYPES.values() else torch.bfloat16
    assert wanted is not None
    if device.type != "cpu" or wanted == torch.float32:
        return wanted
    return torch.bfloat16 if cpu_has_bfloat16() else torch.float32


def cpu_has_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """The CPU multiplies bfloat16 in hardware (x86: avx512_bf16; Arm: bf16)."""
    try:
        text = cpuinfo.read_text(errors="replace")
    except OSError:
        return False
    lines = (line.partition(":") for line in text.splitlines())
    flags = next((words.split() for name, _, words in lines if name.strip() in ("flags", "Features")), [])
    return "avx512_bf16" in flags or "bf16" in flags
