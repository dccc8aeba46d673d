# SPDX-License-Identifier: Apache-2.0
"""The worker's side: what a rank does when copies are late, fail, or cannot be started."""

import contextlib
import ctypes
import dataclasses
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

pytest.importorskip("vllm", reason="the connector is vLLM's")

import torch
import vllm.v1.worker.kv_connector_model_runner_mixin as mixin
import xxhash

from kvhaven.client.rank import RankClient
from kvhaven.client.scheduler import Lease, SchedulerClient
from kvhaven.config import Settings
from kvhaven.devices import staging
from kvhaven.devices.base import CopyJob
from kvhaven.devices.streams import StreamDevice
from kvhaven.errors import DeviceCopyError, LayoutError, UnreportedLoadError
from kvhaven.integrations.vllm import loaded_model
from kvhaven.integrations.vllm.adapters import AdapterUse
from kvhaven.integrations.vllm.connector import KVHavenConnector
from kvhaven.integrations.vllm.loaded_model import LoadedModel
from kvhaven.integrations.vllm.metadata import LoadJob, SaveJob, StepPlan, StepReport
from kvhaven.integrations.vllm.worker import WorkerSide
from kvhaven.layouts import describe_kv_caches
from kvhaven.protocol import AttachRank, AttachScheduler, ModelState
from kvhaven.types import ChunkKey, Shard, ShardId
from tests.devices import opened
from tests.simulation.connector_kit import BLOCK, BYTES, CHUNK, wait_until
from tests.simulation.engine_device import LateCopy, LateDevice
from tests.simulation.node import Node, running_node

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput

pytestmark = pytest.mark.slow

BLOCKS = 20


class Rank:
    """A rank with a device (a late one), and the arena's service to talk to.

    It holds one shard of `parts`, or the same as the other ranks if they are `twins`. `place`
    brings its KV tensor to where the device has its memory.
    """

    def __init__(
        self,
        node: Node,
        device: Any,
        rank: int = 0,
        world: int = 1,
        *,
        parts: int = 1,
        twins: bool = False,
        place: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    ) -> None:
        self.node = node
        self.device = device
        self.session = session = f"{node.address} {world}"
        self.world = world
        self.tensor = torch.randint(-9, 9, (BLOCKS, 1, BLOCK, 64), dtype=torch.int16)
        self.tensor = place(self.tensor.view(torch.bfloat16))
        layout = describe_kv_caches(
            {"layer": self.tensor},
            layer_specs={"layer": (BYTES, BLOCK)},
            num_blocks=BLOCKS,
            kernel_tag="" if isinstance(device, LateDevice) else device.kernel_tag,
        )
        first = 0 if twins else rank * parts
        size = layout.payload_bytes(4) // parts
        self.client = RankClient(
            node.address,
            AttachRank(
                id=1,
                session=session,
                member=uuid.uuid4().hex,
                rank=rank,
                world=world,
                namespace=xxhash.xxh3_128_digest(session.encode()) * 2,
                fields={"model": "rank"},
                shards=tuple(
                    Shard(ShardId(0, (0, 1), (head, head + 1)), size)
                    for head in range(first, first + parts)
                ),
                shared=twins,
            ),
        )
        self.client.start(10)
        assert self.client.wait_ready(10)
        settings = Settings(chunk_size=CHUNK, save_deadline_ms=2000)
        self.layout = layout
        self.model = LoadedModel()
        self.worker = WorkerSide(settings, self.client, device, layout, rank, model=self.model)

    def step(self, plan: StepPlan) -> tuple[set[str], set[int], StepReport | None]:
        """Do what the runner does in a step; return loads, failed blocks and report."""
        self.worker.fence(plan)
        self.worker.begin(plan)
        self.worker.start_loads()
        self.worker.save()
        return self.worker.finished_loads(), self.worker.failed_blocks(), self.worker.report()

    def settle(self, plan: StepPlan | None = None) -> tuple[set[str], set[int], StepReport]:
        """Let the device finish, then do a step; the watch's thread gets its time."""
        loads, blocks, total = set[str](), set[int](), StepReport()
        for _ in range(20):
            self.device.synchronize()
            more, failed, report = self.step(plan or StepPlan())
            loads, blocks = loads | more, blocks | failed
            total = total.aggregate(report or StepReport())
            time.sleep(0.005)
        return loads, blocks, total

    def load(self, chunks: int = 1, *, asynchronous: bool = True, **more: Any) -> LoadJob:
        job = LoadJob(
            request_id="r",
            ticket=1,
            service=self.client.service,
            places=tuple((0, 8192 * index) for index in range(chunks)),
            shard_offsets=(0, 4096),
            blocks=(tuple(tuple(range(4 * i, 4 * i + 4)) for i in range(chunks)),),
            asynchronous=asynchronous,
        )
        return LoadJob(**(job.__dict__ | more))

    def place_of(self, job: SaveJob) -> tuple[int, int]:
        """Return where the arena holds the first chunk of a save."""
        attach = AttachScheduler(1, self.session, uuid.uuid4().hex, self.world, 5000)
        client = SchedulerClient(
            self.node.address, attach, lookup_deadline_s=10, promote_deadline_s=1
        )
        client.start(10)
        ticket = client.ask(job.keys)
        assert ticket is not None
        lease = client.wait(ticket, 10)
        assert isinstance(lease, Lease)
        client.close()
        return lease.extents[0]

    @property
    def reserved(self) -> int:
        return self.node.status().catalog.reserved_bytes

    @property
    def resident(self) -> int:
        return self.node.status().catalog.resident_chunks


def save_job(number: int = 1, chunks: int = 1, *, first_block: int = 0) -> SaveJob:
    keys = tuple(
        ChunkKey(xxhash.xxh3_128_digest(f"{number} {index}".encode()) * 2)
        for index in range(chunks)
    )
    at = range(first_block, first_block + 4 * chunks, 4)
    return SaveJob(number, None, keys, (tuple(tuple(range(b, b + 4)) for b in at),))


@pytest.fixture
def node(short_dir: Any) -> Iterator[Node]:
    with running_node(short_dir) as started:
        yield started


@pytest.fixture
def rank(node: Node) -> Iterator[Rank]:
    made = Rank(node, LateDevice(Random(0)))
    yield made
    made.worker.close()


def test_a_save_is_reported_and_visible_when_its_copy_has_ended(rank: Rank) -> None:
    assert rank.step(StepPlan(saves=[save_job()]))[2] is None
    assert rank.resident == 0
    _, _, report = rank.settle()
    assert report == StepReport({1: 1})
    wait_until(lambda: rank.resident == 1)
    assert rank.reserved == 0


def test_a_commit_needs_no_step(rank: Rank) -> None:
    rank.step(StepPlan(saves=[save_job()]))
    rank.device.synchronize()
    wait_until(lambda: rank.resident == 1)


def test_a_load_that_failed_is_finished_too_and_its_blocks_are_named(rank: Rank) -> None:
    rank.device.fail_loads = 1
    assert rank.step(StepPlan(loads=[rank.load(2)]))[0] == set()
    loads, blocks, report = rank.settle()
    assert loads == {"r"}
    assert blocks == set(range(8))
    assert report.failed_loads == {0: 1}


def test_a_load_that_was_never_planned_fails_at_once(rank: Rank) -> None:
    job = rank.load(2, places=(), service="")
    loads, blocks, _ = rank.step(StepPlan(loads=[job]))
    assert loads == {"r"}
    assert blocks == set(range(8))


@pytest.mark.parametrize("error", [LayoutError("no such block"), RuntimeError("out of streams")])
def test_a_load_that_cannot_be_started_fails_and_never_hangs_its_request(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(rank.device, "load", refuse)
    loads, blocks, _ = rank.step(StepPlan(loads=[rank.load()]))
    assert loads == {"r"}
    assert blocks == set(range(4))


def test_a_load_from_an_arena_that_is_not_mapped_fails_at_once(rank: Rank) -> None:
    """It was never promised: nothing is offered before all ranks have mapped the arena."""
    loads, blocks, report = rank.step(StepPlan(loads=[rank.load(service="another")]))
    assert (loads, blocks) == ({"r"}, set(range(4)))
    assert report is not None
    assert report.failed_loads == {0: 1}


def test_a_synchronous_load_is_not_reported_as_finished(rank: Rank) -> None:
    rank.step(StepPlan(loads=[rank.load(asynchronous=False)]))
    assert rank.settle()[0] == set()


def test_nothing_is_saved_after_a_failed_load_until_the_scheduler_knows(rank: Rank) -> None:
    rank.device.fail_loads = 1
    rank.step(StepPlan(loads=[rank.load()]))
    rank.settle()
    _, _, report = rank.step(StepPlan(saves=[save_job(1)]))
    assert report is not None
    assert report.unwritten == {1: {0}}
    assert rank.reserved > 0  # kept, so that no other rank completes it from wrong KV
    rank.step(StepPlan(failed_loads={0: 1}, saves=[save_job(2, first_block=4)]))
    rank.settle(StepPlan(failed_loads={0: 1}))
    wait_until(lambda: rank.resident == 1 and rank.reserved == 0)


def test_what_followed_a_synchronous_load_that_failed_is_not_committed(rank: Rank) -> None:
    rank.device.fail_loads = 1
    plan = StepPlan(loads=[rank.load(asynchronous=False)], saves=[save_job(first_block=8)])
    _, blocks, report = rank.step(plan)
    assert blocks == set(range(4)), "known in the step that computed from them"
    assert report is not None
    assert report.unwritten == {1: {0}}
    rank.settle(StepPlan(failed_loads={0: 1}))
    wait_until(lambda: rank.reserved == 0)
    assert rank.resident == 0


def test_a_withheld_chunk_is_not_completed_by_the_other_rank(node: Node) -> None:
    ranks = [Rank(node, LateDevice(Random(number)), number, 2) for number in range(2)]
    ranks[0].device.fail_loads = 1
    ranks[0].step(StepPlan(loads=[ranks[0].load()]))
    ranks[0].settle()
    for one in ranks:
        one.step(StepPlan(saves=[save_job()]))
    ranks[1].settle()
    for one in ranks:
        one.settle(StepPlan(failed_loads={0: 1}))
    wait_until(lambda: node.status().catalog.reserved_bytes == 0)
    assert node.status().catalog.resident_chunks == 0
    for one in ranks:
        one.worker.close()


@pytest.fixture
def twins(node: Node) -> Iterator[list[Rank]]:
    """Two ranks that hold the same shard."""
    made = [Rank(node, LateDevice(Random(n)), n, 2, twins=True) for n in range(2)]
    yield made
    for rank in made:
        rank.worker.close()


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_ranks_with_the_same_shard_one_writes_and_both_report(
    twins: list[Rank], first: int
) -> None:
    order = [twins[first], twins[1 - first]]
    for rank in order:
        rank.step(StepPlan(saves=[save_job(chunks=2)]))
    _, _, report = order[1].settle()
    assert report == StepReport({1: 1})
    assert order[1].worker.stats.data.get("saved_chunks", 0) == 0
    assert order[1].resident == 0, "the one that writes has not ended"
    assert order[0].settle()[2] == StepReport({1: 1})
    assert order[0].worker.stats.data["saved_chunks"] == 2
    wait_until(lambda: order[0].resident == 2)


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_failed_load_keeps_a_chunk_from_sight_whichever_twin_writes_it(
    twins: list[Rank], *, failing: int, asynchronous: bool
) -> None:
    """What all ranks compute is wrong then. Rank 0 asks first, so rank 1 has nothing to write."""
    twins[failing].device.fail_loads = 1
    plans = [
        StepPlan(loads=[rank.load(asynchronous=asynchronous)], saves=[save_job(first_block=8)])
        for rank in twins
    ]
    reports = [rank.step(plan)[2] or StepReport() for rank, plan in zip(twins, plans, strict=True)]
    for rank, first in zip(twins, reports, strict=True):
        report = rank.settle()[2].aggregate(first)
        assert bool(report.unwritten) == (rank is twins[failing])
    for rank in twins:
        rank.settle(StepPlan(failed_loads={failing: 1}))
    wait_until(lambda: twins[0].reserved == 0)
    assert twins[0].resident == 0


def test_a_twin_that_had_nothing_to_copy_can_be_fenced(twins: list[Rank]) -> None:
    for rank in twins:
        rank.step(StepPlan(saves=[save_job()]))
    for rank in twins:
        rank.step(StepPlan(fence=[1]))
    assert [rank.device.fences for rank in twins] == [1, 0]
    for rank in twins:
        rank.settle()
    wait_until(lambda: twins[0].resident == 1)


def test_a_store_with_too_few_checksums_is_dropped(node: Node) -> None:
    rank = Rank(node, LateDevice(Random(0)), parts=2)
    rank.step(StepPlan(saves=[save_job()]))
    assert rank.settle()[2].unwritten == {1: {0}}
    wait_until(lambda: rank.reserved == 0)
    assert rank.resident == 0
    rank.worker.close()


def test_a_fence_that_fails_spoils_the_save(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    rank.step(StepPlan(saves=[save_job()]))

    def refuse(jobs: list[CopyJob]) -> None:
        raise RuntimeError(f"no event for {len(jobs)}")

    monkeypatch.setattr(rank.device, "fence", refuse)
    rank.step(StepPlan(fence=[1]))
    assert rank.settle()[2].unwritten == {1: {0}}
    wait_until(lambda: rank.reserved == 0)
    assert rank.resident == 0


def test_a_fence_is_set_once_in_a_step(rank: Rank) -> None:
    rank.step(StepPlan(saves=[save_job()]))
    rank.step(StepPlan(fence=[1]))
    assert rank.device.fences == 1


@pytest.mark.parametrize("error", [LayoutError("no such block"), RuntimeError("out of streams")])
def test_a_save_that_cannot_be_started_gives_its_space_back(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(rank.device, "store", refuse)
    _, _, report = rank.step(StepPlan(saves=[save_job()]))
    assert report is not None
    assert report.unwritten == {1: {0}}
    wait_until(lambda: rank.reserved == 0)


def test_saves_of_a_step_that_never_ended_are_given_up(rank: Rank) -> None:
    rank.worker.begin(StepPlan(saves=[save_job()]))
    wait_until(lambda: rank.reserved > 0)
    rank.settle()
    wait_until(lambda: rank.reserved == 0)
    assert rank.resident == 0


def test_closing_commits_what_is_under_way(node: Node) -> None:
    rank = Rank(node, LateDevice(Random(0)))
    rank.step(StepPlan(saves=[save_job()]))
    rank.worker.close()
    wait_until(lambda: rank.resident == 1)


def test_ranks_of_one_process_can_share_a_plan(node: Node) -> None:
    ranks = [Rank(node, LateDevice(Random(number)), number, 2) for number in range(2)]
    plan = StepPlan(loads=[ranks[0].load()])
    for one in ranks:
        one.step(plan)
    assert [one.settle()[0] for one in ranks] == [{"r"}, {"r"}]
    for one in ranks:
        one.worker.close()


def test_a_chunk_that_only_one_rank_wrote_is_never_shown_until_the_other_did(node: Node) -> None:
    ranks = [Rank(node, LateDevice(Random(number)), number, 2) for number in range(2)]
    ranks[0].step(StepPlan(saves=[save_job()]))
    ranks[0].settle()
    assert node.status().catalog.resident_chunks == 0
    ranks[1].step(StepPlan(saves=[save_job()]))
    ranks[1].settle()
    wait_until(lambda: node.status().catalog.resident_chunks == 1)
    for one in ranks:
        one.worker.close()


# --- a promised load is done, or reported, or the engine stops ----------------------------------


def refuse(*_: object, **__: object) -> None:
    raise RuntimeError("out of events")


def test_loads_after_one_that_cannot_be_ordered_are_started_all_the_same(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one is waited for here instead: its bytes are there before the forward begins."""
    monkeypatch.setattr(rank.device, "forward_waits", refuse)
    plan = StepPlan(
        loads=[
            rank.load(asynchronous=False, request_id="a", ticket=1),
            rank.load(asynchronous=False, request_id="b", ticket=2),
            rank.load(asynchronous=True, request_id="c", ticket=3),
        ]
    )
    rank.worker.fence(plan)
    rank.worker.begin(plan)
    rank.worker.start_loads()
    assert [job.done() for job in rank.device.jobs[:2]] == [True, True]
    assert len(rank.device.jobs) == 3
    rank.worker.save()
    loads, blocks, _ = rank.settle()
    assert (loads, blocks) == ({"c"}, set())


def test_a_load_that_can_be_neither_ordered_nor_waited_for_ends_the_engine(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvhaven.integrations.vllm.worker_loads.COPY_DEADLINE_S", 0.01)
    monkeypatch.setattr(rank.device, "forward_waits", refuse)
    with monkeypatch.context() as stuck:
        stuck.setattr(LateCopy, "wait", lambda *_: False)
        rank.worker.begin(StepPlan(loads=[rank.load(asynchronous=False)]))
        with pytest.raises(UnreportedLoadError, match=r"request r: its load has not ended"):
            rank.worker.start_loads()


def test_a_synchronous_load_that_fails_late_is_known_in_its_step(rank: Rank) -> None:
    """A step later the engine would have sampled from it."""
    rank.device.fail_loads = 1
    _, blocks, report = rank.step(StepPlan(loads=[rank.load(asynchronous=False)]))
    assert blocks == set(range(4))
    assert report is not None
    assert report.failed_loads == {0: 1}


@pytest.mark.parametrize("method", ["reserve", "start", "collect"])
def test_an_error_in_a_save_never_costs_a_promised_load(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(rank.worker._saves, method, refuse)
    plan = StepPlan(loads=[rank.load(request_id="a"), rank.load(request_id="b")])
    hooks: list[Callable[[], None]] = [
        lambda: rank.worker.fence(plan),
        lambda: rank.worker.begin(plan),
        rank.worker.start_loads,
        rank.worker.save,
    ]
    for hook in hooks:
        try:
            hook()
        except RuntimeError:
            rank.worker.doubt()
    monkeypatch.undo()
    loads, blocks, _ = rank.settle()
    assert loads == {"a", "b"}
    assert blocks in (set(), set(range(4)))


def test_a_load_that_an_error_prevented_gives_its_lease_back(
    node: Node, rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = save_job()
    rank.step(StepPlan(saves=[job]))
    rank.settle()
    wait_until(lambda: rank.resident == 1)
    attach = AttachScheduler(1, rank.session, uuid.uuid4().hex, 1, 5000)
    client = SchedulerClient(node.address, attach, lookup_deadline_s=10, promote_deadline_s=1)
    client.start(10)
    ticket = client.ask(job.keys)
    assert ticket is not None
    lease = client.wait(ticket, 10)
    assert isinstance(lease, Lease)
    client.dispatched(ticket)
    plan = StepPlan(loads=[rank.load(ticket=ticket, asynchronous=False)])
    monkeypatch.setattr(rank.worker._saves, "reserve", refuse)
    with pytest.raises(RuntimeError):
        rank.worker.begin(plan)
    rank.worker.doubt()
    monkeypatch.undo()
    assert rank.worker.failed_blocks() == set(range(4))
    wait_until(lambda: node.status().catalog.leases == 0)
    client.close()


def test_a_fence_that_was_never_set_spoils_what_runs(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.step(StepPlan(saves=[save_job()]))
    monkeypatch.setattr(rank.worker._saves, "collect", refuse)
    with pytest.raises(RuntimeError):
        rank.worker.fence(StepPlan(fence=[1]))
    rank.worker.doubt()
    monkeypatch.undo()
    assert rank.settle()[2].unwritten == {1: {0}}
    wait_until(lambda: rank.reserved == 0)
    assert rank.resident == 0


def test_nothing_is_saved_of_a_step_whose_forward_raised(rank: Rank) -> None:
    plan = StepPlan(saves=[save_job()])
    rank.worker.fence(plan)
    rank.worker.begin(plan)
    wait_until(lambda: rank.reserved > 0)
    rank.worker.forward_failed()
    report = rank.worker.report()
    assert report is not None
    assert report.unwritten == {1: {0}}
    wait_until(lambda: rank.reserved == 0)
    assert rank.resident == 0


# --- what the model holds now -------------------------------------------------------------------


def adapter_model(content: float) -> Any:
    """Return what stands for a loaded adapter: vLLM's `LoRAModel` has an id and tensors."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import LoRALayerWeights

    layer = LoRALayerWeights("q_proj", 2, 4, torch.full((2, 8), content), torch.ones(8, 2))
    return LoRAModel(1, 2, {"q_proj": layer})


def use_of(rank: Rank, generation: int = 1) -> AdapterUse:
    return AdapterUse(1, generation, rank.model.state().adapters[0].digest)


def test_kv_of_an_adapter_is_saved_while_that_content_is_loaded(rank: Rank) -> None:
    rank.model.adapter_loaded(adapter_model(1.0))
    job = dataclasses.replace(save_job(), adapter=use_of(rank))
    rank.step(StepPlan(saves=[job]))
    rank.settle()
    wait_until(lambda: rank.resident == 1)


def test_kv_that_was_planned_under_another_adapters_name_is_neither_saved_nor_loaded(
    rank: Rank,
) -> None:
    """The files were overwritten, and vLLM has loaded them since the step was planned."""
    rank.model.adapter_loaded(adapter_model(1.0))
    use = use_of(rank)
    rank.model.adapter_loaded(adapter_model(2.0))
    save, load = dataclasses.replace(save_job(), adapter=use), rank.load(adapter=use)
    report = rank.step(StepPlan(saves=[save]))[2]
    assert report is not None
    assert report.unwritten == {1: {0}}
    wait_until(lambda: rank.reserved == 0)
    assert rank.step(StepPlan(loads=[load]))[:2] == ({"r"}, set(range(4)))


def test_an_adapter_that_comes_back_is_another_generation(rank: Rank) -> None:
    for content in (1.0, 2.0, 1.0):
        rank.model.adapter_loaded(adapter_model(content))
    assert rank.model.holds(1, 3)
    rank.model.adapter_loaded(adapter_model(1.0))
    assert rank.model.holds(1, 3), "loaded again with the same content: nothing has changed"


def test_an_adapter_without_a_name_is_unknown_and_not_forgotten(rank: Rank) -> None:
    rank.model.adapter_loaded(adapter_model(1.0))
    odd = adapter_model(1.0)
    odd.loras["q_proj"].hook = object()
    rank.model.adapter_loaded(odd)
    assert rank.model.state().adapters == ()
    rank.model.adapter_loaded(adapter_model(1.0))
    assert rank.model.holds(1, 3)


def test_a_load_whose_adapter_changed_before_its_request_computes_is_reported(rank: Rank) -> None:
    rank.model.adapter_loaded(adapter_model(1.0))
    load = rank.load(adapter=use_of(rank))
    rank.step(StepPlan(loads=[load]))
    assert rank.settle()[:2] == ({"r"}, set())
    rank.model.adapter_loaded(adapter_model(2.0))
    assert rank.step(StepPlan(first_steps=[load]))[:2] == (set(), set(range(4)))


class Speculating:
    """A rank's connector in vLLM's V1 runner with speculation, which ends a step's saves later."""

    def __init__(self, rank: Rank, patch: pytest.MonkeyPatch, *, stages: int = 1) -> None:
        self.connector = connector = object.__new__(KVHavenConnector)
        connector._worker, connector._scheduler = rank.worker, None
        connector.reported_errors, connector._errors = set(), 0
        parallel = SimpleNamespace(rank=0, tensor_parallel_size=1, pipeline_parallel_size=stages)
        config = SimpleNamespace(speculative_config=SimpleNamespace(), parallel_config=parallel)
        connector._vllm_config = cast("VllmConfig", config)
        self.drafts = stages == 1
        patch.setattr(mixin, "get_kv_transfer_group", lambda: connector)
        patch.setattr(mixin, "has_kv_transfer_group", lambda: True)
        patch.setattr(mixin, "get_forward_context", lambda: None)

    def step(self, plan: StepPlan, error: Exception | None = None) -> "KVConnectorOutput":
        """Do a step as the runner does; return what vLLM is told in it."""
        output = SimpleNamespace(
            kv_connector_metadata=plan,
            has_sync_kv_loads=any(not job.asynchronous for job in plan.loads),
            finished_req_ids=set(),
        )
        runner = mixin.KVConnectorModelRunnerMixin
        with runner._get_kv_connector_output(
            cast("SchedulerOutput", output), defer_finalize=True
        ) as told:
            if error is not None:
                raise error
        if self.drafts:
            runner.finalize_kv_connector()
        return told


def test_with_speculation_a_load_that_fails_late_is_known_in_its_step(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLLM asks for failures before it has drafted, and ends the step's saves after that."""
    rank.device.fail_loads = 1
    told = Speculating(rank, monkeypatch).step(StepPlan(loads=[rank.load(asynchronous=False)]))
    assert told.invalid_block_ids == set(range(4))


def test_with_speculation_a_change_of_an_adapter_is_known_in_the_first_step(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.model.adapter_loaded(adapter_model(1.0))
    load = rank.load(adapter=use_of(rank))
    rank.step(StepPlan(loads=[load]))
    assert rank.settle()[:2] == ({"r"}, set())
    rank.model.adapter_loaded(adapter_model(2.0))
    engine = Speculating(rank, monkeypatch)
    assert engine.step(StepPlan(first_steps=[load])).invalid_block_ids == set(range(4))
    assert engine.step(StepPlan()).invalid_block_ids == set()


@pytest.mark.parametrize("stages", [1, 2], ids=["drafts", "does not draft"])
def test_with_speculation_every_stage_saves(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, stages: int
) -> None:
    """Of a stage that is not the last, which has no drafter, vLLM's V1 runner ends no step."""
    engine = Speculating(rank, monkeypatch, stages=stages)
    engine.step(StepPlan(saves=[save_job(1)]))
    rank.settle()
    wait_until(lambda: rank.resident == 1)
    with pytest.raises(ValueError, match="forward"):
        engine.step(StepPlan(saves=[save_job(2)]), ValueError("forward"))
    rank.settle()
    wait_until(lambda: rank.reserved == 0)
    assert rank.resident == 1


def test_after_a_change_of_weights_nothing_is_loaded_or_saved_until_the_scheduler_knows(
    rank: Rank,
) -> None:
    rank.model.weights_changed()
    loads, blocks, report = rank.step(StepPlan(loads=[rank.load()], saves=[save_job(1)]))
    assert report is not None
    assert report.unwritten == {1: {0}}
    assert (loads, blocks) == ({"r"}, set(range(4)))
    known = StepPlan(weights={0: 1}, failed_loads={0: 1}, saves=[save_job(2, first_block=4)])
    rank.step(known)
    rank.settle(StepPlan(weights={0: 1}, failed_loads={0: 1}))
    wait_until(lambda: rank.resident == 1 and rank.reserved == 0)


def test_a_rank_says_what_its_model_holds_when_that_changes(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[ModelState] = []
    monkeypatch.setattr(rank.client, "model_changed", said.append)
    rank.model.adapter_loaded(adapter_model(1.0))
    rank.model.weights_changed()
    assert [state.weights for state in said] == [0, 1]
    assert said[1].adapters[0].generation == 1


# --- tensors that move --------------------------------------------------------------------------


def test_other_tensors_take_the_place_of_the_old_ones_under_the_same_connection(
    rank: Rank,
) -> None:
    """Gaudi registers its KV caches again when it wakes up."""
    rank.step(StepPlan(saves=[save_job()]))
    saved = rank.tensor.clone()
    rank.tensor = torch.zeros_like(rank.tensor)
    layout = describe_kv_caches(
        {"layer": rank.tensor},
        layer_specs={"layer": (BYTES, BLOCK)},
        num_blocks=BLOCKS,
        kernel_tag="",
    )
    rank.worker.move(layout)
    wait_until(lambda: rank.resident == 1)
    rank.step(StepPlan(loads=[rank.load(places=(rank.place_of(save_job()),))]))
    assert rank.settle()[:2] == ({"r"}, set())
    assert torch.equal(rank.tensor[:4].view(torch.int16), saved[:4].view(torch.int16))
    assert [member.connected for member in rank.node.status().members] == [True]


# --- memory that goes ---------------------------------------------------------------------------


@pytest.mark.parametrize("accelerator", ["cuda-12.8", "cuda-12.8-unregistered", "rocm-7", "xpu"])
def test_nothing_is_put_on_the_device_after_sleep_has_begun(
    accelerator: str, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM waits for the device and unmaps the KV tensors; our threads may have more for it."""
    from vllm.v1.worker.worker_base import WorkerBase

    asleep = threading.Event()
    late: list[str] = []

    class SleepingWorker(WorkerBase):
        def sleep(self, level: int = 1) -> None:
            found.simulation.module.synchronize()  # all that vLLM does before it unmaps the memory
            asleep.set()

    monkeypatch.setattr(loaded_model, "LOADED", LoadedModel())
    monkeypatch.setattr(staging, "PIECE_BYTES", 800)
    model = loaded_model.watch_model()
    with opened(accelerator) as found:
        assert isinstance(found.device, StreamDevice)
        rank = Rank(node, found.device, place=found.tensor)
        model.listen_for_memory(rank.worker.end_copies)
        copy = found.device._make.copy

        def slow_copy(*arguments: Any, **options: Any) -> None:
            late.extend(["a copy"] if asleep.wait(0.02) else [])
            copy(*arguments, **options)

        with contextlib.closing(rank.worker):
            rank.step(StepPlan(saves=[save_job()]))
            wait_until(lambda: rank.resident == 1)
            load = rank.load(places=(rank.place_of(save_job()),))
            monkeypatch.setattr(found.device._make, "copy", slow_copy)
            rank.step(StepPlan(loads=[load], saves=[save_job(2, 2, first_block=8)]))
            SleepingWorker.__new__(SleepingWorker).sleep()
            rank.worker.end_copies()
            assert late == []
            assert rank.worker.finished_loads() == {"r"}


def test_memory_is_not_given_back_while_a_copy_has_no_end(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the load was reported as failed long ago: the device may write to its blocks."""
    monkeypatch.setattr("kvhaven.integrations.vllm.worker.COPY_DEADLINE_S", 0.01)
    rank.step(StepPlan(loads=[rank.load()]))
    with monkeypatch.context() as stuck:
        stuck.setattr(LateCopy, "wait", lambda copy, _: copy.done())
        with pytest.raises(DeviceCopyError, match="rank 0: copies have not ended within"):
            rank.model.memory_goes()
        rank.device.jobs[0].error = "the device is lost"
        stuck.setattr("kvhaven.integrations.vllm.worker_loads.LOST_S", -1.0)
        assert rank.step(StepPlan())[:2] == ({"r"}, set(range(4)))
        with pytest.raises(DeviceCopyError, match="rank 0: copies have not ended within"):
            rank.model.memory_goes()
    rank.device.synchronize()
    rank.model.memory_goes()


def test_an_arena_that_a_copy_may_still_touch_is_not_unmapped(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not while the process lives: its lock keeps the service from giving the memory away."""
    rank = Rank(node, LateDevice(Random(0)))
    monkeypatch.setattr("kvhaven.integrations.vllm.worker.COPY_DEADLINE_S", 0.01)
    rank.step(StepPlan(saves=[save_job()]))
    arena = rank.client.arena(rank.client.service)
    assert arena is not None
    with monkeypatch.context() as stuck:
        stuck.setattr(LateCopy, "wait", lambda copy, _: copy.done())
        rank.worker.close()
    assert "copies have not ended, so the arena stays mapped" in caplog.text
    wait_until(lambda: node.status().catalog.quarantined_bytes > 0)
    rank.device.synchronize()
    assert bytes(memoryview((ctypes.c_char * 1).from_address(arena.address_of(0, 0, 1))))
    assert node.status().catalog.quarantined_bytes > 0
