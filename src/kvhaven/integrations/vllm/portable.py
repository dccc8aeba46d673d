# SPDX-License-Identifier: Apache-2.0
"""The portable format of vLLM's models: the order of layers, and the KV heads of a whole model."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvhaven.errors import LayoutError
from kvhaven.layouts import HeadGeometry, PagedLayout, PortableLayout
from kvhaven.layouts.geometry import require_alike

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_HEADS = re.compile(r"(key_value_heads|kv_heads|attention_groups|heads_in_group)")
"""Entries of models' configurations that tell numbers of KV heads, perhaps only of some layers."""


def portable_layout(paged: PagedLayout, groups: Sequence[HeadGeometry | None]) -> PortableLayout:
    """Return the portable layout of a part's KV groups, whose pages together are `paged`.

    A group is None if this rank has no layers of it. The layers are in the order of their numbers
    in the model, since vLLM forms groups of different layers for other engines. Raises
    `LayoutError` if that order is not known, or if the layers differ.
    """
    layers = sorted(
        (
            (layer_number(planes[0].layer), group, planes)
            for group, geometry in enumerate(groups)
            for planes in (geometry.layers if geometry is not None else ())
        ),
        key=lambda layer: layer[0],
    )
    numbers = [number for number, *_ in layers]
    if len(set(numbers)) < len(numbers):
        names = ", ".join(planes[0].layer for *_, planes in layers)
        raise _unknown_order(f"layers {names}: several have the same number in their names")
    ratios = {geometry.kernel_blocks for geometry in groups if geometry is not None}
    if len(ratios) != 1:
        raise _unknown_order(f"KV groups with {sorted(ratios)} kernel blocks in a block")
    geometry = HeadGeometry(tuple(planes for *_, planes in layers), ratios.pop())
    require_alike(geometry)
    of_layers = tuple(group for _, group, _ in layers)
    return PortableLayout(paged, geometry, groups=len(groups), layer_groups=of_layers)


def layer_number(layer: str) -> int:
    """Return the number of a layer in the model: the only one in its name, as vLLM requires.

    Raises `LayoutError` if there is none, or several.
    """
    numbers = [int(word) for word in layer.split(".") if word.isdecimal()]
    if len(numbers) != 1:
        raise _unknown_order(f"layer {layer}: its name has {len(numbers)} numbers")
    return numbers[0]


def layers_field(config: "VllmConfig", layout: PortableLayout, *, several: bool) -> str:
    """Return the value of the namespace's field `kv_layers`.

    It is the number of layers of the whole model, or, for one of `several` parts of its KV, the
    numbers of the part's layers (`0-4,6-10`). With pipeline parallelism a rank knows only its own
    layers, so it is the whole model's number of layers, too.
    """
    parallel = config.parallel_config
    if not several or parallel.pipeline_parallel_size > 1:
        return str(config.model_config.get_total_num_hidden_layers())
    ranges: list[list[int]] = []
    for planes in layout.geometry.layers:
        number = layer_number(planes[0].layer)
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in ranges)


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


def _unknown_order(why: str) -> LayoutError:
    return LayoutError(
        f"{why}; the portable format needs the order of the layers in the model. Set format: paged"
    )
