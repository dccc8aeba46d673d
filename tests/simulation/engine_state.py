# SPDX-License-Identifier: Apache-2.0
"""A model runner with full attention and recurrent states, in KV groups that share memory.

It does what vLLM's V1 runner does in the mode `align`: a request's state is in the block at which
the step ends, so before a step that ends in another block the state is copied there. A step reads
the state before its first token, and compares every byte of it. With `checkpoints`, a prompt's last
step also stores a state within it, as the kernels of Mamba 2 do.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.kv_cache_interface import MambaSpec

from kvhaven.engine.request_state import NULL_BLOCK
from tests.simulation.engine_device import LateDevice
from tests.simulation.engine_model import Model, Runner, RunningRequest, Scheduled, moved

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

GROUPS = 2
"""Groups of layers with states; that of full attention comes before them."""
_SHAPES, _DTYPES = ((4, 8), (8,)), (torch.bfloat16, torch.float32)
"""As linear attention has: a short one for a convolution, and the state itself."""
_WORDS = 12
"""Words of 8 bytes in a state. A page has at least 16: the rest is padding."""


def state_spec(block_size: int, page_bytes: int, *, checkpoints: bool = False) -> MambaSpec:
    """Return the spec of the groups with states."""
    within: dict[str, int] = {}
    if checkpoints:
        within = {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": 1}
    return MambaSpec(
        block_size=block_size,
        shapes=_SHAPES,
        dtypes=_DTYPES,
        page_size_padded=page_bytes,
        mamba_cache_mode="align",
        **within,
    )


def with_states(pages: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors by their layers' names: each holds a layer of every group."""
    named = {f"layer.{index}": page for index, page in enumerate(pages)}
    for index, page in enumerate(pages):
        raw = page.view(torch.uint8).reshape(page.shape[0], 1, 1, -1).view(torch.int8)
        for group in range(GROUPS):
            named[f"layer.{index}.state{group}"] = raw[..., : 8 * _WORDS]
    return named


@dataclass
class StatefulRequest(RunningRequest):
    """What the runner keeps of a request, with the block tables of its states' groups."""

    tables: list[list[int]] = field(default_factory=list)


class StateRunner(Runner):
    """Computes states in place, and copies them to a step's last block before it."""

    def __init__(
        self,
        connector: Any,
        device: LateDevice,
        model: Model,
        tensors: Sequence[torch.Tensor],
        rank: int,
        choice: random.Random,
        *,
        checkpoints: bool,
    ) -> None:
        super().__init__(connector, device, model, tensors, rank, choice)
        self._checkpoints = checkpoints
        self._last_slots: dict[str, int] = {}

    def use(self, pages: Sequence[Any]) -> None:
        """Compute with these KV tensors from now on."""
        super().use(pages)
        self._pages = [
            page.view(torch.uint8).numpy().reshape(page.shape[0], -1).view(np.uint64)
            for page in pages
        ]

    def move(self) -> None:
        """Have the KV tensors lie elsewhere from now on, and register them again."""
        self.use([moved(layer) for layer in self.pages])
        self.connector.register_kv_caches(with_states(self.pages))

    def _begin(self, name: str, tokens: list[int], blocks: Any) -> RunningRequest:
        begun = super()._begin(name, tokens, blocks)
        self._last_slots.pop(name, None)
        tables = [list(table) for table in blocks[1:]]
        return StatefulRequest(**vars(begun), tables=tables)

    def _extend_blocks(self, request: RunningRequest, blocks: Sequence[Sequence[int]]) -> None:
        super()._extend_blocks(request, blocks)
        assert isinstance(request, StatefulRequest)
        for table, more in zip(request.tables, blocks[1:], strict=True):
            table.extend(more)

    def _update_states(self, output: "SchedulerOutput") -> list[Scheduled]:
        for name in (*output.finished_req_ids, *(output.preempted_req_ids or ())):
            self._last_slots.pop(name, None)
        scheduled = super()._update_states(output)
        copies: list[tuple[int, int]] = []
        for name, request, begin, count in scheduled:
            assert isinstance(request, StatefulRequest)
            before = self._last_slots.get(name, (begin - 1) // self._block_size)
            now = self._last_slots[name] = self._slot(begin + count)
            if before not in {-1, now}:
                copies += [(table[before], table[now]) for table in request.tables]
        if copies:
            self.device.compute(lambda: self._copy(copies))
        return scheduled

    def _copy(self, copies: Sequence[tuple[int, int]]) -> None:
        for source, target in copies:
            for page_bw in self._pages:
                page_bw[target, :_WORDS] = page_bw[source, :_WORDS]

    def _forward(self, scheduled: Sequence[Scheduled], sampled: dict[str, list[int]]) -> None:
        for name, request, begin, count in scheduled:
            assert isinstance(request, StatefulRequest)
            request.extend_states()
            within, slot = self._checkpoint(begin, count)
            for group, table in enumerate(request.tables):
                block = table[self._slot(begin + count)]
                for layer, page_bw in enumerate(self._pages):
                    state_w = page_bw[block, :_WORDS]
                    if begin and not request.misled:
                        right_w = self._state(request, group, layer, begin)
                        what = f"is not that of its prompt: group {group}, block {block}"
                        self._expect(state_w == right_w, f"{name} after {begin} tokens", what)
                    state_w[:] = self._state(request, group, layer, begin + count)
                    if within and table[slot] != NULL_BLOCK:
                        kept_w = self._state(request, group, layer, begin + within)
                        page_bw[table[slot], :_WORDS] = kept_w
        super()._forward(scheduled, sampled)

    def _checkpoint(self, begin: int, count: int) -> tuple[int, int]:
        """Return where a step stores a state within it, as vLLM's kernels decide; 0: nowhere."""
        if not self._checkpoints:
            return 0, 0
        from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints

        offsets, slots = compute_mamba_prefill_checkpoints(
            [begin + count],
            [count],
            hash_block_size=self._block_size,
            mamba_block_size=self._block_size,
            checkpoint_alignment=1,
            drop_eagle_block=False,
            cache_hit_alignment_tokens=self._block_size,
        )
        return offsets[0], slots[0]

    def _slot(self, tokens: int) -> int:
        return -(-tokens // self._block_size) - 1

    def _state(self, request: RunningRequest, group: int, layer: int, tokens: int) -> Any:
        """Return the state after the first `tokens` tokens."""
        mark = layer + 100 * (group + 1)
        one, two = self._expected(request, tokens - 1, tokens, mark)
        factors_w = np.arange(1, _WORDS + 1, dtype=np.uint64)
        return one * factors_w ^ two
