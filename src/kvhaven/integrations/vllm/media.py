# SPDX-License-Identifier: Apache-2.0
"""Media of vLLM's requests, for `kvhaven.engine.media`."""

from collections.abc import Mapping
from typing import Any

from kvhaven.engine.adapters import Adapters
from kvhaven.engine.extras import ContentExtras
from kvhaven.engine.media import MediaFeature
from kvhaven.integrations.vllm.loaded_model import OBJECTS
from kvhaven.keys import KeyInputError


class VllmMedia:
    """Reads vLLM's `MultiModalFeatureSpec`.

    Its identifier may be a counter (with vLLM's caches off) or a client's UUID for the item. A
    digest computed by vLLM is no identity either: of an image with an ImageID in its EXIF data it
    covers only that id.
    """

    objects_of = OBJECTS

    def identifier(self, item: Any) -> object:
        """Return an item's identifier."""
        return getattr(item, "identifier", None)

    def feature(self, item: Any, adapter: str | None) -> MediaFeature:
        """Return an item's feature."""
        place = item.mm_position
        return MediaFeature(
            item.identifier,
            item.modality,
            item.data,
            place.offset,
            place.length,
            getattr(place, "is_embed", None),
            # vLLM marks encodings that an adapter affects in this way.
            tower=adapter is not None and item.identifier.startswith(f"{adapter}:"),
        )

    def size(self, data: Any) -> int:
        """Return the number of bytes of an item's visible tensors."""
        if isinstance(data, Mapping):
            return sum(self.size(getattr(element, "data", None)) for element in data.values())
        if isinstance(data, list | tuple):
            return sum(map(self.size, data))
        return int(getattr(data, "nbytes", 0))

    def tensors(self, data: Any) -> dict[str, Any]:
        """Return an item's tensors. Raises `KeyInputError` if this process does not have them."""
        if not isinstance(data, Mapping) or not data:
            raise KeyInputError(
                "its content is not in the scheduler's process (got "
                f"{type(data).__name__}); set --mm-processor-cache-type lru"
            )
        fields = {name: getattr(element, "data", None) for name, element in data.items()}
        absent = [name for name, value in fields.items() if value is None]
        if absent:
            raise KeyInputError(
                f"field {absent[0]!r} has no data in the scheduler's process; set "
                "--mm-processor-cache-type lru"
            )
        return fields


def extras_of(adapters: Adapters) -> ContentExtras:
    """Return the source of the extras of vLLM's requests."""
    return ContentExtras(adapters, VllmMedia())
