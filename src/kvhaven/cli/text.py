# SPDX-License-Identifier: Apache-2.0
"""Formatting of sizes and times for display."""


def size_text(size: float) -> str:
    """Return a size in bytes, rounded, with its unit."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:  # noqa: PLR2004 - the units' base
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def age_text(seconds: float) -> str:
    """Return a time in seconds, rounded, with its unit."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
