# SPDX-License-Identifier: Apache-2.0
"""A stand-in model whose KV can be recognised, and a model runner that calls the connector.

The KV of position `p` is a function of the weights, the salt and all tokens up to `p`, and of
the computation that made it (two computations of the same KV differ in their last bits). Each
step reads all earlier KV through the block table, as attention does, and compares every byte: a
copy that was early, late, stale or wrong is seen, and so is one that changes what a running
request has read before.
"""

import pickle
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvhaven.integrations.vllm.parts import REPORTS_FAILED_REQUESTS
from tests.simulation.engine_device import LateDevice, Op

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

VOCABULARY = 5
TOKEN_WORDS = 4
"""KV of a token in one layer: words of 8 bytes, two of them the computation's."""


class Model:
    """The function that the KV must equal. `weights` changes when they are updated."""

    def __init__(self) -> None:
        self.weights = 0

    def start(self, salt: str | None) -> int:
        """Return the state before the first token."""
        return xxhash.xxh3_64_intdigest(f"{self.weights} {salt}".encode())

    @staticmethod
    def after(state: int, token: int) -> int:
        """Return the state after one more token."""
        return xxhash.xxh3_64_intdigest(state.to_bytes(8, "little") + token.to_bytes(4, "little"))

    @staticmethod
    def sample(state: int) -> int:
        """Return the next token."""
        return state % VOCABULARY

    def continuation(self, salt: str | None, prompt: Sequence[int], length: int) -> list[int]:
        """Return the tokens that must be generated after a prompt."""
        state = self.start(salt)
        for token in prompt:
            state = self.after(state, token)
        output = []
        for _ in range(length):
            output.append(self.sample(state))
            state = self.after(state, output[-1])
        return output


@dataclass
class RunningRequest:
    """What the runner keeps of a request; `states[p]` is the model's state after token `p`."""

    tokens: list[int]
    blocks: list[int]
    start: int
    salt: str | None
    weights: int
    misled: bool = False
    """Whether it computes from KV that vLLM never computed, so that its own is wrong, too."""
    states: list[int] = field(default_factory=list)
    seen: dict[int, npt.NDArray[np.uint64]] = field(default_factory=dict)

    def extend_states(self) -> None:
        """Compute the states of tokens that have none yet."""
        state = self.states[-1] if self.states else self.start
        for token in self.tokens[len(self.states) :]:
            state = Model.after(state, token)
            self.states.append(state)


def moved(pages: Any) -> Any:
    """Return KV tensors with the same content elsewhere; those of before are overwritten."""
    if isinstance(pages, tuple):
        return tuple(moved(part) for part in pages)
    copy = pages.clone()
    pages.view(torch.uint8).fill_(0xAB)
    return copy


Scheduled = tuple[str, RunningRequest, int, int]
"""A request of a step: its name, its state, the first token to compute, and how many."""


@dataclass
class StepResult:
    """A step that was launched; `sampled` is filled when its compute runs."""

    requests: list[str]
    sampled: dict[str, list[int]]
    op: Op | None
    connector: KVConnectorOutput


class Runner:
    """One rank's model runner, in the order of calls of vLLM's own (see `vllm-facts`).

    `linger` is called between the calls; it lets device work run, or not.
    """

    device: Any
    """A `LateDevice`, or another that can be driven like it."""

    def __init__(
        self,
        connector: Any,
        device: LateDevice,
        model: Model,
        tensors: Sequence[torch.Tensor],
        rank: int,
        choice: random.Random,
    ) -> None:
        self.connector = connector
        self.device = device
        self._model = model
        self._rank = rank
        self._choice = choice
        self._requests: dict[str, RunningRequest] = {}
        self._block_size = tensors[0].shape[2]
        self.use(tensors)
        self._computations = 0
        self.salts: dict[str, str | None] = {}
        self.misled: set[str] = set()
        """Requests that start in this step on blocks that vLLM never computed."""

    def use(self, pages: Sequence[Any]) -> None:
        """Compute with these KV tensors from now on."""
        self.pages = list(pages)
        self._kv = [
            tensor.view(torch.uint8)
            .numpy()
            .view(np.uint64)
            .reshape(tensor.shape[0], self._block_size, TOKEN_WORDS)
            for tensor in pages
        ]

    def move(self) -> None:
        """Have the KV tensors lie elsewhere from now on, and register them again."""
        self.use([moved(layer) for layer in self.pages])
        self.connector.register_kv_caches(
            {f"layer.{index}": layer for index, layer in enumerate(self.pages)}
        )

    def execute(self, output: "SchedulerOutput") -> StepResult:
        """Launch a step and return at once; its compute is on the device's stream."""
        # Another process gets a pickled plan; the same process gets the very object.
        metadata = output.kv_connector_metadata
        if self._choice.random() < 0.5:
            metadata = pickle.loads(pickle.dumps(metadata))
        connector = self.connector
        connector.handle_preemptions(metadata)
        scheduled = self._update_states(output)
        connector.bind_connector_metadata(metadata)
        self._linger()
        if output.has_sync_kv_loads:
            connector.start_load_kv(self._context(scheduled))
            self._linger()
        result = StepResult([name for name, *_ in scheduled], {}, None, KVConnectorOutput())
        if scheduled:
            self.launch(scheduled, result)
        self._linger()
        if not output.has_sync_kv_loads:
            connector.start_load_kv(None)
        connector.wait_for_save()
        self._linger()
        if REPORTS_FAILED_REQUESTS:
            results = connector.get_transfer_results(output.finished_req_ids)
            result.connector.finished_sending = results.finished_sending or None
            result.connector.finished_recving = results.finished_recving or None
            result.connector.failed_recving = results.failed_recving
        else:  # vLLM 0.29
            sent, received = connector.get_finished(output.finished_req_ids)
            result.connector.finished_sending = sent or None
            result.connector.finished_recving = received or None
        result.connector.invalid_block_ids = connector.get_block_ids_with_load_errors()
        result.connector.kv_connector_stats = connector.get_kv_connector_stats()
        result.connector.kv_connector_worker_meta = pickle.loads(
            pickle.dumps(connector.build_connector_worker_meta())
        )
        connector.clear_connector_metadata()
        return result

    def finish(self, result: StepResult) -> ModelRunnerOutput:
        """Wait for a step's compute and return its output."""
        op = result.op
        if op is not None:
            self.device.run_until(lambda: op.done)
        return ModelRunnerOutput(
            req_ids=result.requests,
            req_id_to_index={name: index for index, name in enumerate(result.requests)},
            sampled_token_ids=[result.sampled[name] for name in result.requests],
            kv_connector_output=result.connector,
        )

    def launch(self, scheduled: Sequence[Scheduled], result: StepResult) -> None:
        """Put a step's compute on the device."""
        result.op = self.device.compute(lambda: self._forward(scheduled, result.sampled))

    def _context(self, scheduled: Sequence[Scheduled]) -> Any:
        """Return the context of a step's forward, as far as the connector asks for it."""
        return None

    def _linger(self) -> None:
        for _ in range(self._choice.choice((0, 0, 0, 1, 2, 8))):
            self.device.tick()

    def _update_states(self, output: "SchedulerOutput") -> list[Scheduled]:
        for name in output.finished_req_ids:
            self._requests.pop(name, None)
        starts: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            # For vLLM's V2 runner, a resumed request is a new one, with its output.
            tokens = getattr(new, "prefill_token_ids", None) or new.prompt_token_ids
            self._requests[new.req_id] = self._begin(new.req_id, list(tokens), new.block_ids)
            starts[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for index, name in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[index]
            if name in cached.resumed_req_ids:
                self._requests[name] = self._begin(name, list(cached.all_token_ids[name]), blocks)
            elif blocks is not None:
                self._extend_blocks(self._requests[name], blocks)
            starts[name] = cached.num_computed_tokens[index]
        return [
            (name, self._requests[name], starts[name], count)
            for name, count in output.num_scheduled_tokens.items()
        ]

    def _extend_blocks(self, request: RunningRequest, blocks: Sequence[Sequence[int]]) -> None:
        request.blocks.extend(blocks[0])

    def _begin(self, name: str, tokens: list[int], blocks: Any) -> RunningRequest:
        salt = self.salts.get(name)
        misled = name in self.misled
        start = self._model.start(f"misled {salt}" if misled else salt)
        return RunningRequest(tokens, list(blocks[0]), start, salt, self._model.weights, misled)

    def _forward(
        self,
        scheduled: Sequence[Scheduled],
        sampled: dict[str, list[int]],
    ) -> None:
        """Compute a step: all writes of the batch come first, as a layer writes before it reads.

        (A request may share blocks that another one fills in the very same step.)
        """
        for name, request, begin, count in scheduled:
            request.extend_states()
            assert begin + count <= len(request.tokens), f"{name}: tokens that nobody sampled"
            self._write(request, begin, begin + count)
        for name, request, begin, count in scheduled:
            self._read(name, request, begin + count)
            done = begin + count == len(request.tokens)
            sampled[name] = [Model.sample(request.states[-1])] if done else []
            request.tokens.extend(sampled[name])

    def _write(self, request: RunningRequest, begin: int, end: int) -> None:
        noise_t = self._noise(end - begin)
        for layer, kv_bsw in enumerate(self._kv):
            words_tw = self._words(request, begin, end, layer, noise_t)
            kv_bsw[self._place(request, begin, end)] = words_tw

    def _read(self, name: str, request: RunningRequest, end: int) -> None:
        for layer, kv_bsw in enumerate(self._kv):
            words_tw = kv_bsw[self._place(request, 0, end)]
            self._compare(name, request, end, layer, words_tw)

    def _noise(self, tokens: int) -> npt.NDArray[np.uint64]:
        """Return what tells this computation from others of the same KV."""
        self._computations += 1
        noise = xxhash.xxh3_64_intdigest(f"{self._rank} {self._computations}".encode())
        return np.full(tokens, noise, np.uint64)

    def _words(
        self,
        request: RunningRequest,
        begin: int,
        end: int,
        layer: int,
        noise_t: npt.NDArray[np.uint64],
    ) -> npt.NDArray[np.uint64]:
        """Return the KV of tokens, `[token, TOKEN_WORDS]`."""
        first, second = self._expected(request, begin, end, layer)
        return np.stack([first, second, noise_t, noise_t ^ first], axis=-1)

    def _compare(
        self,
        name: str,
        request: RunningRequest,
        end: int,
        layer: int,
        words_tw: npt.NDArray[np.uint64],
    ) -> None:
        """Compare what was read of the first `end` tokens, unless vLLM misled the request."""
        if request.misled:
            return
        first, second = self._expected(request, 0, end, layer)
        right_t = (words_tw[:, 0] == first) & (words_tw[:, 1] == second)
        right_t &= words_tw[:, 3] == words_tw[:, 2] ^ first
        self._expect(right_t, name, "is not that of its prompt")
        before_t = request.seen.get(layer, words_tw[:0, 2])[:end]
        same_t = words_tw[: len(before_t), 2] == before_t
        self._expect(same_t, name, "was changed under it")
        request.seen[layer] = words_tw[:, 2].copy()

    def _expect(self, good_t: npt.NDArray[np.bool_], name: str, what: str) -> None:
        bad = np.flatnonzero(~good_t)
        assert not len(bad), (
            f"rank {self._rank}, {name}: the KV of token {bad[0]} "
            f"({len(bad)} of {len(good_t)} are bad) {what}"
        )

    def _expected(
        self, request: RunningRequest, begin: int, end: int, layer: int
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        state_t = np.array(request.states[begin:end], dtype=np.uint64)
        mark = np.uint64(xxhash.xxh3_64_intdigest(f"{self._rank} {layer}".encode()))
        return state_t ^ mark, state_t + mark

    def _place(
        self, request: RunningRequest, begin: int, end: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        position_t = np.arange(begin, end)
        block_t = np.asarray(request.blocks, dtype=np.int64)[position_t // self._block_size]
        return block_t, position_t % self._block_size
