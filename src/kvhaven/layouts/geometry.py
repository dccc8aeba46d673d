# SPDX-License-Identifier: Apache-2.0
"""Head geometry: the place of each KV head and token in the engine's tensors."""

from dataclasses import dataclass

import torch

from kvhaven.errors import LayoutError


@dataclass(frozen=True, eq=False)
class Plane:
    """K, V, or MLA's latent of one layer, as a view into the engine's own tensor."""

    layer: str
    name: str
    """`K`, `V` or `latent`."""
    view: torch.Tensor
    """`[kernel blocks, KV heads, tokens, head_dim]`, for any order in memory."""

    @property
    def pointer(self) -> int:
        """Device address of the first element of block 0, head 0, token 0."""
        return self.view.data_ptr()

    @property
    def head_dim(self) -> int:
        """Elements of a head and token."""
        return self.view.shape[3]

    @property
    def item_bytes(self) -> int:
        """Bytes of an element."""
        return self.view.element_size()

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """Bytes from a kernel block, a head, a token and an element to the next."""
        block, head, token, element = (stride * self.item_bytes for stride in self.view.stride())
        return block, head, token, element


@dataclass(frozen=True, eq=False)
class HeadGeometry:
    """The page layout of one rank, down to heads and tokens.

    All layers are alike: the same heads, planes and head_dims.
    """

    layers: tuple[tuple[Plane, ...], ...]
    """K and V, or the latent, of each layer."""
    kernel_blocks: int
    """Kernel blocks in an engine block: engine block `b` begins with kernel block `b *
    kernel_blocks`."""

    @property
    def planes(self) -> tuple[Plane, ...]:
        """The first layer's planes, which represent those of all layers."""
        return self.layers[0]

    @property
    def heads(self) -> int:
        """KV heads of this rank; 1 for MLA."""
        return self.planes[0].view.shape[1]

    @property
    def kernel_block_size(self) -> int:
        """Tokens in a kernel block."""
        return self.planes[0].view.shape[2]

    @property
    def head_dims(self) -> tuple[int, ...]:
        """Elements of a head and token in each plane."""
        return tuple(plane.head_dim for plane in self.planes)

    @property
    def item_bytes(self) -> int:
        """Bytes of an element."""
        return self.planes[0].item_bytes

    @property
    def dtype(self) -> str:
        """The elements' type by torch's name: `bfloat16`."""
        return str(self.planes[0].view.dtype).removeprefix("torch.")

    @property
    def token_bytes(self) -> int:
        """Bytes of one head and token in one layer."""
        return sum(self.head_dims) * self.item_bytes


def require_alike(geometry: HeadGeometry) -> None:
    """Raise `LayoutError` unless all layers are alike: a shard is one head of all layers."""
    first = geometry.planes
    for layer in geometry.layers:
        for plane, like in zip(layer, first, strict=True):
            shape, wanted = tuple(plane.view.shape), tuple(like.view.shape)
            if (shape, plane.view.dtype) != (wanted, like.view.dtype):
                raise LayoutError(
                    f"{plane.name} of {plane.layer} is {shape} of {plane.view.dtype} (kernel "
                    f"blocks, heads, tokens, head_dim), that of {like.layer} {wanted} of "
                    f"{like.view.dtype}: the portable format needs all layers alike; set "
                    "format: paged"
                )
