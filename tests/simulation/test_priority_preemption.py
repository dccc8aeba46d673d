# SPDX-License-Identifier: Apache-2.0
"""vLLM's own scheduler, which leaves blocks in its prefix cache that were never computed."""

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="the scheduler is vLLM's")

from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvhaven.engine.epoch import Epoch
from kvhaven.engine.request_state import NULL_BLOCK
from kvhaven.integrations.vllm.parts import REPORTS_FAILED_REQUESTS
from kvhaven.integrations.vllm.requests import leaves_uncomputed_blocks
from tests.simulation.connector_kit import wait_until
from tests.simulation.engine_hybrid import MIXED
from tests.simulation.engine_model import Model
from tests.simulation.engine_world import (
    BLOCK,
    PATIENT,
    Engine,
    Setup,
    make_config,
    make_kv_cache_config,
)
from tests.simulation.node import Node, running_node
from tests.simulation.uncomputed import UncomputedBlocks

pytestmark = pytest.mark.slow

windows = pytest.mark.skipif(not REPORTS_FAILED_REQUESTS, reason="refused before vLLM 0.30")

TIGHT = Setup(
    asynchronous_scheduling=False,
    load_mode="sync",
    blocks=15,
    budget=24,
    policy="priority",
    long_prefill=8,
    settings=(*PATIENT, ("step_budget_ms", 1000)),
)
"""An engine that preempts a prompt of 50 tokens in the step that scheduled its last 8.

Lookups are answered within their step: the schedule must not depend on the load of the machine."""
WINDOWS = replace(TIGHT, blocks=60, budget=100, window=17, grouping=MIXED)
"""The same with two KV groups of windows behind the one of full attention."""
LOW, HIGH = [at * at % 5 for at in range(50)], [4, 4, 4, 0, 4, 4, 1]


@pytest.fixture
def node(short_dir: Path) -> Iterator[Node]:
    with running_node(short_dir) as started:
        yield started


def starts_of(output: SchedulerOutput) -> dict[str, int]:
    """Return the computed tokens of each scheduled request; some resume as new ones."""
    cached = output.scheduled_cached_reqs
    starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    return starts | dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))


class Alone:
    """vLLM's scheduler without a connector. All prompts of a test differ in all tokens.

    `written` is what each place of a block holds: the KV group and the token.
    """

    def __init__(self, folder: Path, setup: Setup) -> None:
        self.config = make_config(folder, setup)
        self.config.kv_transfer_config = None
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self.scheduler = Scheduler(
            self.config,
            make_kv_cache_config(setup),
            StructuredOutputManager(self.config),
            block_size=BLOCK,
            log_stats=True,
        )
        self.uncomputed = UncomputedBlocks(self.scheduler, BLOCK)
        self.requests: dict[str, Request] = {}
        self.done: dict[str, int] = {}
        """Number of tokens that are computed of each request."""
        self.written: dict[tuple[int, int], tuple[int, int]] = {}

    def add(self, name: str, prompt: range, priority: int) -> None:
        self.requests[name] = Request(
            request_id=name,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(max_tokens=3, ignore_eos=True),
            pooling_params=None,
            priority=priority,
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(self.requests[name])

    def step(self) -> SchedulerOutput:
        self.uncomputed.before()
        output = self.scheduler.schedule()
        self.uncomputed.after(output)
        names = list(output.num_scheduled_tokens)
        starts = starts_of(output)
        ends = {name: starts[name] + output.num_scheduled_tokens[name] for name in names}
        for name in names:
            self._compute(name, starts[name], ends[name])
        self.done.update(ends)
        sampled = [[7] if ends[name] >= self.requests[name].num_tokens else [] for name in names]
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: at for at, name in enumerate(names)},
                sampled_token_ids=sampled,
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            ),
        )
        return output

    def blocks(self, name: str) -> tuple[list[int], ...]:
        """Return a request's blocks of each KV group."""
        return tuple(self.scheduler.kv_cache_manager.get_block_ids(name))

    def wrong(self, name: str, start: int) -> set[tuple[int, int]]:
        """Return the KV group and the token of wrong KV that a request has found in the cache."""
        tokens = self.requests[name].all_token_ids
        return {
            (group, at)
            for group, ids in enumerate(self.blocks(name))
            for at in range(start)
            if ids[at // BLOCK] != NULL_BLOCK
            and self.written.get((ids[at // BLOCK], at % BLOCK)) != (group, tokens[at])
        }

    def _compute(self, name: str, begin: int, end: int) -> None:
        tokens = self.requests[name].all_token_ids
        for group, ids in enumerate(self.blocks(name)):
            for at in range(begin, end):
                self.written[ids[at // BLOCK], at % BLOCK] = group, tokens[at]


def test_a_preemption_in_the_step_that_scheduled_a_request_is_noticed(tmp_path: Path) -> None:
    """If this fails because `low` resumes at 40, vLLM has mended it: then drop the distrust."""
    alone = Alone(tmp_path, TIGHT)
    alone.add("low", range(50), priority=1)
    while alone.done.get("low", 0) < 24:  # 0.29 and 0.30 limit a prompt's step also if it is alone
        assert not leaves_uncomputed_blocks(alone.config, alone.step())
    alone.add("high", range(100, 107), priority=0)
    output = alone.step()
    while not output.preempted_req_ids:
        assert not leaves_uncomputed_blocks(alone.config, output)
        assert alone.requests["low"].num_output_tokens == 0, "it was never preempted"
        output = alone.step()
    assert output.preempted_req_ids == {"low"}
    assert leaves_uncomputed_blocks(alone.config, output)
    assert alone.done["low"] == 40
    output = alone.step()
    assert starts_of(output)["low"] == 44  # of these, 4 were never computed
    assert alone.wrong("low", 44) == {(0, at) for at in range(40, 44)}
    assert alone.uncomputed.misled == {"low"}


def test_a_windows_block_stays_when_that_of_full_attention_is_gone(tmp_path: Path) -> None:
    """vLLM evicts the blocks of a preempted request by KV group.

    `high` takes those of `low` with full attention, `twin` computes the same tokens after `low`,
    and vLLM finds the older block of each group: the one of `twin`, but for the windows, the ones
    of `low`, which were never computed.
    """
    alone = Alone(tmp_path, WINDOWS)
    alone.add("twin", range(50), priority=0)  # finds the first blocks of the other, and is behind
    alone.add("low", range(50), priority=1)
    while alone.done.get("low", 0) < 24:
        alone.step()
    alone.add("high", range(100, 123), priority=0)
    while not alone.requests["low"].num_preemptions:
        assert alone.requests["low"].num_output_tokens == 0, "it was never preempted"
        alone.step()
    alone.scheduler.finish_requests("high", RequestStatus.FINISHED_ABORTED)
    output = alone.step()
    while "low" not in output.num_scheduled_tokens:
        output = alone.step()
    wrong = alone.wrong("low", starts_of(output)["low"])
    assert {group for group, _ in wrong} == {1, 2}
    assert alone.uncomputed.misled == {"low"}


def save_after_the_preemption(engine: Engine, who: str) -> None:
    """Have `low` preempted in the step that scheduled it; it or an equal prompt goes on."""
    engine.wait_ready()
    engine.add("low", LOW, 3, priority=1)
    while engine.requests["low"].num_computed_tokens < 24:
        engine.step()
    engine.add("high", HIGH, 3, priority=0)
    while not engine.requests["low"].num_preemptions:
        engine.step()
    assert engine.uncomputed.count, "vLLM's cache is right: the schedule does not show it"
    if who == "equal":
        engine.abort("low")
        engine.add("equal", LOW, 3, priority=1)
    drain(engine)
    assert engine.uncomputed.ever_misled == {who}


def save_windows_after_the_preemption(engine: Engine) -> None:
    """Have `low` resumed on blocks of windows that were never computed; only it is saved."""
    engine.wait_ready()
    engine.add("twin", LOW, 3, params={"kv_transfer_params": {"kvhaven.skip_save": True}})
    engine.add("low", LOW, 3, priority=1)
    while engine.requests["low"].num_computed_tokens < 24:
        engine.step()
    engine.add("high", (HIGH * 4)[:23], 3)
    while not engine.requests["low"].num_preemptions:
        engine.step()
    engine.abort("high")
    drain(engine)
    assert engine.uncomputed.ever_misled == {"low"}


def load_everything_again(engine: Engine, node: Node) -> None:
    """Have the same prompt served without vLLM's cache; a device compares all KV that it reads."""

    def committed() -> bool:
        catalog = node.status().catalog
        return bool(catalog.resident_chunks) and not catalog.reserved_bytes

    wait_until(committed)
    assert engine.scheduler.reset_prefix_cache()
    engine.add("again", LOW, 3)
    drain(engine)
    assert engine.outputs["again"] == engine.model.continuation(None, LOW, 3)


def drain(engine: Engine) -> None:
    while engine.busy:
        engine.step()
        engine.tick()
    for device in engine.devices:
        device.synchronize()


Start = Callable[[Setup], Engine]


@pytest.fixture
def start(short_dir: Path, node: Node, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Return a function that starts an engine; after the test it is closed, whatever it does."""
    with contextlib.ExitStack() as stack:

        def begin(setup: Setup) -> Engine:
            beside = replace(setup, service_address=node.address)
            engine = Engine(short_dir, beside, Model(), random.Random(0), monkeypatch)
            stack.callback(engine.close)
            for device in engine.devices:
                stack.callback(device.abandon)
            return engine

        yield begin


@pytest.mark.parametrize("tails", [False, True], ids=["chunks", "tails"])
@pytest.mark.parametrize("who", ["low", "equal"])
def test_kv_that_vllm_never_computed_is_not_saved(
    who: str, tails: bool, start: Start, node: Node
) -> None:
    engine = start(replace(TIGHT, tails=tails))
    save_after_the_preemption(engine, who)
    load_everything_again(engine, node)
    assert engine.counters["hit_tokens"] > 0  # the chunks that were computed


@pytest.mark.parametrize("who", ["low", "equal"])
def test_nor_if_the_scheduler_does_not_give_its_block_pool(
    who: str, start: Start, node: Node
) -> None:
    """All versions since 0.29 give it; schedulers of other packages may not."""
    engine = start(TIGHT)
    assert engine.connector is not None
    side = engine.connector._scheduler
    assert side.held_blocks is not None, "vLLM's own scheduler gave none"
    side.held_blocks = None
    save_after_the_preemption(engine, who)
    load_everything_again(engine, node)
    assert engine.counters["saved_chunks"] > 0  # of what was computed before


@pytest.mark.parametrize("tails", [False, True], ids=["chunks", "tails"])
@pytest.mark.parametrize("who", ["low", "equal"])
def test_without_the_distrust_it_would_be_saved_and_served(
    who: str, tails: bool, start: Start, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Epoch, "distrust_cache", lambda *_: None)
    engine = start(replace(TIGHT, tails=tails))
    save_after_the_preemption(engine, who)
    with pytest.raises(AssertionError, match="is not that of its prompt"):
        load_everything_again(engine, node)


@windows
def test_nor_a_windows_kv_that_was_never_computed(start: Start, node: Node) -> None:
    engine = start(replace(WINDOWS, load_mode="async"))
    save_windows_after_the_preemption(engine)
    load_everything_again(engine, node)
    assert engine.counters["saved_chunks"] > 0  # of what was computed before


@windows
def test_a_windows_kv_would_be_saved_without_the_distrust(
    start: Start, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Epoch, "distrust_cache", lambda *_: None)
    engine = start(replace(WINDOWS, load_mode="async"))
    save_windows_after_the_preemption(engine)
    with pytest.raises(AssertionError, match="is not that of its prompt"):
        load_everything_again(engine, node)
