# SPDX-License-Identifier: Apache-2.0
"""The client's connection to a service that is slow, stuck, or deaf: nobody waits for long."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvhaven.client.scheduler import Outcome
from tests.crash.engine import Engine, Rank, Scheduler, prompt
from tests.crash.node import NodeThread, eventually, settled
from tests.crash.proxy import Proxy


@pytest.fixture
def engine(proxy: Proxy) -> Iterator[Engine]:
    with Engine(proxy.address) as engine:
        yield engine


@pytest.mark.parametrize(
    "delay_s", [0.6, pytest.param(10.0, marks=[pytest.mark.slow, pytest.mark.timeout(120)])]
)
def test_a_slow_service_is_left_alone_until_it_is_quick_again(
    node: NodeThread, short_dir: Path, delay_s: float
) -> None:
    keys, save_s, look_s = prompt("p", 4), 0.05, 0.1
    with Proxy(short_dir / "p.sock", node.address) as proxy:
        rank = Rank(proxy.address)
        scheduler = Scheduler(proxy.address, lookup_s=look_s)
        rank.start()
        scheduler.start()
        rank.save(keys)
        eventually(lambda: scheduler.load(keys, [rank]))
        proxy.delay_s = delay_s
        begin = time.monotonic()
        steps = 0
        while time.monotonic() - begin < min(2 * delay_s + 0.3, 3.0) or steps < 20:
            steps += 1
            assert scheduler.load(keys, [rank]) == 0
            assert rank.save(prompt("q", 2), wait_s=save_s) == 0
            time.sleep(0.01)
        assert not scheduler.client.responsive
        # Two look-ups and a save found out; since then nobody waits.
        assert scheduler.client.deadlines_missed == 2
        assert rank.client.deadlines_missed == 1
        proxy.delay_s = 0
        eventually(lambda: scheduler.load(keys, [rank]) == 4, 2 * delay_s + 10)
        eventually(lambda: rank.save(prompt("after", 2)) == 2, 2 * delay_s + 10)
        settled(node.address, members=2)
        scheduler.close()
        rank.close()


def test_a_service_that_was_slow_to_say_where_chunks_are_is_asked_again(
    node: NodeThread, proxy: Proxy
) -> None:
    """Engines with several parts of KV ask that first, and nothing else if it is a miss."""
    keys = prompt("p", 4)
    rank, scheduler = Rank(proxy.address).start(), Scheduler(proxy.address, lookup_s=0.05).start()
    rank.save(keys)
    client = scheduler.client

    def places() -> bytes | Outcome:
        asked = client.locate(keys)
        return Outcome.MISS if asked is None else client.located(asked, 0.06)

    eventually(lambda: places() == b"\1" * 4)
    proxy.delay_s = 0.3
    while client.responsive:
        assert places() in {Outcome.MISS, Outcome.PENDING}
    assert client.locate(keys) is None
    proxy.delay_s = 0
    eventually(lambda: places() == b"\1" * 4)
    settled(node.address, members=2)
    scheduler.close()
    rank.close()


def test_late_grants_are_aborted_and_late_leases_released(node: NodeThread, proxy: Proxy) -> None:
    keys = prompt("p", 4)
    rank, scheduler = Rank(proxy.address).start(), Scheduler(proxy.address, lookup_s=0.05).start()
    rank.save(keys)
    eventually(lambda: scheduler.load(keys, [rank]))
    proxy.delay_s = 0.3
    assert rank.reserve(prompt("q", 3), wait_s=0.02) == []
    lease_id = scheduler.client.ask(keys)
    assert lease_id is not None
    eventually(lambda: scheduler.client.look_up(lease_id) is Outcome.MISS)
    proxy.delay_s = 0
    settled(node.address, members=2)
    assert node.status().catalog.resident_chunks == 4
    scheduler.close()
    rank.close()


def test_a_service_that_swallows_everything_is_given_up_and_found_again(
    node: NodeThread, proxy: Proxy
) -> None:
    keys = prompt("p", 4)
    rank, scheduler = Rank(proxy.address).start(), Scheduler(proxy.address, lookup_s=0.05).start()
    rank.save(keys)
    eventually(lambda: scheduler.load(keys, [rank]))
    proxy.swallow = True
    for _ in range(5):
        assert scheduler.load(keys, [rank]) == 0
        assert rank.save(prompt("q", 1), wait_s=0.05) == 0
    assert not scheduler.client.responsive
    scheduler.client.prefetch(keys)
    proxy.swallow = False
    eventually(lambda: scheduler.load(keys, [rank]) == 4)
    eventually(lambda: rank.save(prompt("r", 1)))
    settled(node.address, members=2)
    proxy.swallow = True
    scheduler.close()
    rank.close()
    proxy.swallow = False


def test_closing_sends_what_waits(node: NodeThread) -> None:
    keys = prompt("p", 3)
    with Engine(node.address) as engine:
        engine.save(keys)
    assert node.status().catalog.commits == 3
