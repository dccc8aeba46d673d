# SPDX-License-Identifier: Apache-2.0
"""The portable format of a model with several KV groups: its layers by their numbers."""

from collections.abc import Sequence

from kvhaven.errors import LayoutError
from kvhaven.layouts.geometry import HeadGeometry, require_alike
from kvhaven.layouts.paged import PagedLayout
from kvhaven.layouts.portable import PortableLayout


def portable_layout(paged: PagedLayout, groups: Sequence[HeadGeometry | None]) -> PortableLayout:
    """Return the portable layout of a part's KV groups, whose pages together are `paged`.

    A group is None if this rank has no layers of it. The layers are in the order of their numbers
    in the model, since other engines may form groups of different layers. Raises
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
    """Return the number of a layer in the model: the only one in its name.

    Raises `LayoutError` if there is none, or several.
    """
    numbers = [int(word) for word in layer.split(".") if word.isdecimal()]
    if len(numbers) != 1:
        raise _unknown_order(f"layer {layer}: its name has {len(numbers)} numbers")
    return numbers[0]


def numbered_layers(layout: PortableLayout) -> str:
    """Return the numbers of a layout's layers in the model, as ranges (`0-4,6-10`).

    Raises `LayoutError` as `layer_number` does.
    """
    ranges: list[list[int]] = []
    for planes in layout.geometry.layers:
        number = layer_number(planes[0].layer)
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in ranges)


def _unknown_order(why: str) -> LayoutError:
    return LayoutError(
        f"{why}; the portable format needs the order of the layers in the model. Set format: paged"
    )
