"""What stands around attention, at sizes that fill the chip, beside plain torch for the same result."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_timing import DEVICE
from pagefleet_kernels.batch import KVShape
from pagefleet_kernels.sampling_batch import SamplingBatch

BF16 = torch.bfloat16
Calls = list[Callable[[], object]]


@dataclass(frozen=True, slots=True)
class NeighbourSizes:
    """Rows of a decode step (launch-bound) and rows that fill the chip, of an 8B model's widths."""

    few_rows: int = 64
    norm_rows: int = 16384
    gate_rows: int = 8192
    rope_rows: int = 32768
    width: int = 4096
    gate_width: int = 14336
    vocab: int = 128256


@dataclass(frozen=True, slots=True)
class Neighbour:
    """One op at one size; nothing is allocated before `build` is called."""

    name: str
    build: Callable[[], "tuple[int, Calls, Calls]"]
    """Bytes that must move, or 0 where the launch is what takes the time; our calls; torch's calls or none."""


def neighbours(backend: Any, sizes: NeighbourSizes) -> Iterator[Neighbour]:
    """Norms, gates, rotations with KV write, samplers."""
    few = sizes.few_rows
    for rows in (few, sizes.norm_rows):
        yield Neighbour(f"add_rms_norm {rows} x {sizes.width}", partial(_norm, backend, rows, sizes.width, rows > few))
    for rows in (few, sizes.gate_rows):
        name = f"silu_mul {rows} x {sizes.gate_width}"
        yield Neighbour(name, partial(_gate, backend, rows, sizes.gate_width, rows > few))
    for storage in (BF16, torch.float8_e4m3fn):
        for rows in (few, sizes.rope_rows):
            name = f"rope_write_kv {rows} {str(storage)[6:14]}"
            yield Neighbour(name, partial(_rope_write, backend, rows, storage, rows > few))
    for name, top_k, top_p in (("no mask", 0, 1.0), ("top-k 50", 50, 1.0), ("top-p 0.9", 0, 0.9), ("both", 50, 0.9)):
        shown = f"sample {few} x {sizes.vocab}, {name}"
        yield Neighbour(shown, partial(_sampler, backend, few, sizes.vocab, top_k, top_p))


def _random(*size: int) -> torch.Tensor:
    return torch.randn(*size, device=DEVICE, dtype=BF16)


def _norm(backend: Any, rows: int, width: int, large: bool) -> tuple[int, Calls, Calls]:
    weight, x, residual = _random(width), _random(rows, width), _random(rows, width)

    def plain() -> torch.Tensor:
        residual.add_(x)
        return torch.nn.functional.rms_norm(residual, (width,), weight, 1e-5)

    ours: Calls = [partial(backend.add_rms_norm, x, residual, weight, epsilon=1e-5)]
    return 4 * x.nbytes if large else 0, ours, [plain]


def _gate(backend: Any, rows: int, width: int, large: bool) -> tuple[int, Calls, Calls]:
    x = _random(rows, 2 * width)

    def plain() -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    return x.nbytes * 3 // 2 if large else 0, [partial(backend.silu_mul, x)], [plain]


def _rope_write(backend: Any, rows: int, storage: torch.dtype, large: bool) -> tuple[int, Calls, Calls]:
    cache = backend.allocate(
        KVShape(8, 128, 128), num_blocks=-(-rows // 16) + 1, block_size=16, dtype=storage, device=DEVICE
    )
    qkv = _random(rows, (32 + 16) * 128)
    query, key, value = (part.view(rows, -1, 128) for part in torch.split(qkv, [4096, 1024, 1024], dim=1))
    ours = partial(
        backend.rope_write_kv,
        query,
        key,
        value,
        cache,
        slot_mapping=torch.randperm(rows, device=DEVICE) + 16,
        positions=torch.arange(rows, device=DEVICE) % 8192,
        cos_sin=torch.randn(8192, 128, device=DEVICE),
    )
    moved = qkv.nbytes + query.numel() * 2 + 2 * key.numel() * storage.itemsize
    return moved if large else 0, [ours], []


def _sampler(backend: Any, rows: int, vocab: int, top_k: int, top_p: float) -> tuple[int, Calls, Calls]:
    logits = torch.randn(rows, vocab, device=DEVICE) * 3
    batch = SamplingBatch(
        temperature=torch.ones(rows, device=DEVICE),
        top_k=torch.full((rows,), top_k, dtype=torch.int32, device=DEVICE),
        top_p=torch.full((rows,), top_p, device=DEVICE),
        min_p=torch.zeros(rows, device=DEVICE),
        seeds=torch.arange(rows, device=DEVICE),
        positions=torch.arange(rows, device=DEVICE),
    )

    def plain() -> torch.Tensor:
        values, ids = logits.sort(dim=-1, descending=True)
        if top_k:
            values = values[:, :top_k]
        probabilities = values.softmax(dim=-1)
        if top_p < 1.0:
            probabilities = probabilities * (probabilities.cumsum(-1) - probabilities < top_p)
        noise = torch.empty_like(probabilities).exponential_()
        return ids.gather(1, (probabilities / noise).argmax(dim=-1, keepdim=True))

    return 0, [partial(backend.sample, logits, batch)], [plain]
