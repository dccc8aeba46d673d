# SPDX-License-Identifier: Apache-2.0
"""Damage in memory and on disk is a miss that is counted; it is never served."""

import asyncio
import contextlib
import copy
import functools
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from kvhaven.catalog.actions import TierName
from kvhaven.client.control import connect
from kvhaven.errors import KVHavenError
from kvhaven.tiers.base import StoredShard
from kvhaven.tiers.local.lock import Directory
from kvhaven.types import Checksum, ChunkKey
from tests.crash.engine import MODEL, SHARD_BYTES, Engine, Rank, prompt
from tests.crash.node import MIB, NodeThread, audit_disk, eventually, flush, settled

KEYS = prompt("p", 6)
DISK = TierName("disk")


@contextlib.contextmanager
def serving(path: Path, **settings: object) -> Iterator[tuple[NodeThread, Engine]]:
    """Yield a node with a disk tier, and an engine with two ranks on it."""
    disk = str(path / "disk")
    settings = {"local_disk": disk, "verify_memory": "off"} | settings
    with NodeThread(path / "s.sock", **settings) as node:
        with Engine(node.address, 2) as engine:
            yield node, engine
            settled(node.address)
            node.check()
        settled(node.address, members=0)


def flip(node: NodeThread, key: ChunkKey, rank: int, at: int) -> None:
    """Flip a bit of a resident chunk."""
    catalog = node.service.catalog
    extent = node.call(lambda: catalog._space.entries[key].extent)
    offset = SHARD_BYTES + -SHARD_BYTES % 4096
    with node.arena.memory(extent) as memory:
        memory[rank * offset + at] ^= 0x10


@pytest.mark.parametrize("at", [0, 4097, SHARD_BYTES - 1])
def test_a_flipped_bit_in_memory_is_found_before_it_is_offered(short_dir: Path, at: int) -> None:
    with serving(short_dir, verify_memory="always") as (node, engine):
        engine.save(KEYS)
        assert eventually(lambda: engine.load(KEYS)) == 6
        flush(node.address)
        flip(node, KEYS[3], 1, at)
        assert engine.load(KEYS) == 3
        status = node.status()
        assert status.damaged_chunks == 1
        # It was stored before it was damaged, with the checksum of its commit: it comes back.
        assert eventually(lambda: engine.load(KEYS) == 6)
        assert node.status().damaged_chunks == 1


def test_what_was_damaged_in_memory_is_not_blessed_by_the_disk(short_dir: Path) -> None:
    """The demote writes the worker's checksum: the damaged bytes do not match it."""
    with serving(short_dir) as (node, engine):
        tier = next(iter(node.service.tiers.values()))
        write, begun, go_on = tier.write, threading.Event(), threading.Event()

        async def late(shard: StoredShard, payload: memoryview, checksum: Checksum) -> int:
            begun.set()
            while not go_on.is_set():  # noqa: ASYNC110 - of another thread
                await asyncio.sleep(0.01)
            return await write(shard, payload, checksum)

        tier.write = late  # type: ignore[method-assign]
        engine.save(KEYS[:1])
        assert begun.wait(120)
        flip(node, KEYS[0], 0, 5)
        go_on.set()
        flush(node.address)
        with connect(node.address) as control:
            control.clear(tier="memory")
        assert engine.load(KEYS[:1]) == 0
        (health,) = node.status().tiers.values()
        assert health.rejected == 1
    assert audit_disk(short_dir / "disk").clean


def test_a_sample_finds_damage_sooner_or_later(short_dir: Path) -> None:
    with serving(short_dir, verify_memory="sample", local_disk=None) as (node, engine):
        engine.save(KEYS)
        eventually(lambda: engine.load(KEYS) == 6)
        flip(node, KEYS[4], 0, 77)
        for _ in range(2000):
            lease = engine.scheduler.acquire(KEYS)
            assert lease is not None
            engine.scheduler.client.release([lease.lease_id])
            if len(lease.extents) < 6:
                break
        status = node.status()
        assert lease is not None
        assert len(lease.extents) == 4
        assert status.damaged_chunks == 1
        assert status.verified_chunks >= 1


def test_verifying_everything_beside_evictions_raises_no_false_alarm(short_dir: Path) -> None:
    """A lease may end while its chunks are checked: what is read then says nothing."""
    dice = random.Random(7)
    with serving(short_dir, verify_memory="always", max_local_cpu_size=MIB) as (node, engine):
        prompts = [prompt(n, 8) for n in range(10)]
        for _ in range(150):
            keys = dice.choice(prompts)
            lease_id = engine.scheduler.client.ask(keys)
            assert lease_id is not None
            engine.scheduler.client.release([lease_id])
            engine.save(keys)
            engine.load(dice.choice(prompts))
        assert node.status().damaged_chunks == 0
        assert node.status().catalog.evictions > 0


def stored_files(path: Path) -> list[Path]:
    return sorted(path.glob("disk/*/*/*.kv"))


def flip_payload(file: Path) -> None:
    with file.open("r+b") as content:
        content.seek(4096 + 123)
        byte = content.read(1)
        content.seek(4096 + 123)
        content.write(bytes([byte[0] ^ 1]))


def flip_header(file: Path) -> None:
    with file.open("r+b") as content:
        content.seek(20)
        content.write(b"\xff\xff")


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 4096)


def empty(file: Path) -> None:
    os.truncate(file, 0)


def remove(file: Path) -> None:
    file.unlink()


def another_chunk(file: Path) -> None:
    other = next(f for f in stored_files(file.parents[3]) if f.name[:64] != file.name[:64])
    shutil.copyfile(other, file)


def another_rank(file: Path) -> None:
    (other,) = [f for f in file.parent.glob(f"{file.name[:64]}*") if f != file]
    shutil.copyfile(other, file)


DAMAGES = [flip_payload, flip_header, truncate, empty, remove, another_chunk, another_rank]


@pytest.mark.parametrize("when", ["running", "before the start"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_a_miss(
    short_dir: Path, damage: Callable[[Path], None], when: str
) -> None:
    with serving(short_dir) as (node, engine):
        engine.save(KEYS)
        flush(node.address)
        (file, *_) = [f for f in stored_files(short_dir) if f.name.startswith(KEYS[2].hex())]
        if when == "running":
            damage(file)
            with connect(node.address) as control:
                control.clear(tier="memory")
            check_that_it_is_a_miss(node, engine)
    if when != "running":
        damage(file)
        with serving(short_dir) as (node, engine):
            eventually(lambda: all(t.scanned for t in node.status().catalog.tiers.values()))
            check_that_it_is_a_miss(node, engine)
    assert audit_disk(short_dir / "disk").clean


def check_that_it_is_a_miss(node: NodeThread, engine: Engine) -> None:
    assert engine.load(KEYS) == 2
    assert engine.load(KEYS) == 2
    (health,) = node.status().tiers.values()
    catalog = node.status().catalog
    assert health.rejected + health.misses + catalog.missed_chunks > 0
    # What is missing is computed again, and stored again.
    assert engine.save(KEYS[2:], KEYS[1]) >= 1
    assert eventually(lambda: engine.load(KEYS) == 6)
    flush(node.address)


def test_another_models_file_under_our_name_is_a_miss(short_dir: Path) -> None:
    with serving(short_dir) as (node, engine):
        engine.save(KEYS)
        with Engine(node.address, 2, engine="other", model="another") as other:
            other.save(prompt("other", 1))
            flush(node.address)
        ours = [f for f in stored_files(short_dir) if f.name.startswith(KEYS[2].hex())]
        theirs = [f for f in stored_files(short_dir) if f.parts[-3] != ours[0].parts[-3]]
        assert len(theirs) == 2
        for file, source in zip(ours, theirs, strict=True):
            shutil.copyfile(source, file)
        with connect(node.address) as control:
            control.clear(tier="memory")
        check_that_it_is_a_miss(node, engine)
        (health,) = node.status().tiers.values()
        assert health.rejected >= 1
    assert audit_disk(short_dir / "disk").clean


# --- clear, flush, restart --------------------------------------------------------------------


def test_clearing_takes_what_was_asked_for_and_nothing_else(short_dir: Path) -> None:
    with serving(short_dir) as (node, engine), Engine(node.address, engine="b", model="b") as other:
        theirs = prompt("theirs", 6)
        engine.save(KEYS)
        other.save(theirs)
        flush(node.address)
        with connect(node.address) as control:
            cleared = control.clear(tier="memory")
            assert cleared.chunks == 12
            assert eventually(lambda: engine.load(KEYS) == 6)  # from disk
            assert control.clear(namespace=engine.ranks[0].attach.namespace).chunks == 12
            assert engine.load(KEYS) == 0
            assert eventually(lambda: other.load(theirs) == 6)
            assert control.clear(tier="disk").chunks == 6
            assert other.load(theirs) == 6
            assert control.clear().chunks == 6
            assert other.load(theirs) == 0
            with pytest.raises(
                KVHavenError, match="unknown tier 'tape'; expected one of memory, disk"
            ):
                control.clear(tier="tape")
            with pytest.raises(KVHavenError, match=r"namespace 0101.* is unknown"):
                control.clear(namespace=bytes([1]) * 32)
            assert control.status()  # the connection still stands
        eventually(lambda: not stored_files(short_dir))


def test_a_chunk_that_is_cleared_while_it_is_leased_stays_until_it_is_let_go(
    short_dir: Path,
) -> None:
    with serving(short_dir) as (node, engine):
        engine.save(KEYS)
        lease = eventually(lambda: engine.scheduler.acquire(KEYS))
        with connect(node.address) as control:
            control.clear()
        engine.save(prompt("others", 20))
        engine.scheduler.client.dispatched(lease.lease_id)
        assert [rank.load(lease, KEYS) for rank in engine.ranks] == [6, 6]


def test_what_was_stored_is_found_after_a_restart(short_dir: Path) -> None:
    with serving(short_dir) as (node, engine):
        engine.save(KEYS)
    # It ended with a flush.
    with serving(short_dir) as (node, engine):
        assert eventually(lambda: engine.load(KEYS) == 6)
        status = node.status()
        assert status.namespaces[0].model == MODEL
        assert status.catalog.promoted_chunks == 6


def test_a_lease_says_what_came_from_memory_and_what_from_a_tier(short_dir: Path) -> None:
    with serving(short_dir) as (_, engine):
        engine.save(KEYS[:4])
    with serving(short_dir) as (_, engine):
        eventually(lambda: engine.load(KEYS[:2]) == 2)
        # Under load, the tier's answer may be late: then the lease has what is in memory.
        while len((lease := eventually(lambda: engine.scheduler.acquire(KEYS[:4]))).sources) < 4:
            engine.scheduler.client.release([lease.lease_id])
        assert list(lease.sources) == [0, 0, 1, 1]
        engine.scheduler.client.release([lease.lease_id])


def test_prefetched_chunks_are_resident_when_they_are_asked_for(short_dir: Path) -> None:
    with serving(short_dir) as (node, engine):
        engine.save(KEYS)
    with serving(short_dir) as (node, engine):
        eventually(lambda: next(iter(node.status().catalog.tiers.values())).chunks == 6)
        engine.scheduler.client.prefetch(KEYS)
        eventually(lambda: node.status().catalog.resident_chunks == 6)
        lease = engine.scheduler.acquire(KEYS)
        assert lease is not None
        assert all(lease.sources)  # waited for by nobody, but the disk supplied them
        engine.scheduler.client.release([lease.lease_id])
        lease = engine.scheduler.acquire(KEYS)
        assert lease is not None
        assert not any(lease.sources)
        engine.scheduler.client.release([lease.lease_id])


def test_a_promotion_that_takes_too_long_is_cut_to_what_is_ready(short_dir: Path) -> None:
    with serving(short_dir) as (node, engine):
        engine.save(KEYS)
    with serving(short_dir) as (node, engine):
        eventually(lambda: engine.load(KEYS[:2]) == 2)
        tier = next(iter(node.service.tiers.values()))
        read = tier.read

        async def slow(shard: StoredShard, into: memoryview) -> Checksum:
            await asyncio.sleep(0.5)
            return await read(shard, into)

        tier.read = slow  # type: ignore[method-assign]
        engine.scheduler.client._promote_deadline_s = 0.1
        lease = engine.scheduler.acquire(KEYS)
        assert lease is not None
        assert len(lease.extents) == 2
        engine.scheduler.client.release([lease.lease_id])
        engine.scheduler.client._promote_deadline_s = 5
        assert engine.load(KEYS) == 6


def test_the_second_service_on_a_disk_says_who_holds_it_and_serves(short_dir: Path) -> None:
    with serving(short_dir) as (_, engine):
        engine.save(KEYS)
        with NodeThread(
            short_dir / "t.sock", local_disk=str(short_dir / "disk"), breaker_pause_s=0.1
        ) as second:
            with Engine(second.address) as other:
                (health,) = second.status().tiers.values()
                assert not health.online
                assert health.holder.startswith(f"pid {os.getpid()} on ")
                assert other.save(KEYS) == 6
                assert eventually(lambda: other.load(KEYS) == 6)
            second.check()
        assert engine.load(KEYS) == 6


def test_lookups_use_what_a_status_shows_as_online(short_dir: Path) -> None:
    """The catalog hears of a tier's health once a second; whoever saw a status need not wait."""
    with serving(short_dir) as (node, _):
        tier = node.service.tiers[DISK]
        known = tier.health()
        for online in (False, True) * 10:
            shown = msgspec.structs.replace(known, online=online)
            tier.health = functools.partial(copy.copy, shown)  # type: ignore[method-assign]
            status = node.status()
            assert status.tiers["disk"].online is online
            assert status.catalog.tiers[DISK].online is online


def test_what_is_cleared_while_another_holds_the_disk_does_not_come_back(short_dir: Path) -> None:
    with serving(short_dir, breaker_pause_s=0.05) as (node, engine):
        engine.save(KEYS)
        flush(node.address)
        (short_dir / "disk" / "lock").unlink()
        with contextlib.closing(Directory(short_dir / "disk")):
            eventually(lambda: not node.status().tiers["disk"].online)
            with connect(node.address) as control:
                assert control.clear().chunks > 0
            assert len(stored_files(short_dir)) == 2 * len(KEYS)
        eventually(lambda: not stored_files(short_dir))
        eventually(lambda: node.status().catalog.tiers[DISK].online)
        eventually(lambda: node.status().catalog.tiers[DISK].scanned)
        assert engine.load(KEYS) == 0
        assert engine.save(KEYS) == 6
        flush(node.address)
        assert len(stored_files(short_dir)) == 2 * len(KEYS)


def test_what_another_node_saved_and_was_cleared_does_not_come_back(short_dir: Path) -> None:
    """Whatever asks for a status while the disk is opened anew."""
    with (
        serving(short_dir, breaker_pause_s=0.05) as (node, engine),
        connect(node.address) as control,
    ):
        engine.save(KEYS)
        flush(node.address)
        shutil.copytree(short_dir / "disk", short_dir / "saved")
        control.clear()
        eventually(lambda: not stored_files(short_dir))
        (short_dir / "disk" / "lock").unlink()
        with contextlib.closing(Directory(short_dir / "disk")):
            eventually(lambda: not node.status().tiers["disk"].online)
            # Files that this node does not know.
            unknown = shutil.ignore_patterns("lock")
            shutil.copytree(
                short_dir / "saved", short_dir / "disk", ignore=unknown, dirs_exist_ok=True
            )
            assert stored_files(short_dir)
            control.clear()
        eventually(lambda: node.status().catalog.tiers[DISK].online)
        eventually(lambda: node.status().catalog.tiers[DISK].scanned)
        eventually(lambda: not stored_files(short_dir))
        assert engine.load(KEYS) == 0


def test_what_is_cleared_before_the_disk_was_ever_open_is_not_found(short_dir: Path) -> None:
    with serving(short_dir) as (node, engine):
        engine.save(KEYS)
        flush(node.address)
    with contextlib.ExitStack() as held:
        held.enter_context(contextlib.closing(Directory(short_dir / "disk")))
        with serving(short_dir, breaker_pause_s=0.05) as (node, engine):
            with connect(node.address) as control:
                control.clear()
            held.close()
            eventually(lambda: node.status().catalog.tiers[DISK].scanned)
            eventually(lambda: not stored_files(short_dir))
            assert engine.load(KEYS) == 0


def test_a_disk_that_is_removed_while_running_is_opened_and_scanned_anew(short_dir: Path) -> None:
    with serving(short_dir, breaker_pause_s=0.1) as (node, engine):
        tier = next(iter(node.service.tiers.values()))
        tier._retry_s = 0.05  # type: ignore[attr-defined]
        engine.save(KEYS)
        flush(node.address)
        # Renamed first: the tier opens it anew at once, beside what is being removed.
        (short_dir / "disk").rename(short_dir / "removed")
        shutil.rmtree(short_dir / "removed")
        eventually(lambda: tier.health().epoch == 2)
        time.sleep(1.1)  # until the service has asked for its health again
        assert engine.load(KEYS) == 6  # from memory
        assert engine.save(prompt("q", 3)) == 3
        eventually(lambda: len(stored_files(short_dir)) == 6)
        assert eventually(lambda: engine.load(prompt("q", 3)) == 3)


def test_a_disk_that_hangs_does_not_hold_up_the_end(short_dir: Path) -> None:
    with NodeThread(
        short_dir / "s.sock", local_disk=str(short_dir / "disk"), stop_deadline_s=0.5
    ) as node:
        tier = next(iter(node.service.tiers.values()))

        async def never(shard: StoredShard, payload: memoryview, checksum: Checksum) -> int:
            await asyncio.sleep(3600)
            return 0

        tier.write = never  # type: ignore[method-assign]
        with Engine(node.address) as engine:
            engine.save(KEYS)


def test_a_rank_alone_reserves_and_commits_nothing_before_the_others_come(short_dir: Path) -> None:
    with NodeThread(short_dir / "s.sock") as node:
        first = Rank(node.address, 0, 2).start()
        assert first.save(KEYS) == 0
        second = Rank(node.address, 1, 2).start()
        assert first.save(KEYS) == second.save(KEYS) == 6
        first.close()
        second.close()
        settled(node.address, members=0)
