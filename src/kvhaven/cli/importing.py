# SPDX-License-Identifier: Apache-2.0
"""Conversion of a settings file of LMCache, with comments on the differences."""

import textwrap
from pathlib import Path

import yaml

from kvhaven.config import check_value, setting_infos
from kvhaven.config.lmcache import TAKEN, read_lmcache_file, translate
from kvhaven.config.sizes import format_size
from kvhaven.config.sources import RawValue
from kvhaven.config.urls import redacted


def import_lmcache(path: Path) -> str:
    """Return the content of a YAML file of KVHaven that corresponds to LMCache's file.

    Raises `ConfigError` if the file cannot be read or a value is not allowed.
    """
    given = read_lmcache_file(path, "the command line")
    translation = translate(given)
    parts = [
        _comment(f"KVHaven's settings, converted from LMCache's {path} (kvhaven config import).")
    ]
    for name, raw in given.items():
        taken = translation.taken.get(TAKEN[name].ours) if name in TAKEN else None
        if taken is not None and taken.origin == raw.origin:
            parts.append(_setting(name, raw, taken))
    if translation.skipped:
        left = _comment("Not imported:")
        for advice, found in translation.by_advice.items():
            names = ", ".join(f"{s.name} (line {s.origin.rpartition(':')[2]})" for s in found)
            left += _comment(f"{names}: {advice}.")
        parts.append(left)
    return "\n".join(parts)


def _setting(name: str, raw: RawValue, ours: RawValue) -> str:
    """Return the line of one setting, below a comment on the differences."""
    taken = TAKEN[name]
    info = next(info for info in setting_infos() if info.name == taken.ours)
    value = check_value(taken.ours, ours)
    written = format_size(value) if info.kind == "size" and isinstance(value, int) else value
    line = yaml.safe_dump({taken.ours: written}, width=1 << 16)
    before = yaml.safe_dump({name: raw.value}, width=1 << 16).strip().replace("'", "")
    remarks = []
    if before.lower() != line.strip().replace("'", "").lower():
        remarks.append(f"LMCache: {redacted(before)}.")
    if taken.change:
        remarks.append(f"{taken.change[0].upper()}{taken.change[1:]}.")
    return _comment(" ".join(remarks)) + line


def _comment(text: str) -> str:
    lines = textwrap.wrap(text.strip(), 97, break_long_words=False, break_on_hyphens=False)
    return "".join(f"# {line}\n" for line in lines)
