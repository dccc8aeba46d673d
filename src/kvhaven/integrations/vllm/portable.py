# SPDX-License-Identifier: Apache-2.0
"""The portable format of vLLM's models: the layers and the KV heads of a whole model."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvhaven.errors import LayoutError
from kvhaven.layouts import PortableLayout
from kvhaven.layouts.groups import numbered_layers

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_HEADS = re.compile(r"(key_value_heads|kv_heads|attention_groups|heads_in_group)")
"""Entries of models' configurations that tell numbers of KV heads, perhaps only of some layers."""


def layers_field(config: "VllmConfig", layout: PortableLayout, *, several: bool) -> str:
    """Return the value of the namespace's field `kv_layers`.

    It is the number of layers of the whole model, or, for one of `several` parts of its KV, the
    numbers of the part's layers (`0-4,6-10`). With pipeline parallelism a rank knows only its own
    layers, so it is the whole model's number of layers, too.
    """
    parallel = config.parallel_config
    if not several or parallel.pipeline_parallel_size > 1:
        return str(config.model_config.get_total_num_hidden_layers())
    return numbered_layers(layout)


def total_heads(config: "VllmConfig") -> int:
    """Return the KV heads of each layer of the whole model, 1 for MLA.

    Raises `LayoutError` if there are more ranks than heads and some layers might have more heads: a
    rank has one head in either case, so its tensors do not tell.
    """
    model, ranks = config.model_config, config.parallel_config.tensor_parallel_size
    if model.use_mla:
        return 1
    heads = int(model.get_total_num_kv_heads())
    entries: Mapping[str, Any] = getattr(model.hf_text_config, "to_dict", dict)()
    others = sorted({found for found in _numbers_of_heads(entries) if found != heads})
    if ranks > heads and others:
        raise LayoutError(
            f"format is portable, and {ranks} ranks share {heads} KV heads (some layers may have "
            f"{', '.join(map(str, others))}); expected at most {heads} ranks. Set format: paged, "
            f"or a tensor_parallel_size of at most {heads}."
        )
    return heads


def _numbers_of_heads(entries: Any, name: str = "") -> list[int]:
    """Return all numbers below entries whose names tell of KV heads, also those in lists."""
    if isinstance(entries, Mapping):
        below = [(value, str(key)) for key, value in entries.items()]
    elif isinstance(entries, list | tuple):
        below = [(value, name) for value in entries]
    else:
        return [entries] if type(entries) is int and _HEADS.search(name) else []
    return [number for value, key in below for number in _numbers_of_heads(value, key)]
