"""What stands around attention, at sizes that fill the chip, beside plain torch for the same result."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from pagefleet_kernels.batch import KVShape
from pagefleet_kernels.sampling_batch import SamplingBatch

BF16 = torch.bfloat16
Calls = list[Callable[[], object]]


def neighbour_calls(backend: Any) -> Iterator[tuple[str, int, Calls, Calls]]:
    """(name, bytes that must move or 0, our calls, torch's calls or none)."""
    yield from _norms(backend)
    yield from _gates(backend)
    yield from _writes(backend)
    yield from _samplers(backend)


def _random(*size: int) -> torch.Tensor:
    return torch.randn(*size, device="cuda", dtype=BF16)


def _norms(backend: Any) -> Iterator[tuple[str, int, Calls, Calls]]:
    weight = _random(4096)
    for rows in (64, 16384):
        x, residual = _random(rows, 4096), _random(rows, 4096)

        def plain(x: torch.Tensor = x, residual: torch.Tensor = residual) -> torch.Tensor:
            residual.add_(x)
            return torch.nn.functional.rms_norm(residual, (4096,), weight, 1e-5)

        ours: Calls = [partial(backend.add_rms_norm, x, residual, weight, epsilon=1e-5)]
        yield f"add_rms_norm {rows} x 4096", 4 * x.nbytes if rows > 64 else 0, ours, [plain]


def _gates(backend: Any) -> Iterator[tuple[str, int, Calls, Calls]]:
    for rows in (64, 8192):
        x = _random(rows, 2 * 14336)

        def plain(x: torch.Tensor = x) -> torch.Tensor:
            gate, up = x.chunk(2, dim=-1)
            return torch.nn.functional.silu(gate) * up

        moved = x.nbytes * 3 // 2 if rows > 64 else 0
        yield f"silu_mul {rows} x 14336", moved, [partial(backend.silu_mul, x)], [plain]


def _writes(backend: Any) -> Iterator[tuple[str, int, Calls, Calls]]:
    shape = KVShape(8, 128, 128)
    for storage in (BF16, torch.float8_e4m3fn):
        for rows in (64, 32768):
            blocks = rows // 16 + 1
            cache = backend.allocate(
                shape, num_blocks=blocks, block_size=16, dtype=storage, device=torch.device("cuda")
            )
            qkv = _random(rows, (32 + 16) * 128)
            query, key, value = (part.view(rows, -1, 128) for part in torch.split(qkv, [4096, 1024, 1024], dim=1))
            slots = torch.randperm(rows, device="cuda") + 16
            positions = torch.arange(rows, device="cuda") % 8192
            cos_sin = torch.randn(8192, 128, device="cuda")
            moved = qkv.nbytes + query.numel() * 2 + 2 * key.numel() * storage.itemsize

            ours = partial(
                backend.rope_write_kv,
                query,
                key,
                value,
                cache,
                slot_mapping=slots,
                positions=positions,
                cos_sin=cos_sin,
            )
            name = f"rope_write_kv {rows} {str(storage)[6:14]}"
            yield name, moved if rows > 64 else 0, [ours], []


def _samplers(backend: Any) -> Iterator[tuple[str, int, Calls, Calls]]:
    rows, vocab = 64, 128256
    logits = torch.randn(rows, vocab, device="cuda") * 3
    for name, top_k, top_p in (("no mask", 0, 1.0), ("top-k 50", 50, 1.0), ("top-p 0.9", 0, 0.9), ("both", 50, 0.9)):
        batch = SamplingBatch(
            temperature=torch.ones(rows, device="cuda"),
            top_k=torch.full((rows,), top_k, dtype=torch.int32, device="cuda"),
            top_p=torch.full((rows,), top_p, device="cuda"),
            min_p=torch.zeros(rows, device="cuda"),
            seeds=torch.arange(rows, device="cuda"),
            positions=torch.arange(rows, device="cuda"),
        )

        def plain(top_k: int = top_k, top_p: float = top_p) -> torch.Tensor:
            values, ids = logits.sort(dim=-1, descending=True)
            if top_k:
                values = values[:, :top_k]
            probabilities = values.softmax(dim=-1)
            if top_p < 1.0:
                probabilities = probabilities * (probabilities.cumsum(-1) - probabilities < top_p)
            noise = torch.empty_like(probabilities).exponential_()
            return ids.gather(1, (probabilities / noise).argmax(dim=-1, keepdim=True))

        yield f"sample {rows} x {vocab}, {name}", 0, [partial(backend.sample, logits, batch)], [plain]
