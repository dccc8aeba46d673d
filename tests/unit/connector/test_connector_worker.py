# SPDX-License-Identifier: Apache-2.0
"""The worker's side: what a rank does when copies are late, fail, or cannot be started."""

import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("vllm", reason="the connector is vLLM's")


from kvhaven.client.scheduler import LeasedChunks, SchedulerClient
from kvhaven.devices.base import CopyJob
from kvhaven.engine.jobs import StepPlan, StepReport
from kvhaven.errors import LayoutError, UnreportedLoadError
from kvhaven.protocol import AttachScheduler
from tests.simulation.connector_kit import wait_until
from tests.simulation.engine_device import LateCopy, LateDevice
from tests.simulation.node import Node
from tests.unit.connector.rank_kit import Rank, save_job

if TYPE_CHECKING:
    pass

pytestmark = pytest.mark.slow


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


def test_a_tail_comes_back_with_only_its_blocks(rank: Rank) -> None:
    """A tail of 6 tokens in two blocks of 4, saved from blocks 4 and 5, loaded into 8 and 9."""
    job = replace(save_job(), blocks=(((4, 5),),), tail=6)
    rank.step(StepPlan(saves=[job]))
    rank.settle()
    wait_until(lambda: rank.node.status().catalog.tails == 1)
    bits = rank.tensor.view(torch.int16)
    before = bits.clone()
    load = rank.load(places=(rank.place_of(job),), blocks=(((8, 9),),), tail=6)
    load = replace(load, shard_offsets=(0,))
    rank.step(StepPlan(loads=[load]))
    assert rank.settle()[0] == {"r"}
    before[8:10] = before[4:6]
    assert torch.equal(bits, before)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("failing", [1, 2])
def test_a_load_fails_whole_if_its_chunks_or_its_tail_fail(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, *, asynchronous: bool, failing: int
) -> None:
    """No lease ends while the other copy may run."""
    calls: list[CopyJob | None] = []
    load = rank.device.load

    def failing_load(*args: Any) -> CopyJob:
        calls.append(None)
        if len(calls) == failing:
            raise LayoutError("no such block")
        job: CopyJob = load(*args)
        return job

    monkeypatch.setattr(rank.device, "load", failing_load)
    blocks = ((tuple(range(4)), (4, 5)),)
    job = replace(rank.load(2, asynchronous=asynchronous), blocks=blocks, tail=6)
    loads, failed, _ = rank.step(StepPlan(loads=[job]))
    more, late, report = rank.settle()
    assert loads | more == ({"r"} if asynchronous else set())
    assert failed | late == set(range(6))
    assert report.failed_loads == {0: 1}
    assert len(calls) == failing


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
    wait_until(lambda: rank.reserved == 0)  # needs no step: the engine may be idle for long
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


@pytest.mark.parametrize("failing", [0, 1])
def test_a_chunk_of_a_failed_load_is_not_completed_by_a_later_save(
    fresh_node: Node, failing: int
) -> None:
    """Rank 0 asks first, so it has given its part up before rank 1 asks, or asks before that."""
    ranks = [Rank(fresh_node, LateDevice(Random(number)), number, 2) for number in range(2)]
    ranks[failing].device.fail_loads = 1
    ranks[failing].step(StepPlan(loads=[ranks[failing].load()]))
    ranks[failing].settle()
    for one in ranks:
        one.step(StepPlan(saves=[save_job()]))
    known = StepPlan(failed_loads={failing: 1})
    for one in ranks:
        one.settle(known)
        assert one.resident == 0
    for one in (ranks[failing], ranks[1 - failing]):
        assert one.resident == 0
        one.step(replace(known, saves=[replace(save_job(), id=2)]))
        one.settle(known)
    wait_until(lambda: ranks[0].resident == 1)
    assert ranks[0].reserved == 0
    for one in ranks:
        one.worker.close()


@pytest.fixture
def twins(fresh_node: Node) -> Iterator[list[Rank]]:
    """Two ranks that hold the same shard."""
    made = [Rank(fresh_node, LateDevice(Random(n)), n, 2, twins=True) for n in range(2)]
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
    assert twins[0].resident == 0
    twins[0].node.clear()  # drops a chunk that only the other one has committed
    wait_until(lambda: twins[0].reserved == 0)


def test_a_twin_that_had_nothing_to_copy_can_be_fenced(twins: list[Rank]) -> None:
    for rank in twins:
        rank.step(StepPlan(saves=[save_job()]))
    for rank in twins:
        rank.step(StepPlan(fence=[1]))
    assert [rank.device.fences for rank in twins] == [1, 0]
    for rank in twins:
        rank.settle()
    wait_until(lambda: twins[0].resident == 1)


def test_a_store_with_too_few_checksums_is_dropped(fresh_node: Node) -> None:
    rank = Rank(fresh_node, LateDevice(Random(0)), parts=2)
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


def test_closing_commits_what_is_under_way(fresh_node: Node) -> None:
    rank = Rank(fresh_node, LateDevice(Random(0)))
    rank.step(StepPlan(saves=[save_job()]))
    rank.worker.close()
    wait_until(lambda: rank.resident == 1)


def test_ranks_of_one_process_can_share_a_plan(fresh_node: Node) -> None:
    ranks = [Rank(fresh_node, LateDevice(Random(number)), number, 2) for number in range(2)]
    plan = StepPlan(loads=[ranks[0].load()])
    for one in ranks:
        one.step(plan)
    assert [one.settle()[0] for one in ranks] == [{"r"}, {"r"}]
    for one in ranks:
        one.worker.close()


def test_a_chunk_that_only_one_rank_wrote_is_never_shown_until_the_other_did(
    fresh_node: Node,
) -> None:
    ranks = [Rank(fresh_node, LateDevice(Random(number)), number, 2) for number in range(2)]
    ranks[0].step(StepPlan(saves=[save_job()]))
    ranks[0].settle()
    assert fresh_node.status().catalog.resident_chunks == 0
    ranks[1].step(StepPlan(saves=[save_job()]))
    ranks[1].settle()
    wait_until(lambda: fresh_node.status().catalog.resident_chunks == 1)
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
            rank.load(asynchronous=False, request_id="a", lease_id=1),
            rank.load(asynchronous=False, request_id="b", lease_id=2),
            rank.load(asynchronous=True, request_id="c", lease_id=3),
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
    monkeypatch.setattr("kvhaven.engine.loader.COPY_DEADLINE_S", 0.01)
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
    monkeypatch.setattr(rank.worker._saves[0], method, refuse)
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
    fresh_node: Node, rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = save_job()
    rank.step(StepPlan(saves=[job]))
    rank.settle()
    wait_until(lambda: rank.resident == 1)
    attach = AttachScheduler(1, rank.session, uuid.uuid4().hex, 1, 5000)
    client = SchedulerClient(fresh_node.address, attach, lookup_deadline_s=10, promote_deadline_s=1)
    client.start(10)
    lease_id = client.ask(job.keys)
    assert lease_id is not None
    lease = client.wait(lease_id, 10)
    assert isinstance(lease, LeasedChunks)
    client.dispatched(lease_id)
    plan = StepPlan(loads=[rank.load(lease_id=lease_id, asynchronous=False)])
    monkeypatch.setattr(rank.worker._saves[0], "reserve", refuse)
    with pytest.raises(RuntimeError):
        rank.worker.begin(plan)
    rank.worker.doubt()
    monkeypatch.undo()
    assert rank.worker.failed_blocks() == set(range(4))
    wait_until(lambda: fresh_node.status().catalog.leases == 0)
    client.close()


def test_a_fence_that_was_never_set_spoils_what_runs(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.step(StepPlan(saves=[save_job()]))
    monkeypatch.setattr(rank.worker._saves[0], "collect", refuse)
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
