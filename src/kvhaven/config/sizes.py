# SPDX-License-Identifier: Apache-2.0
"""Parsing and formatting of sizes."""

import math
import re

MIB = 1 << 20
GIB = 1 << 30

_UNITS: dict[str, int] = {
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}i": 1024**power for power, prefix in enumerate("kmgt", start=1)},  # Kubernetes
}
_SIZE = re.compile(r"(?P<number>\d+(\.\d*)?|\.\d+)\s*(?P<unit>[a-z]*)")


def format_size(size: int) -> str:
    """Return bytes in the largest unit that needs at most two decimals: `20GiB`, `1.5MiB`."""
    for unit, factor in (("TiB", GIB << 10), ("GiB", GIB), ("MiB", MIB), ("KiB", 1024)):
        if size >= factor and size * 100 % factor == 0:
            return f"{size / factor:.2f}".rstrip("0").rstrip(".") + unit
    return f"{size}B"


def parse_size(value: object) -> int:
    """Return a size in bytes.

    Plain numbers are GiB, as in LMCache. `GB` is 1000-based, `GiB` and `Gi` are 1024-based.
    Raises `ValueError` with the reason if it is not a size.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("not a size")
    match = _SIZE.fullmatch(str(value).strip().lower())
    if match is None:
        raise ValueError("not a size")
    unit = match["unit"]
    if unit and unit not in _UNITS:
        raise ValueError(f"unknown unit {unit}")
    number, factor = match["number"], _UNITS[unit] if unit else GIB
    if number.isdigit():
        return int(number) * factor
    size = float(number) * factor
    if math.isinf(size):
        raise ValueError("too large")
    return round(size)
