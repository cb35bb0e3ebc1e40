"""Which decode steps share a captured graph: a graph is made for a number of rows and a bound on their lengths, and
serves every step that fits into it. Pure: no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class GraphShape:
    """What a graph is captured for."""

    num_rows: int
    """Rows computed; the step's own come first, the rest is padding."""
    max_seq_len: int
    """Tokens of its longest sequence at most."""


def row_counts(most: int) -> tuple[int, ...]:
    """1, 2, 4, 6, 8, 12, 16, 24, 32, ... to `most`, itself included: at most a third of the rows is padding (beyond 1
    and 2 rows)."""
    counts = {1, 2, most}
    power = 4
    while power < most:
        counts |= {power, power + power // 2}
        power *= 2
    return tuple(sorted(count for count in counts if count <= most))


def shapes_for(most_rows: int, lengths: Sequence[int]) -> tuple[GraphShape, ...]:
    """All of them, the largest first: smaller ones then find larger ones' memory free. lengths: bounds, rising."""
    return tuple(sorted((GraphShape(rows, end) for rows in row_counts(most_rows) for end in lengths), reverse=True))


def choose(shapes: Sequence[GraphShape], *, num_rows: int, longest: int) -> GraphShape | None:
    """The smallest that the step fits into: fewest rows first, then the tightest length. None: too many rows or too
    long."""
    fitting = [shape for shape in shapes if shape.num_rows >= num_rows and shape.max_seq_len >= longest]
    return min(fitting, default=None)
