# SPDX-License-Identifier: Apache-2.0
"""The portable format: one shard per KV head, convertible from any known page layout."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from kvhaven.errors import LayoutError
from kvhaven.layouts.base import IntArray, Pieces, shard_stride
from kvhaven.layouts.geometry import HeadGeometry
from kvhaven.layouts.paged import PagedLayout
from kvhaven.types import ShardId


@dataclass(frozen=True, eq=False)
class PortableLayout:
    """One rank's KV as canonical shards, one per KV head, for any layout of the engine.

    A shard's payload is `[layer][K, V][token][head_dim]` for the tokens of the chunk in order (for
    MLA `[layer][token][latent]`), little-endian, in the engine's own element type. So it depends
    neither on the block size nor on the number of ranks that share the heads.

    With several KV groups, whose layers may lie in the same memory, a chunk has equally many blocks
    of each, one group's after the other's. The payload depends on the order of `geometry.layers`
    alone, not on their groups.
    """

    paged: PagedLayout
    geometry: HeadGeometry
    tail: int = 0
    """Tokens of a chunk if the chunks are tails, whose last block is not full; else 0."""
    tail_stride: int = 0
    """Bytes from one head's shard of a tail to the next."""
    groups: int = 1
    """The number of KV groups that a chunk has blocks of."""
    layer_groups: tuple[int, ...] = ()
    """The number of each layer's KV group; empty if there is one group."""

    @property
    def padded(self) -> bool:
        """Whether some bytes of a chunk's blocks belong to no token or layer of it."""
        full = len(self.paged.caches) * self.groups
        return bool(self.tail) or len(self.geometry.layers) < full

    @property
    def num_blocks(self) -> int:
        """The number of engine blocks: ids are 0 to `num_blocks - 1`."""
        return self.paged.num_blocks

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.paged.block_size

    @property
    def heads(self) -> int:
        """KV heads of this rank."""
        return self.geometry.heads

    @property
    def shards(self) -> int:
        """The number of shards of a chunk that this rank holds: one per head, in order."""
        return self.heads

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The engine's own tensors."""
        return self.paged.tensors

    @property
    def description(self) -> str:
        """The layout in words."""
        groups = f" of {self.groups} KV groups" if self.groups > 1 else ""
        return f"portable, {self.heads} heads{groups}, read from {self.paged.description}"

    def shard_bytes(self, blocks: int) -> int:
        """Return the payload size in bytes of each head's shard of a chunk of `blocks` blocks."""
        geometry = self.geometry
        tokens = self.tail or self.block_size * blocks // self.groups
        return len(geometry.layers) * geometry.token_bytes * tokens

    def shard_stride(self, blocks: int) -> int:
        """Return the bytes from one head's shard to the next: a multiple of 4096."""
        return self.tail_stride or shard_stride(self.shard_bytes(blocks))

    def payload_bytes(self, blocks: int) -> int:
        """Return the bytes of a chunk's memory, from the first head's shard to the last's end."""
        return (self.heads - 1) * self.shard_stride(blocks) + self.shard_bytes(blocks)

    def of_tail(self, tokens: int, chunk_size: int) -> "PortableLayout":
        """Return the layout of tails: exactly `tokens` tokens, at the places of a full chunk."""
        stride = self.shard_stride(chunk_size // self.block_size)
        return replace(self, tail=tokens, tail_stride=stride)

    def tail_tokens(self, tokens: int) -> int:
        """Return the tokens of the tail: no others are stored."""
        return tokens

    def geometry_fields(self, *, layers: str, heads: int) -> dict[str, str]:
        """Return the namespace's fields of the geometry.

        KV is interchangeable only if they are equal. `layers` and `heads` are the whole model's.
        """
        geometry = self.geometry
        return {
            "kv_planes": ",".join(plane.name for plane in geometry.planes),
            "kv_layers": layers,
            "kv_heads": str(heads),
            "kv_head_dims": ",".join(map(str, geometry.head_dims)),
            "kv_dtype": geometry.dtype,
        }

    @cached_property
    def pieces(self) -> Pieces:
        """One piece for a head's tokens of a block if they are dense, else one per token.

        Raises `LayoutError` if the elements of a token are not adjacent (K on the CPU), for tails,
        of whose last block only some pieces are copied, and for several KV groups.
        """
        if self.groups > 1:
            raise LayoutError(f"blocks of {self.groups} KV groups are not copied in equal pieces")
        if self.tail:
            raise LayoutError(f"a tail of {self.tail} tokens is not copied in pieces of blocks")
        geometry = self.geometry
        item, tokens = geometry.item_bytes, geometry.kernel_block_size
        planes = [plane for layer in geometry.layers for plane in layer]
        scattered = [plane for plane in planes if plane.strides[3] != item]
        if scattered:
            raise LayoutError(
                f"{scattered[0].name} of {scattered[0].layer} has its elements "
                f"{scattered[0].strides[3]} bytes apart; only the CPU device can copy it"
            )
        row = np.array([plane.head_dim * item for plane in planes], dtype=np.int64)
        dense = all(plane.strides[2] == plane.head_dim * item for plane in planes)
        whole = row * self.block_size
        heads = np.arange(self.heads, dtype=np.int64)
        pointer, block, head, token = (
            np.array(values, dtype=np.int64)
            for values in zip(*((p.pointer, *p.strides[:3]) for p in planes), strict=True)
        )

        def of_each_head(values: IntArray) -> IntArray:
            return np.tile(values, self.heads)

        return Pieces(
            device=(pointer + heads[:, None] * head).ravel(),
            block_stride=of_each_head(block),
            piece_stride=of_each_head(token),
            size=of_each_head(row * tokens if dense else row),
            shard=np.repeat(heads, len(planes)),
            before=of_each_head(np.cumsum(whole) - whole),
            per_block=1 if dense else tokens,
            kernel_blocks=geometry.kernel_blocks,
        )


def head_shards(
    total_heads: int, tp_size: int, tp_rank: int, *, group: int, layers: tuple[int, int]
) -> list[ShardId]:
    """Return the shards that a tensor-parallel rank holds in the portable format, in order.

    With fewer heads than ranks, several ranks hold a head, and its shard is the same for all of
    them: any may write it, all read it. MLA has one head. Raises `LayoutError` if heads and ranks
    do not divide each other, or if there is no such rank.
    """
    if not 0 <= tp_rank < tp_size or total_heads < 1:
        raise LayoutError(
            f"rank {tp_rank} of {tp_size} with {total_heads} KV heads is invalid; expected a rank "
            "from 0 to below the number of ranks, and at least one head"
        )
    if total_heads % tp_size and tp_size % total_heads:
        raise LayoutError(
            f"{total_heads} KV heads cannot be split evenly over {tp_size} ranks; expected one "
            "number to divide the other. Choose another tensor_parallel_size"
        )
    first = tp_rank * total_heads // tp_size
    end = max(first + 1, (tp_rank + 1) * total_heads // tp_size)
    return [ShardId(group, layers, (head, head + 1)) for head in range(first, end)]
