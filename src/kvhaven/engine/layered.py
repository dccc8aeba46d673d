# SPDX-License-Identifier: Apache-2.0
"""Groups of layers of a paged layout, whose copies the forward pass waits for one after another."""

from dataclasses import replace
from typing import Final, NamedTuple

from kvhaven.errors import LayoutError
from kvhaven.layouts import PagedLayout

LAYERS: Final = 4
"""Layers in a group. A group costs the host a submission, and a copy some calls of the driver."""


class LayerGroup(NamedTuple):
    """Some consecutive layers, as a layout of their own."""

    layout: PagedLayout
    before: int
    """Bytes of one block that precede the group's in a shard's payload."""


class LayerGroups:
    """All layers of a paged layout, in groups in the order of the payload, `[run][block][page]`.

    The payload of a chunk of `n` blocks holds that of a group from byte `n * before` on. Raises
    `LayoutError` if a group's runs are not consecutive.
    """

    def __init__(self, layout: PagedLayout) -> None:
        layers = [cache.layer for cache in layout.caches]
        self.of_layer = {layer: index // LAYERS for index, layer in enumerate(layers)}
        """The number of each layer's group. Layers that alias others have none."""
        of_run = [self._group_of(run.layer) for run in layout.layers]
        if of_run != sorted(of_run):
            raise LayoutError(
                f"layers: not in the order of their tensors (got "
                f"{[run.layer for run in layout.layers]}); set layered_load_ms to 0"
            )
        self.groups: list[LayerGroup] = []
        before = 0
        for group in range(-(-len(layers) // LAYERS)):
            own = [index for index, number in enumerate(of_run) if number == group]
            part = replace(
                layout,
                layers=tuple(layout.layers[index] for index in own),
                tensors=tuple(layout.tensors[index] for index in own),
                caches=layout.caches[group * LAYERS : (group + 1) * LAYERS],
            )
            self.groups.append(LayerGroup(part, before))
            before += part.block_bytes

    def _group_of(self, run: str) -> int:
        """Return the group of a run: its name is the layer's, or that and `K`, `V` or a head."""
        found = self.of_layer.get(run)
        return self.of_layer[run.split(" ", maxsplit=1)[0]] if found is None else found
