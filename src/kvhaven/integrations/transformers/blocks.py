# SPDX-License-Identifier: Apache-2.0
"""Memory for the KV of prompts in blocks, and its views in the form of a `DynamicCache`."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from transformers.cache_utils import CacheLayerMixin, DynamicCache

from kvhaven.errors import KVHavenError

BLOCK = 256
"""Tokens in a block if it divides the setting `chunk_size`; otherwise a block is a chunk."""


class LayerShape(NamedTuple):
    """KV of one layer: number of heads, and of elements of K and V for each head and token."""

    heads: int
    keys: int
    values: int
    dtype: torch.dtype
    device: torch.device

    def require(self, layer: CacheLayerMixin, rows: int, tokens: int) -> None:
        """Raise `KVHavenError` unless a cache layer has `rows` rows of this shape, long enough."""
        for found, elements in ((layer.keys, self.keys), (layer.values, self.values)):
            shape = tuple(found.shape) if found is not None else ()
            wanted = (rows, self.heads, "at least", tokens, elements)
            alike = len(shape) == 4 and (*shape[:2], shape[3]) == (rows, self.heads, elements)  # noqa: PLR2004 - batch, heads, tokens, elements
            if found is None or not alike or shape[2] < tokens or found.dtype != self.dtype:
                raise KVHavenError(f"the cache has KV of another shape (got {shape}, not {wanted})")


class Blocks:
    """Blocks for several rows of prompts, a tensor for each layer.

    A layer's memory is `[block, token, head, K then V]`, so that consecutive blocks are one run of
    tokens and can be used as a cache without a copy. `kv_caches` has views of shape
    `[block, head, token, K then V]`, as `connect_worker` expects.
    """

    def __init__(self, layers: Sequence[LayerShape], blocks: int, size: int) -> None:
        self.size = size
        self._layers = layers
        self._memory = [
            torch.empty(
                (blocks, size, layer.heads, layer.keys + layer.values),
                dtype=layer.dtype,
                device=layer.device,
            )
            for layer in layers
        ]

    @property
    def kv_caches(self) -> Mapping[str, torch.Tensor]:
        """The tensors by layer name."""
        return {f"layer {at}": one.transpose(1, 2) for at, one in enumerate(self._memory)}

    def fill(self, cache: DynamicCache, rows: Sequence[range], tokens: int) -> None:
        """Fill an empty cache with the first `tokens` tokens of each row's blocks."""
        for at, (layer, memory) in enumerate(zip(self._layers, self._memory, strict=True)):
            kv = torch.stack([self._row(memory, row)[:tokens] for row in rows]).transpose(1, 2)
            cache.update(kv[..., : layer.keys], kv[..., layer.keys :], at)

    def take(self, cache: DynamicCache, rows: Sequence[range], start: int, end: int) -> None:
        """Copy the KV of tokens `start` to `end` from a cache into each row's blocks."""
        for at, (layer, memory) in enumerate(zip(self._layers, self._memory, strict=True)):
            keys, values = cache.layers[at].keys, cache.layers[at].values
            for index, row in enumerate(rows):
                target = self._row(memory, row)[start:end]
                target[..., : layer.keys] = keys[index, :, start:end].transpose(0, 1)
                target[..., layer.keys :] = values[index, :, start:end].transpose(0, 1)

    def _row(self, memory: torch.Tensor, row: range) -> torch.Tensor:
        """Return the tokens of consecutive blocks, shape `[token, head, K then V]`."""
        return memory[row.start : row.stop].flatten(0, 1)
