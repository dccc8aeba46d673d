# SPDX-License-Identifier: Apache-2.0
"""A model runner whose layers are in KV groups that share memory: some have a window.

The KV of each layer and head differs, so a block of one group in the place of another's is seen,
and so is a layer or a head in the place of another.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from tests.simulation.engine_device import LateDevice
from tests.simulation.engine_model import (
    TOKEN_WORDS,
    Model,
    Runner,
    RunningRequest,
    Scheduled,
    moved,
)


@dataclass(frozen=True)
class Group:
    """The layers of a KV group, by their numbers in the model."""

    layers: tuple[int, ...]
    window: bool

    @property
    def names(self) -> list[str]:
        """The layers as the engine names them."""
        return [f"layers.{number}" for number in self.layers]


@dataclass(frozen=True)
class Grouping:
    """How an engine forms groups of the layers of one model."""

    groups: tuple[Group, ...]

    @property
    def tensors(self) -> int:
        """The number of tensors, each of which holds a layer of every group, or of some."""
        return max(len(group.layers) for group in self.groups)

    def named(self, pages: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors by their layers' names."""
        return {
            name: page
            for group in self.groups
            for name, page in zip(group.names, pages, strict=False)
        }


_FULL = Group((2, 4), window=False)
ALTERNATING = Grouping((Group((0, 3), window=True), Group((1,), window=True), _FULL))
"""As vLLM forms them: the second group's place in the second tensor is empty."""
MIXED = Grouping((_FULL, Group((1, 0), window=True), Group((3,), window=True)))
"""The same layers, in an order that is not the model's."""
WIDE = Grouping((Group((0, 1, 3), window=True), _FULL))
"""All layers with a window in one group."""


class HybridRunner(Runner):
    """Computes and reads the KV of each layer and head through its group's own block table."""

    def __init__(
        self,
        connector: Any,
        device: LateDevice,
        model: Model,
        tensors: Sequence[torch.Tensor],
        rank: int,
        choice: random.Random,
        window: int,
        grouping: Grouping,
        first_head: int,
        *,
        local: bool = False,
    ) -> None:
        self._window = window
        self._grouping = grouping
        self._first_head = first_head
        self._local = local
        self._tables: dict[int, list[list[int]]] = {}
        super().__init__(connector, device, model, tensors, rank, choice)

    def use(self, pages: Sequence[Any]) -> None:
        """Compute with these KV tensors from now on."""
        self.pages = list(pages)
        self._words_lh = [list(_words_of(tensor).swapaxes(0, 1)) for tensor in pages]

    def move(self) -> None:
        """Have the KV tensors lie elsewhere from now on, and register them again."""
        self.use([moved(layer) for layer in self.pages])
        self.connector.register_kv_caches(self._grouping.named(self.pages))

    def _extend_blocks(self, request: RunningRequest, blocks: Sequence[Sequence[int]]) -> None:
        for table, more in zip(self._tables[id(request)], blocks, strict=True):
            table.extend(more)

    def _begin(self, name: str, tokens: list[int], blocks: Any) -> RunningRequest:
        request = super()._begin(name, tokens, blocks)
        self._tables[id(request)] = [list(table) for table in blocks]
        self._alive.append(request)  # so that its id is not used again
        return request

    @property
    def _alive(self) -> list[RunningRequest]:
        alive: list[RunningRequest] = self.__dict__.setdefault("alive", [])
        return alive

    def _forward(self, scheduled: Sequence[Scheduled], sampled: dict[str, list[int]]) -> None:
        for name, request, begin, count in scheduled:
            request.extend_states()
            assert begin + count <= len(request.tokens), f"{name}: tokens that nobody sampled"
            noise_t = self._noise(count)
            for group, _, mark, kv_bsw in self._heads():
                words_tw = self._words(request, begin, begin + count, mark, noise_t)
                kv_bsw[self._place_in(request, group, begin, begin + count)] = words_tw
        for name, request, begin, count in scheduled:
            for group, window, mark, kv_bsw in self._heads():
                # The window of the first token of this step, and of all after it.
                first = self._first(begin) if window else 0
                self._read_head(name, request, group, mark, kv_bsw, first, begin + count)
            done = begin + count == len(request.tokens)
            sampled[name] = [Model.sample(request.states[-1])] if done else []
            request.tokens.extend(sampled[name])

    def _heads(self) -> list[tuple[int, bool, int, npt.NDArray[np.uint64]]]:
        """Return, for each head of each layer, its group, its mark, and where its KV lies."""
        return [
            (number, group.window, 100 * layer + self._first_head + head, words)
            for number, group in enumerate(self._grouping.groups)
            for layer, words_h in zip(group.layers, self._words_lh, strict=False)
            for head, words in enumerate(words_h)
        ]

    def _first(self, token: int) -> int:
        if self._local:
            return token // self._window * self._window
        return max(0, token - self._window + 1)

    def _expected(
        self, request: RunningRequest, begin: int, end: int, layer: int
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Return the KV of tokens in a head of a layer, which all ranks that hold it compute."""
        state_t = np.array(request.states[begin:end], dtype=np.uint64)
        mark = np.uint64(xxhash.xxh3_64_intdigest(f"head of layer {layer}".encode()))
        return state_t ^ mark, state_t + mark

    def _read_head(
        self,
        name: str,
        request: RunningRequest,
        group: int,
        mark: int,
        kv_bsw: npt.NDArray[np.uint64],
        first: int,
        end: int,
    ) -> None:
        if request.misled:
            return
        words_tw = kv_bsw[self._place_in(request, group, first, end)]
        one, two = self._expected(request, first, end, mark)
        right_t = (words_tw[:, 0] == one) & (words_tw[:, 1] == two)
        right_t &= words_tw[:, 3] == words_tw[:, 2] ^ one
        self._expect(
            right_t, f"{name}, layer and head {mark}, from {first}", "is not that of its prompt"
        )

    def _place_in(
        self, request: RunningRequest, group: int, begin: int, end: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        position_t = np.arange(begin, end)
        table = np.asarray(self._tables[id(request)][group], dtype=np.int64)
        block_t = table[position_t // self._block_size]
        return block_t, position_t % self._block_size


def _words_of(pages: torch.Tensor) -> npt.NDArray[np.uint64]:
    """View a tensor as words, `[block, head, token, word]`."""
    words = pages.view(torch.uint8).numpy().view(np.uint64)
    return words.reshape(*pages.shape[:3], TOKEN_WORDS)
