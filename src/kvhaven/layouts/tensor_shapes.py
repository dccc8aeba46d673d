# SPDX-License-Identifier: Apache-2.0
"""The forms in which engines register the KV of a layer: the meaning of each tensor dimension."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvhaven.errors import LayoutError

FORMS = {
    "BHNC": "one tensor, K next to V: vLLM 0.29 and newer, FlashAttention of 0.26 to 0.28",
    "BNC": "one tensor of latents: MLA before 0.29, and on Gaudi",
    "2BNHD": "one tensor, K and V apart outside the blocks: FlashAttention to 0.22",
    "B2NHD": "one tensor, K and V apart in a block: FlashInfer, Triton, FlashAttention to 0.25",
    "2BHND": "one tensor, K and V apart outside the blocks: CPU to 0.22",
    "BNHD": "a pair of tensors, K and V: Gaudi",
}
"""Named by the dimensions: 2 (K and V), B (blocks), N (tokens), H (KV heads), D (head_dim), and C
(K and V of a head and token next to each other, or MLA's latent). The order of the dimensions in
memory is read from strides, so that `BHNC` alone covers the six physical orders of 0.29."""

_PAIR = "BNHD"
_TOLD_BY_THEIR_DIMENSIONS = {4: "BHNC", 3: "BNC"}


class Part(NamedTuple):
    """A layer's KV, or its K or V."""

    name: str
    """`K`, `V`, or empty for both."""
    dimensions: str
    """Letters as in `FORMS`, B first."""
    view: torch.Tensor


@dataclass(frozen=True, eq=False)
class LayerCache:
    """The tensors that the engine registered for one layer."""

    layer: str
    form: str
    """A key of `FORMS`."""
    tensors: tuple[torch.Tensor, ...]
    """One tensor, or a pair of K and V."""
    num_blocks: int
    """The number of engine blocks."""

    @property
    def found(self) -> str:
        """Shapes, strides and types, for messages."""
        tensors = " and ".join(
            f"shape {tuple(tensor.shape)}, strides {tensor.stride()} of {tensor.dtype} "
            f"({tensor.element_size()} bytes)"
            for tensor in self.tensors
        )
        return f"{self.layer} ({self.form}): {tensors}, {self.num_blocks} blocks"

    def size(self, dimension: str) -> int:
        """Return the length of a dimension of the form."""
        return self.tensors[0].shape[self.form.index(dimension)]

    def parts(self) -> list[Part]:
        """Split K from V if they lie apart outside of the blocks.

        Planes in a block (`B2NHD`) and in the content (`BHNC`) stay together.
        """
        if self.form == _PAIR:
            return [
                Part(name, self.form, view) for name, view in zip("KV", self.tensors, strict=True)
            ]
        (tensor,) = self.tensors
        if self.form.startswith("2"):
            return [Part(name, self.form[1:], tensor[plane]) for plane, name in enumerate("KV")]
        return [Part("", self.form, tensor)]


def layer_cache(
    layer: str,
    registered: torch.Tensor | Sequence[torch.Tensor],
    form: str | None,
    num_blocks: int,
) -> LayerCache:
    """Return the tensors that were registered for a layer, with their form.

    `form` is the form known from the attention backend; without it, only forms that the number of
    dimensions determines are accepted. Raises `LayoutError` if the shapes do not agree with the
    form.
    """
    tensors = (registered,) if isinstance(registered, torch.Tensor) else tuple(registered)
    if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        kinds = " and ".join(type(tensor).__name__ for tensor in tensors)
        raise LayoutError(
            f"{layer}: registered {kinds}; expected tensors only. Check whether a plane is missing"
        )
    word = form or _guess(tensors)
    cache = LayerCache(layer, word, tensors, num_blocks)
    if word not in FORMS:
        known = "; ".join(f"{name} ({what})" for name, what in FORMS.items())
        raise LayoutError(f"{cache.found}: unknown tensor form; expected one of {known}")
    wanted = 2 if word == _PAIR else 1
    if len(tensors) != wanted:
        raise LayoutError(
            f"{cache.found}; {len(tensors)} tensors a layer, but {word} has {wanted} "
            f"({FORMS[word]})"
        )
    for tensor in tensors:
        _check(cache, tensor)
    if wanted > 1 and tensors[0].shape[:-1] != tensors[1].shape[:-1]:
        raise LayoutError(f"{cache.found}; K and V differ in more than head_dim")
    return cache


def _guess(tensors: Sequence[torch.Tensor]) -> str:
    if len(tensors) != 1:
        return _PAIR
    dimensions = tensors[0].dim()
    return _TOLD_BY_THEIR_DIMENSIONS.get(dimensions, f"{dimensions} dimensions, form not given")


def _check(cache: LayerCache, tensor: torch.Tensor) -> None:
    """Raise `LayoutError` if a tensor's shape is not that of the form."""
    if tensor.dim() != len(cache.form) or tensor.numel() == 0:
        raise LayoutError(
            f"{cache.found}; expected {len(cache.form)} dimensions, none empty, as {cache.form} "
            f"has ({FORMS[cache.form]})"
        )
    if tensor.stride(-1) != 1:
        raise LayoutError(f"{cache.found}; expected a dense last dimension (the content)")
    if "2" in cache.form and tensor.shape[cache.form.index("2")] != 2:  # noqa: PLR2004 - K and V
        raise LayoutError(
            f"{cache.found}; expected 2 (K and V) in dimension {cache.form.index('2')}"
        )
    blocks = tensor.shape[cache.form.index("B")]
    if blocks % cache.num_blocks:
        raise LayoutError(
            f"{cache.found}; dimension {cache.form.index('B')} is not the engine's "
            f"{cache.num_blocks} blocks, nor a multiple of them (smaller kernel blocks)"
        )
