# SPDX-License-Identifier: Apache-2.0
"""A service with shared tiers that are slow, stuck, wrong, or gone."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from kvhaven.catalog.actions import TierName
from kvhaven.catalog.shared_index import LOOKUP_SHARDS
from kvhaven.client.control import connect
from kvhaven.config import Settings, load_settings
from kvhaven.errors import ConfigError, KVHavenError, TierError
from kvhaven.protocol import (
    UNKNOWN_NODE,
    Acquired,
    Clear,
    Cleared,
    Flush,
    Flushed,
    Hello,
    Refused,
    ServiceMessage,
    Welcome,
)
from kvhaven.service.tier_setup import make_tiers
from kvhaven.testing.memory_store import MemoryStore, memory_tier
from kvhaven.tiers.base import StoredShard, Tier
from kvhaven.types import Checksum
from tests.crash.engine import CHUNK_SIZE, EXTENT_BYTES, Engine, prompt
from tests.crash.node import NodeThread, eventually, flush, seconds, settled
from tests.crash.raw import Raw

T = TypeVar("T")
KEYS = prompt("p", 8)
MEMORY_TIER = TierName("shared")


class SlowStore(MemoryStore):
    """Takes its time: `before` is awaited before anything of this name is done."""

    def __init__(self) -> None:
        super().__init__()
        self.before: dict[str, Callable[[], Awaitable[object]]] = {}
        self.asked: list[int] = []
        self.scans: list[str] = []
        """`begins` and `ends`, in their order."""

    async def _first(self, name: str) -> None:
        if name in self.before:
            await self.before[name]()

    async def contains(self, shards: Sequence[StoredShard]) -> Sequence[bool]:
        self.asked.append(len(shards))
        await self._first("contains")
        return await super().contains(shards)

    async def folders(self) -> Sequence[str]:
        self.scans.append("begins")
        await self._first("folders")
        self.scans.append("ends")
        return await super().folders()

    async def read(self, shard: StoredShard, into: memoryview) -> Checksum:
        await self._first("read")
        return await super().read(shard, into)

    async def write(self, shard: StoredShard, payload: memoryview, checksum: Checksum) -> int:
        await self._first("write")
        return await super().write(shard, payload, checksum)


class Node(NodeThread):
    """A node with a disk, if its settings say so, and then tiers over these stores."""

    def __init__(self, socket: Path, *stores: MemoryStore, **settings: object) -> None:
        super().__init__(socket, **settings)

        def tiers(settings: Settings) -> dict[TierName, Tier]:
            shared = {
                TierName(f"{MEMORY_TIER}{number or ''}"): memory_tier(store, retry_s=0.05)
                for number, store in enumerate(stores)
            }
            return {**make_tiers(settings), **shared}

        self.make_tiers = tiers


@pytest.fixture
def filled(short_dir: Path) -> SlowStore:
    """Return a store in which another node has put the chunks."""
    store = SlowStore()
    with Node(short_dir / "other.sock", store) as other, Engine(other.address) as engine:
        assert engine.save(KEYS) == len(KEYS)
        flush(other.address)
    return store


async def never() -> None:
    await asyncio.Event().wait()


def slow(delay_s: float) -> Callable[[], Awaitable[object]]:
    return lambda: asyncio.sleep(delay_s)


def test_a_whole_prompt_is_asked_for_in_one_batch(short_dir: Path, filled: SlowStore) -> None:
    filled.asked.clear()
    with Node(short_dir / "s.sock", filled) as node, Engine(node.address) as engine:
        assert engine.load(KEYS) == len(KEYS)
        assert engine.load(prompt("unknown", 5)) == 0
        assert engine.load(prompt("unknown", 5)) == 0
        node.check()
    assert filled.asked == [8, 5], "and an absence is remembered"


def test_a_long_chain_that_is_awaited_is_asked_for_in_several_batches(short_dir: Path) -> None:
    store, chain = SlowStore(), prompt("long", 2 * LOOKUP_SHARDS - 10)
    with Node(short_dir / "s.sock", store) as node, Engine(node.address) as engine:
        engine.scheduler.client.pull_chain("unknown node", chain)
        eventually(lambda: sum(store.asked) == len(chain))
        node.check()
    assert store.asked == [LOOKUP_SHARDS, LOOKUP_SHARDS - 10]


def test_of_a_chain_that_is_awaited_only_the_next_chunks_are_asked_for(
    short_dir: Path, filled: SlowStore
) -> None:
    chain = [*KEYS, *prompt("more", 100)]
    filled.asked.clear()
    with Node(short_dir / "s.sock", filled) as node, Engine(node.address) as engine:
        engine.scheduler.client.pull_chain("unknown node", chain)
        eventually(lambda: len(filled.asked) >= 4)
    assert filled.asked[0] == len(chain)
    assert max(filled.asked[1:]) < 20


def test_a_prefetch_has_it_ready(short_dir: Path, filled: SlowStore) -> None:
    with Node(short_dir / "s.sock", filled) as node, Engine(node.address) as engine:
        engine.scheduler.client.prefetch(KEYS)
        eventually(lambda: node.status().catalog.resident_chunks == len(KEYS))
        filled.before["read"] = never
        assert engine.load(KEYS) == len(KEYS)


@pytest.mark.parametrize("stuck_in", ["contains", "read"])
def test_one_that_is_stuck_costs_a_deadline_and_only_its_own_chunks(
    short_dir: Path, filled: SlowStore, stuck_in: str
) -> None:
    filled.before[stuck_in] = never
    mine, disks = prompt("mine", 4), prompt("disk", 4)
    settings = {
        "local_disk": str(short_dir / "disk"),
        "promote_deadline_ms": 2000.0,
        "stop_deadline_s": 0.5,
    }
    with Node(short_dir / "s.sock", filled, **settings) as node:
        with Engine(node.address) as engine:
            engine.save([*disks])
            flush(node.address)
            with connect(node.address) as control:
                control.clear(tier="memory")
            engine.save(mine)
            scheduler = engine.scheduler
            lease_id = scheduler.client.ask(KEYS)
            assert lease_id is not None
            for _ in range(5):
                assert seconds(lambda: engine.load(mine)) < 2
                assert engine.load(mine) == 4
            assert seconds(lambda: engine.load(disks)) < 2
            assert engine.load(disks) == 4
            node.check()
            if stuck_in == "contains":
                # Nobody asks for ever: the same chunks are left alone for a moment.
                eventually(lambda: not node.status().catalog.tiers[MEMORY_TIER].looking_up)
            else:
                assert node.status().catalog.promoting_bytes == 8 * EXTENT_BYTES
            scheduler.client.release([lease_id])
        node.call(filled.before.clear)


def test_a_changed_deadline_is_that_of_further_lookups(short_dir: Path, filled: SlowStore) -> None:
    settings = {"promote_deadline_ms": 600_000.0, "stop_deadline_s": 0.5}
    with Node(short_dir / "s.sock", filled, **settings) as node, Engine(node.address) as engine:
        filled.before["contains"] = never
        change = {"promote_deadline_ms": 50}
        node.call(lambda: node.service.settings.change(change, dry_run=False, version=None))
        filled.asked.clear()
        engine.scheduler.client.prefetch(KEYS)
        eventually(lambda: filled.asked)
        eventually(lambda: not node.status().catalog.tiers[MEMORY_TIER].looking_up)
        node.call(filled.before.clear)


def test_a_slow_one_is_used_as_far_as_it_came_in_time(short_dir: Path, filled: SlowStore) -> None:
    reads, go_on = 0, asyncio.Event()

    async def stop_after_three() -> None:
        nonlocal reads
        reads += 1
        if reads > 3:
            await go_on.wait()

    filled.before["read"] = stop_after_three
    with Node(short_dir / "s.sock", filled) as node:
        with Engine(node.address) as engine:
            engine.scheduler.client._promote_deadline_s = 2
            assert engine.load(KEYS) == 3
            node.call(go_on.set)
            assert eventually(lambda: engine.load(KEYS) == 8)
        settled(node.address, members=0)


def test_a_lookup_that_waits_for_no_tier_has_one_final_answer_and_is_counted(
    short_dir: Path, filled: SlowStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Node(short_dir / "s.sock", filled) as node, Engine(node.address) as engine:
        assert engine.save(KEYS[:3]) == 3
        client, answers = engine.scheduler.client, list[bool]()
        enter = client.received

        def note(message: ServiceMessage) -> None:
            if isinstance(message, Acquired):
                answers.append(message.final)
            enter(message)

        monkeypatch.setattr(client, "received", note)
        client.configure(10.0, 0.0)
        assert engine.load(KEYS) == 3
        eventually(lambda: len(answers) == 2)
        assert answers == [False, True]
        assert not node.call(lambda: len(node.service.loads._questions))
        (counts,) = node.call(node.service.accounts.tokens).values()
        assert (counts.asked, counts.missed["late"]) == (8 * CHUNK_SIZE, 5 * CHUNK_SIZE)


def test_a_tier_that_gave_no_answer_has_not_said_that_a_chain_is_absent(
    short_dir: Path, filled: SlowStore
) -> None:
    settings = {"remote_lookup_ttl_s": 3600.0}
    with Node(short_dir / "s.sock", filled, **settings) as node, Engine(node.address) as engine:
        filled.broken = "on fire"
        engine.scheduler.client.pull_chain(UNKNOWN_NODE, KEYS)
        assert engine.load(KEYS) == 0
        filled.broken = ""
        assert eventually(lambda: engine.load(KEYS) == len(KEYS), 20)


def test_one_that_fails_is_a_miss_and_is_back_when_it_works(
    short_dir: Path, filled: SlowStore
) -> None:
    with Node(short_dir / "s.sock", filled, remote_lookup_ttl_s=0.1) as node:
        with Engine(node.address) as engine:
            filled.broken = "on fire"
            more = prompt("more", 12)
            for number in range(len(more)):
                assert engine.load([*KEYS[:1], *more[number:]]) == 0
                time.sleep(0.11)
            status = node.status()
            assert not status.tiers[MEMORY_TIER].online
            assert "on fire" in status.tiers[MEMORY_TIER].last_error
            assert not status.catalog.tiers[MEMORY_TIER].online
            engine.save(more)
            filled.broken = ""
            assert eventually(lambda: engine.load(KEYS) == 8)
        settled(node.address, members=0)


def test_wrong_bytes_are_a_miss(short_dir: Path, filled: SlowStore) -> None:
    for name in sorted(name for name in filled.blobs if name.endswith(".kv")):
        blob = bytearray(filled.blobs[name])
        blob[5000] ^= 1
        filled.blobs[name] = bytes(blob)
    with Node(short_dir / "s.sock", filled) as node, Engine(node.address) as engine:
        assert engine.load(KEYS) == 0
        assert node.status().tiers[MEMORY_TIER].rejected >= 1
        node.check()


def test_what_a_faster_one_lost_comes_from_a_slower_one(short_dir: Path, filled: SlowStore) -> None:
    fast = SlowStore()
    fast.blobs = dict(filled.blobs)
    with Node(short_dir / "s.sock", fast, filled) as node, Engine(node.address) as engine:

        async def lose() -> None:
            for name in [name for name in fast.blobs if name.endswith(".kv")]:
                del fast.blobs[name]

        fast.before["read"] = lose
        assert engine.load(KEYS) == len(KEYS)
        status = node.status().catalog
        assert status.failed_promotions > 0
        assert status.promoted_chunks == len(KEYS)
        flush(node.address)
        del fast.before["read"]
        assert len([name for name in fast.blobs if name.endswith(".kv")]) == len(KEYS), "filled"


def test_reads_go_before_writes(short_dir: Path, filled: SlowStore) -> None:
    order: list[str] = []

    def note(what: str) -> Callable[[], Awaitable[object]]:
        async def noted() -> None:
            order.append(what)
            await asyncio.sleep(0.05)

        return noted

    filled.before = {"read": note("read"), "write": note("write")}
    with Node(short_dir / "s.sock", filled) as node, Engine(node.address) as engine:
        lease_id = engine.scheduler.client.ask(KEYS)
        assert lease_id is not None
        eventually(lambda: "read" in order)
        engine.save(prompt("new", 4))
        flush(node.address)
        engine.scheduler.client.release([lease_id])
    assert order == ["read"] * 8 + ["write"] * 4


def test_a_full_queue_drops_the_oldest_and_saves_go_on(short_dir: Path) -> None:
    store = SlowStore()
    store.before["write"] = slow(0.02)
    settings = {"write_queue_size": 4 * EXTENT_BYTES, "max_local_cpu_size": 4 << 20}
    with Node(short_dir / "s.sock", store, **settings) as node, Engine(node.address) as engine:
        node.call(lambda: None)
        for number in range(20):
            assert engine.save(prompt(number, 16)) == 16
        flush(node.address)
        tier = node.status().catalog.tiers[MEMORY_TIER]
        assert tier.written + tier.dropped_writes == 320
        node.check()


def test_a_shared_tier_is_shown_and_cleared_by_its_name(short_dir: Path, filled: SlowStore) -> None:
    with Node(short_dir / "s.sock", filled) as node:
        with connect(node.address) as control:
            control.clear()
            assert len(filled.blobs) > len(KEYS)
            cleared = control.clear(tier=MEMORY_TIER)
            assert cleared.chunks == len(KEYS)
            assert cleared.bytes >= len(KEYS) * EXTENT_BYTES
            with pytest.raises(KVHavenError, match="expected one of memory, shared"):
                control.clear(tier="s3")
            filled.broken = "gone"
            with pytest.raises(KVHavenError, match="gone"):
                control.clear(tier=MEMORY_TIER)
        assert not [name for name in filled.blobs if name.endswith(".kv")]
        assert node.status().tiers[MEMORY_TIER].capacity_bytes is None


def test_clears_of_a_shared_tier_follow_each_other(short_dir: Path, filled: SlowStore) -> None:
    filled.before["folders"] = slow(0.02)
    with Node(short_dir / "s.sock", filled) as node, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Raw(node)) for _ in range(5)]
        for client in clients:
            client.say(Hello(), Clear(1, b"", MEMORY_TIER))
        for client in clients:
            assert isinstance(client.hear(), Welcome)
        cleared = [client.hear() for client in clients]
        assert [answer.chunks for answer in cleared if isinstance(answer, Cleared)] == [
            8,
            0,
            0,
            0,
            0,
        ]
    assert filled.scans == ["begins", "ends"] * 5


def test_a_flush_is_one_of_its_connection_and_ends_with_it(short_dir: Path) -> None:
    store, writing = SlowStore(), threading.Event()

    async def until_told() -> None:
        while not writing.is_set():  # noqa: ASYNC110  a thread sets it
            await asyncio.sleep(0.005)

    store.before["write"] = until_told
    with Node(short_dir / "s.sock", store) as node, Engine(node.address) as engine:
        tasks = node.call(lambda: len(node.service._tasks))
        engine.save(KEYS)
        with Raw(node) as gone, Raw(node) as patient, Raw(node) as hasty:
            gone.say(Hello(), *[Flush(id_, 600_000) for id_ in range(1, 101)])
            patient.say(Hello(), Flush(1, 600_000))
            hasty.say(Hello(), Flush(1, 20))
            for client in (gone, patient, hasty):
                assert isinstance(client.hear(), Welcome)
            refused = [gone.hear() for _ in range(99)]
            assert [answer.id for answer in refused if isinstance(answer, Refused)] == [
                *range(2, 101)
            ]
            assert hasty.hear() == Flushed(1, len(KEYS))
            assert node.call(lambda: len(node.service._tasks)) == tasks + 2
            gone.socket.close()
            eventually(lambda: node.call(lambda: len(node.service._tasks)) == tasks + 1)
            writing.set()
            assert patient.hear() == Flushed(1, 0)
            assert patient.say(Flush(2, 600_000)).hear() == Flushed(2, 0)
        eventually(lambda: node.call(lambda: len(node.service._tasks)) == tasks)


def test_tiers_are_made_in_the_order_of_the_settings(tmp_path: Path) -> None:
    urls = f"{tmp_path}/one  fs://{tmp_path}/two"
    settings = load_settings(
        {"local_disk": str(tmp_path / "disk"), "remote_url": urls}, {}
    ).settings
    tiers = make_tiers(settings)
    assert list(tiers) == ["disk", "fs", "fs-2"]
    assert [tier.shared for tier in tiers.values()] == [False, True, True]

    async def close() -> None:
        for tier in tiers.values():
            await tier.close(1)

    asyncio.run(close())


def test_a_url_without_a_tier_is_refused_without_its_password() -> None:
    settings = load_settings({"remote_url": "gopher://me:hunter2@host/x?secret=abc"}, {}).settings
    with pytest.raises(ConfigError, match="no tier has the scheme gopher") as error:
        make_tiers(settings)
    assert "hunter2" not in str(error.value)
    assert "abc" not in str(error.value)


def test_an_unexpected_failure_of_a_tier_is_a_miss(short_dir: Path, filled: SlowStore) -> None:
    async def raise_type_error() -> None:
        raise TypeError("a bug")

    filled.before["contains"] = raise_type_error
    with Node(short_dir / "s.sock", filled) as node:
        with Engine(node.address) as engine:
            assert engine.load(KEYS) == 0
        settled(node.address, members=0)
    assert issubclass(TierError, KVHavenError)


def test_a_chunk_that_lacks_a_shard_is_not_even_read(short_dir: Path) -> None:
    store = SlowStore()
    with Node(short_dir / "other.sock", store) as other, Engine(other.address, 3) as engine:
        engine.save(KEYS)
        flush(other.address)
    (name,) = [name for name in store.blobs if KEYS[5].hex() in name and "h1.2" in name]
    del store.blobs[name]
    with Node(short_dir / "s.sock", store) as node, Engine(node.address, 3) as engine:
        assert engine.load(KEYS) == 5
        status = node.status().catalog
        assert (status.failed_promotions, status.tiers[MEMORY_TIER].found) == (0, 7)
        engine.save(KEYS[5:], KEYS[4])
        flush(node.address)
    assert name in store.blobs, "what is missing is written"
