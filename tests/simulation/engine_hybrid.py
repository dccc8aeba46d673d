# SPDX-License-Identifier: Apache-2.0
"""A model runner whose layers are in three KV groups that share memory: two have a window.

The KV of each group differs, so a block of one group in the place of another's is seen.
"""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tests.simulation.engine_device import LateDevice
from tests.simulation.engine_model import Model, Runner, RunningRequest, Scheduled, moved

FULL_GROUP = 2
GROUPS = 3


def in_groups(pages: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors by their layers' names: each holds a layer of every group."""
    named = {
        f"layer.{index}.window{group}": page
        for group in range(FULL_GROUP)
        for index, page in enumerate(pages)
    }
    return named | {f"layer.{index}": page for index, page in enumerate(pages)}


class HybridRunner(Runner):
    """Computes and reads the KV of each group through the group's own block table."""

    def __init__(
        self,
        connector: Any,
        device: LateDevice,
        model: Model,
        tensors: Sequence[torch.Tensor],
        rank: int,
        choice: random.Random,
        window: int,
        *,
        local: bool = False,
    ) -> None:
        super().__init__(connector, device, model, tensors, rank, choice)
        self._window = window
        self._local = local
        self._tables: dict[int, list[list[int]]] = {}

    def move(self) -> None:
        """Have the KV tensors lie elsewhere from now on, and register them again."""
        self.use([moved(layer) for layer in self.pages])
        self.connector.register_kv_caches(in_groups(self.pages))

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
            for group in range(GROUPS):
                for layer, kv_bsw in enumerate(self._kv):
                    words_tw = self._words(
                        request, begin, begin + count, self._mark(layer, group), noise_t
                    )
                    kv_bsw[self._place_in(request, group, begin, begin + count)] = words_tw
        for name, request, begin, count in scheduled:
            for group in range(GROUPS):
                # The window of the first token of this step, and of all after it.
                first = 0 if group == FULL_GROUP else self._first(begin)
                for layer in range(len(self._kv)):
                    self._read_group(name, request, group, layer, first, begin + count)
            done = begin + count == len(request.tokens)
            sampled[name] = [Model.sample(request.states[-1])] if done else []
            request.tokens.extend(sampled[name])

    def _first(self, token: int) -> int:
        if self._local:
            return token // self._window * self._window
        return max(0, token - self._window + 1)

    @staticmethod
    def _mark(layer: int, group: int) -> int:
        return layer + 100 * group

    def _read_group(
        self, name: str, request: RunningRequest, group: int, layer: int, first: int, end: int
    ) -> None:
        if request.misled:
            return
        kv_bsw = self._kv[layer]
        words_tw = kv_bsw[self._place_in(request, group, first, end)]
        one, two = self._expected(request, first, end, self._mark(layer, group))
        right_t = (words_tw[:, 0] == one) & (words_tw[:, 1] == two)
        right_t &= words_tw[:, 3] == words_tw[:, 2] ^ one
        self._expect(right_t, f"{name}, group {group}, from {first}", "is not that of its prompt")

    def _place_in(
        self, request: RunningRequest, group: int, begin: int, end: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        position_t = np.arange(begin, end)
        table = np.asarray(self._tables[id(request)][group], dtype=np.int64)
        block_t = table[position_t // self._block_size]
        return block_t, position_t % self._block_size
