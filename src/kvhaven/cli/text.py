# SPDX-License-Identifier: Apache-2.0
"""How figures are written for people."""


def size_text(size: float) -> str:
    """Write bytes, rounded."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:  # noqa: PLR2004 - the units' base
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def age_text(seconds: float) -> str:
    """Write a time, rounded."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
