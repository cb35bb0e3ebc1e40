"""Kubernetes quantities: `500m`, `2Gi`, `1e3`."""

import re
from decimal import Decimal

_QUANTITY = re.compile(r"^([+-]?(?:\d+\.?\d*|\.\d+))(Ki|Mi|Gi|Ti|Pi|Ei|[numkMGTPE]|[eE][+-]?\d+)?$")
_BINARY = {unit: Decimal(1024) ** power for power, unit in enumerate(("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"))}
_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}


def is_quantity(value: object) -> bool:
    """Whether `parse_quantity` takes it."""
    return _QUANTITY.match(str(value)) is not None


def parse_quantity(value: object) -> Decimal:
    """The amount in base units (cores, bytes, pieces). Raises ValueError for what is no quantity."""
    match = _QUANTITY.match(str(value))
    if not match:
        raise ValueError(f"quantities must match the regular expression '{_QUANTITY.pattern}', got {value!r}")
    number, suffix = Decimal(match[1]), match[2] or ""
    if suffix in _DECIMAL:
        return number * Decimal(10) ** _DECIMAL[suffix]
    if suffix in _BINARY:
        return number * _BINARY[suffix]
    return number * Decimal(10) ** int(suffix[1:])
