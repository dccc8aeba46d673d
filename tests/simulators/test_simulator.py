# SPDX-License-Identifier: Apache-2.0
"""The simulators' order of work: each missing wait shows, and with it every seed is right."""

import queue
import random
import threading
import time

import numpy as np
import pytest
import torch

from tests.simulators import simulated
from tests.simulators.plays import PLAYS, SEEDS, Play, host, is_all, is_poison, on, outcomes
from tests.simulators.simulation import Kind

KINDS: tuple[Kind, ...] = ("hpu", "xpu", "cuda")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("play", PLAYS)
def test_a_missing_wait_shows_and_with_it_all_is_right(play: Play, kind: Kind) -> None:
    assert all(outcomes(play, kind, waits=True))
    assert not all(outcomes(play, kind, waits=False)), "no seed shows that the wait is missing"


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_gives_the_same_order_again(kind: Kind) -> None:
    for play in PLAYS:
        first = outcomes(play, kind, waits=False)
        assert first == outcomes(play, kind, waits=False)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_runs_by_itself(kind: Kind) -> None:
    with simulated(kind, seed=3) as sim:
        block = torch.ones(4, device=kind)
        target = host(sim)
        target[:4].copy_(block, non_blocking=True)
        time.sleep(0.01)
        assert sim.pending == 2
        assert is_poison(target[:4])
        assert is_all(target[4:], 0)
        assert sim.tick()
        assert sim.tick()
        assert not sim.tick()
        assert sim.pending == 0
        assert is_all(target[:4], 1)


@pytest.mark.parametrize("kind", KINDS)
def test_streams_are_in_order_and_their_turns_are_the_seeds(kind: Kind) -> None:
    """Two streams write down their steps; each keeps its own order."""
    orders = set()
    for seed in SEEDS:
        with simulated(kind, seed=seed) as sim:
            counts = [torch.zeros(1, device=kind) for _ in range(2)]
            sim.drain()
            streams = [sim.module.Stream() for _ in range(2)]
            targets = [torch.zeros(3, pin_memory=kind != "hpu") for _ in range(2)]
            for step in range(3):
                for stream, count, target in zip(streams, counts, targets, strict=True):
                    with sim.module.stream(stream):
                        count.add_(1)
                        target[step : step + 1].copy_(count, non_blocking=True)
            order = ""
            seen = [0, 0]
            while sim.tick():
                for index, target in enumerate(targets):
                    done = sum(1 for value in target.tolist() if value in {1, 2, 3})
                    order += "ab"[index] * (done - seen[index])
                    seen[index] = done
            assert [target.tolist() for target in targets] == [[1, 2, 3]] * 2
            orders.add(order)
    assert {"aaabbb", "bbbaaa"} <= orders
    assert len(orders) > 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["event", "stream", "device", "query", "stream query", "blocking"])
def test_every_way_of_waiting_waits(kind: Kind, how: str) -> None:
    for seed in SEEDS:
        with simulated(kind, seed=seed) as sim:
            side, target, block = sim.module.Stream(), host(sim), torch.ones(64, device=kind)
            side.wait_stream(sim.module.current_stream())
            with sim.module.stream(side):
                block.add_(1)
                target.copy_(block, non_blocking=how != "blocking")
            ended = side.record_event()
            if how == "event":
                ended.synchronize()
            elif how == "stream":
                side.synchronize()
            elif how == "device":
                sim.module.synchronize()
            elif how == "query":
                while not ended.query():
                    pass
            elif how == "stream query":
                while not side.query():
                    pass
            assert is_all(target, 2)
            assert ended.query()


def test_waiting_for_one_stream_says_nothing_of_another() -> None:
    left = 0
    for seed in SEEDS:
        with simulated("hpu", seed=seed) as sim:
            side = sim.module.Stream()
            block = on(sim, 1)
            with sim.module.stream(side):
                block.add_(1)
            sim.module.current_stream().synchronize()
            left += sim.pending
    assert left > len(SEEDS) // 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(10))
def test_random_programs_with_all_waits_give_what_a_cpu_gives(kind: Kind, seed: int) -> None:
    rng = random.Random(seed)
    with simulated(kind, seed=seed) as sim:
        streams = [sim.module.current_stream(), *(sim.module.Stream() for _ in range(3))]
        blocks = [on(sim, value) for value in range(4)]
        expected = [torch.full((64,), float(value)) for value in range(4)]
        last = None
        for _ in range(200):
            stream = rng.choice(streams)
            if last is not None:
                stream.wait_event(last)
            to, other = rng.sample(range(4), 2)
            with sim.module.stream(stream):
                step = rng.randrange(4)
                if step == 0:
                    blocks[to].copy_(blocks[other])
                    expected[to].copy_(expected[other])
                elif step == 1:
                    blocks[to].mul_(0.5).add_(blocks[other])
                    expected[to].mul_(0.5).add_(expected[other])
                elif step == 2:
                    source = host(sim, float(rng.randrange(100)))
                    blocks[to].copy_(source, non_blocking=True)
                    expected[to].copy_(source)
                else:
                    blocks[to] = blocks[other] + blocks[to]
                    expected[to] = expected[other] + expected[to]
                    # It was allocated on this stream and is freed while others may use it.
                    for user in streams:
                        blocks[to].record_stream(user)
            last = stream.record_event()
            sim.tick(rng.randrange(3))
        sim.module.synchronize()
        for block, right in zip(blocks, expected, strict=True):
            assert torch.equal(block.cpu(), right)


@pytest.mark.parametrize("kind", KINDS)
def test_the_background_thread_ends_everything(kind: Kind) -> None:
    with simulated(kind, seed=1) as sim:
        sim.run_background()
        target = host(sim)
        block = torch.zeros(64, device=kind)
        for _ in range(200):
            block.add_(1)
        target.copy_(block, non_blocking=True)
        end = time.monotonic() + 30
        while sim.pending and time.monotonic() < end:
            time.sleep(0.001)
        assert sim.pending == 0
        assert sim.synchronizations == []
        assert is_all(target, 200)
        sim.stop_background()
        block.add_(1)
        time.sleep(0.01)
        assert sim.pending == 1


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_helper_threads_wait_while_others_submit(kind: Kind, background: bool) -> None:
    """As the product does: a thread for each direction waits for events and looks at the bytes.

    Sources are numpy's, whose memory is given up with Python's lock held, by whichever thread
    runs the copy.
    """
    with simulated(kind, seed=5, unpinned_waits=False) as sim:
        if background:
            sim.run_background()
        finishers = [Finisher() for _ in range(2)]
        sides = [sim.module.Stream() for _ in range(2)]
        blocks = [torch.zeros(64, device=kind) for _ in range(2)]
        for value in range(300):
            side, block = sides[value % 2], blocks[value % 2]
            side.wait_stream(sim.module.current_stream())
            with sim.module.stream(side):
                source = torch.from_numpy(np.full(64, value, np.float32))
                block.copy_(source, non_blocking=True)
                target = torch.zeros(64)
                target.copy_(block, non_blocking=True)
                finishers[value % 2].jobs.put((side.record_event(), target, value))
            del source
            if value % 50 == 0:
                assert torch.equal(torch.ones(3, device=kind).cpu(), torch.ones(3))
        for finisher in finishers:
            finisher.jobs.put(None)
            finisher.join(60)
            assert not finisher.is_alive()
            assert finisher.seen == finisher.right
            assert len(finisher.seen) == 150


class Finisher(threading.Thread):
    """Waits for one copy after the other and looks at what it brought."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs: queue.SimpleQueue[tuple[torch.Event, torch.Tensor, int] | None]
        self.jobs = queue.SimpleQueue()
        self.seen: list[list[float]] = []
        self.right: list[list[float]] = []
        self.start()

    def run(self) -> None:
        while job := self.jobs.get():
            ended, target, value = job
            ended.synchronize()
            self.seen.append(sorted(set(target.tolist())))
            self.right.append([value])


def test_streams_are_a_matter_of_the_thread() -> None:
    with simulated("hpu") as sim:
        side = sim.module.Stream()
        sim.module.set_stream(side)
        seen: list[bool] = []

        def look() -> None:
            seen.append(sim.module.current_stream() == sim.module.default_stream())

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert seen == [True]
        assert sim.module.current_stream() == side
    with simulated("hpu") as sim:
        assert sim.module.current_stream() == sim.module.default_stream()


def test_what_waits_at_the_end_is_let_go() -> None:
    """A thread that waits for work that will never run, as after a failed test."""
    ended = threading.Event()

    def fail() -> None:
        with simulated("hpu") as sim:
            block = torch.ones(4, device="hpu")
            blocks.append(block)
            event = sim.module.current_stream().record_event()

            def wait() -> None:
                while not event.query():
                    time.sleep(0.001)
                ended.set()

            sim._native.close()
            threads.append(threading.Thread(target=wait))
            threads[0].start()
            raise KeyError("the test failed")

    blocks: list[torch.Tensor] = []
    threads: list[threading.Thread] = []
    with pytest.raises(KeyError, match="the test failed"):
        fail()
    threads[0].join(10)
    assert ended.is_set()
    with pytest.raises(RuntimeError, match="there is no hpu: its simulator is off"):
        blocks[0].cpu()
