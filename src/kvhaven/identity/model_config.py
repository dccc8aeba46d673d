# SPDX-License-Identifier: Apache-2.0
"""Configurations of models in the form of Hugging Face, which most engines read."""

from collections.abc import Mapping
from typing import Any, Final

MODEL_CONFIG_PLACES: Final = frozenset({"_name_or_path", "name_or_path", "transformers_version"})
"""Fields of a model's own configuration that record its origin and do not affect computation."""


def entries_of(config: Any) -> Any:
    """Return a configuration's entries, also nested ones, without those that record its origin."""
    if callable(getattr(config, "to_dict", None)) and not isinstance(config, type):
        config = config.to_dict()
    if isinstance(config, Mapping):
        return {
            name: entries_of(item)
            for name, item in config.items()
            if name not in MODEL_CONFIG_PLACES
        }
    return [entries_of(item) for item in config] if isinstance(config, list | tuple) else config


def rotary_kinds(entries: Any) -> set[str]:
    """Return the kinds of rotary embedding that entries name, also nested ones; '' is the usual."""
    if isinstance(entries, Mapping):
        own = {str(entries.get(name, "")) for name in ("rope_type", "type")}
        return own.union(*map(rotary_kinds, entries.values()))
    return set().union(*map(rotary_kinds, entries)) if isinstance(entries, list | tuple) else set()
