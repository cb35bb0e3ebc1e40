"""Linears with weights laid out by oneDNN once, held to "one row, one arithmetic".

Which kernel oneDNN runs depends on the shape and on the number of rows: for many shapes a single row is computed in
another order than the same row among others. In bf16 that shows in one output of thousands only, too few to find by
probing, so single rows are always padded to two. Each shape is probed besides when its first weight is packed, and
calls with fewer rows than the probe found safe are padded up to it.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

_logger = logging.getLogger(__name__)

PACK_ROWS_HINT = 16
"""Rows that oneDNN lays the weight out for. Below 16 it may choose a layout whose result depends on the row count."""
MIN_ROWS = 2
"""Calls with fewer rows are padded whatever the probe finds."""
PROBE_ROWS = (2, 3, 7, 8, 16, 33)
"""Row counts, from MIN_ROWS on, whose results are compared with those of the largest probe."""
PROBE_BASE_ROWS = 65

PointwiseLinear = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class OneDnnLinear:
    """x [..., K] -> x @ weight.T + bias, [..., N], in x's dtype; the same bits for a row whatever stands beside it."""

    packed: torch.Tensor
    """Opaque: the weight in oneDNN's layout."""
    bias: torch.Tensor | None
    out_features: int
    min_rows: int
    """Calls with fewer rows are padded to so many."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """One call of the library."""
        rows = x.numel() // x.shape[-1]
        if rows >= self.min_rows:
            return self._run(x)
        if rows == 0:
            return x.new_empty(*x.shape[:-1], self.out_features)
        flat = x.reshape(rows, x.shape[-1])
        padded = torch.cat([flat, flat[:1].expand(self.min_rows - rows, -1)])
        return self._run(padded)[:rows].view(*x.shape[:-1], self.out_features)

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out


class OneDnnPacker:
    """Packs weights; remembers for each shape how many rows are safe."""

    def __init__(self) -> None:
        self._min_rows: dict[tuple[int, int, torch.dtype, int], int] = {}

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> OneDnnLinear | None:
        """weight [N, K] -> the linear, or None where oneDNN takes no such weight."""
        if not _can_pack(weight):
            return None
        source = weight.detach().contiguous()
        linear = OneDnnLinear(
            packed=torch.ops.mkldnn._reorder_linear_weight(source, PACK_ROWS_HINT),
            bias=None if bias is None else bias.detach().clone(),
            out_features=weight.shape[0],
            min_rows=MIN_ROWS,
        )
        key = (weight.shape[0], weight.shape[1], weight.dtype, torch.get_num_threads())
        if key not in self._min_rows:
            found = probe(linear, weight.shape[1], weight.dtype)
            if found is None:
                # A weight of zeros shows nothing: probe the next one of this shape.
                return linear
            self._min_rows[key] = found
        return OneDnnLinear(linear.packed, linear.bias, linear.out_features, self._min_rows[key])


def probe(linear: PointwiseLinear, in_features: int, dtype: torch.dtype) -> int | None:
    """The smallest row count from which on every probed count gives the same bits per row.

    None when all results are zero. PROBE_BASE_ROWS, with a warning, when no smaller count is safe.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(PROBE_BASE_ROWS, in_features, generator=generator).to(dtype)
    want = linear(x)
    if not want.any():
        return None
    unsafe = [rows for rows in PROBE_ROWS if not _agrees(linear, x, want, rows)]
    if not unsafe:
        return MIN_ROWS
    larger = [rows for rows in (*PROBE_ROWS, PROBE_BASE_ROWS) if rows > max(unsafe)]
    if larger[0] > MIN_ROWS:
        _logger.warning(
            "linear of %d inputs in %s gives other bits for %s rows: calls are padded to %d rows",
            in_features,
            dtype,
            unsafe,
            larger[0],
        )
    return larger[0]


def _agrees(linear: PointwiseLinear, x: torch.Tensor, want: torch.Tensor, rows: int) -> bool:
    """Every run of so many rows of x gives what they give among all."""
    return all(
        torch.equal(linear(x[first : first + rows]), want[first : first + rows])
        for first in range(0, x.shape[0] - rows + 1, rows)
    )


def _can_pack(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.float32:
        return True
    return weight.dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
