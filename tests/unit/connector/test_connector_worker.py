# SPDX-License-Identifier: Apache-2.0
"""The worker's side: what a rank does when copies are late, fail, or cannot be started."""

import time
import uuid
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the connector is vLLM's")

import torch
import xxhash

from kvhaven.client.rank import RankClient
from kvhaven.config import Settings
from kvhaven.devices.base import CopyJob
from kvhaven.errors import LayoutError
from kvhaven.integrations.vllm.metadata import LoadJob, SaveJob, StepPlan, StepReport
from kvhaven.integrations.vllm.worker import WorkerSide
from kvhaven.layouts import describe_kv_caches
from kvhaven.protocol import AttachRank
from kvhaven.types import ChunkKey, Shard, ShardId
from tests.simulation.connector_kit import BLOCK, BYTES, CHUNK, wait_until
from tests.simulation.engine_device import LateDevice
from tests.simulation.node import Node, running_node

pytestmark = pytest.mark.slow

BLOCKS = 20


class Rank:
    """A rank with a late device, and the arena's service to talk to.

    It holds one shard of `parts`, or the same as the other ranks if they are `twins`.
    """

    def __init__(
        self,
        node: Node,
        device: LateDevice,
        rank: int = 0,
        world: int = 1,
        *,
        parts: int = 1,
        twins: bool = False,
    ) -> None:
        self.node = node
        self.device = device
        session = f"{node.address} {world}"
        self.tensor = torch.randint(-9, 9, (BLOCKS, 1, BLOCK, 64), dtype=torch.int16)
        self.tensor = self.tensor.view(torch.bfloat16)
        layout = describe_kv_caches(
            {"layer": self.tensor},
            layer_specs={"layer": (BYTES, BLOCK)},
            num_blocks=BLOCKS,
            kernel_tag="",
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
        settings = Settings(chunk_size=CHUNK, save_deadline_ms=2000)
        self.worker = WorkerSide(settings, self.client, device, layout, rank)

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


def test_a_load_waits_for_an_arena_that_is_just_being_mapped(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler may have attached to a new service a moment before this rank has."""
    mapped = rank.client.arena(rank.client.service)
    monkeypatch.setattr(rank.client, "arena", lambda _: None)
    assert rank.step(StepPlan(loads=[rank.load()]))[:2] == (set(), set())
    monkeypatch.setattr(rank.client, "arena", lambda _: mapped)
    loads, blocks, report = rank.settle()
    assert (loads, blocks) == ({"r"}, set())
    assert report.failed_loads == {}


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
    rank.step(StepPlan(loads=[rank.load(asynchronous=False)], saves=[save_job(first_block=8)]))
    _, blocks, report = rank.settle()
    assert blocks == set(range(4))
    assert report.unwritten == {1: {0}}
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
    for rank in twins:
        load = rank.load(asynchronous=asynchronous)
        rank.step(StepPlan(loads=[load], saves=[save_job(first_block=8)]))
    for rank in twins:
        report = rank.settle()[2]
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
