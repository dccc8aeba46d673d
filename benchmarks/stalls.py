# SPDX-License-Identifier: Apache-2.0
"""`loop.stall`: milliseconds for which the service's event loop stands still, at a million chunks.

A real node service in this process, asked over its socket by a process beside it, with a real disk
tier. A million chunks of two models and 5,000 tenants are in the arena, and in the disk's index.
Only metadata is real: the arena is address space alone, and the disk tier's files are sparse. Each
kind of event has a row (`loop.stall.clear_all`), and `loop.stall` is the longest. The limit is what
the design allows, 5 ms; `loop.stall.p9999` is the 99.99th percentile of all callbacks by the
clock, whose limit is 10 ms.

A stall is one callback of the loop. Its length is the processor time of the loop's thread, so that
other processes of a busy machine do not count. Beside it stands what the clock saw of it, and how
much of that the thread waited: for a processor (the second figure of
`/proc/thread-self/schedstat`), or for anything else, mostly for the interpreter while a thread of a
tier had it. Processor time still depends on what others do to caches, and to the cores below a
virtual machine: `loop.stall.machine` is the longest of 20,000 times the same work of about a
millisecond, and its limit their median. `loop.stall.often` is how many callbacks took more than
5 ms in a minute of processor time, and its limit how many of that same work did.
"""

import asyncio
import contextlib
import hashlib
import itertools
import logging
import multiprocessing
import os
import random
import shutil
import socket
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import xxhash

from benchmarks.results import Result, at_most
from examples.demo.processes import ProcessError
from kvhaven.catalog.actions import TierName
from kvhaven.client.control import connect
from kvhaven.config import Settings
from kvhaven.keys import namespace_digest, tenant_id
from kvhaven.protocol import (
    Ack,
    Acquire,
    Acquired,
    Attached,
    AttachRank,
    AttachScheduler,
    Commit,
    FrameReader,
    Granted,
    Hello,
    Message,
    Prefetch,
    Ready,
    Release,
    Reserve,
    SegmentInfo,
    ServiceMessage,
    Welcome,
    batches,
    decode_service,
    encode,
)
from kvhaven.service.arena import SEGMENT
from kvhaven.service.connection import Listener
from kvhaven.service.main import collect_young, favour_the_loop, tame_collector
from kvhaven.service.server import Service
from kvhaven.service.status import ServiceStatus
from kvhaven.service.tier_setup import make_tiers
from kvhaven.tiers.base import Namespace, StoredShard
from kvhaven.tiers.format.header import pack_header, stored_bytes
from kvhaven.tiers.format.manifest import MANIFEST_NAME, folder_name, pack_manifest
from kvhaven.types import (
    NO_TENANT,
    Checksum,
    ChunkKey,
    Extent,
    Shard,
    ShardId,
    ShardTable,
    TenantId,
)

_CHUNKS = int(os.environ.get("KVHAVEN_STALL_CHUNKS", "1000000"))
_CHUNK_BYTES = 64 << 10
_LARGE_BYTES = 640 << 10
_ARENA_BYTES = (_CHUNKS + 1024) * _CHUNK_BYTES
_CHAIN = 512
_TENANTS = 5000
_LIMIT_MS = 5.0
_P9999_LIMIT_MS = 10.0
_REST_S = 0.3
_IDLE = ""
_SAME = "the median of the same work"
_SAME_OFTEN = "how often that same work took as long"
_STEPS = (
    *("scan", "fill", "acquire", "promote", "acquire_long", "prefetch", "prefetch_long", "status"),
    *("save", "save_long", "save_large", "hold", "burst", "lose", "limit", "limit_disk"),
    *("clear_tenant", "clear_namespace", "clear_all"),
)


class Stall(NamedTuple):
    """The longest callback of a kind, in milliseconds.

    Processor time, time by the clock, and what of that was a wait for a processor.
    """

    held: float
    wall: float
    queued: float


class Watch:
    """Times every callback of the loop that runs in this thread, by the kind of event under way."""

    def __init__(self) -> None:
        self.kind = _IDLE
        self.longest: dict[str, Stall] = {}
        self.walls = array("f")
        self.held = array("f")
        self.same = array("f")
        self._schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    async def do_the_same(self, times: int = 20_000) -> None:
        """Note the processor time of the same work, in many callbacks: of look-ups, as ours is."""
        known = dict.fromkeys(range(1 << 20))
        keys = random.Random(1).sample(range(1 << 20), 1 << 12)
        for _ in range(times):
            before = time.thread_time_ns()
            for key in keys:
                known[key]
            self.same.append((time.thread_time_ns() - before) / 1e6)
            await asyncio.sleep(0)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Time callbacks meanwhile."""
        handle: Any = asyncio.Handle
        run = handle._run  # noqa: SLF001  what asyncio offers itself only logs, by the clock

        def timed(this: asyncio.Handle) -> None:
            before = self._now()
            run(this)
            self._note(Stall(*map(float.__sub__, self._now(), before)))

        handle._run = timed  # noqa: SLF001
        try:
            yield
        finally:
            handle._run = run  # noqa: SLF001

    def close(self) -> None:
        """Give the descriptor back, when the loop has ended."""
        os.close(self._schedstat)

    def _note(self, stall: Stall) -> None:
        if self.kind != _IDLE:
            self.walls.append(stall.wall)
            self.held.append(stall.held)
            if stall.held > self.longest.setdefault(self.kind, stall).held:
                self.longest[self.kind] = stall

    def _now(self) -> Stall:
        """Return the thread's clocks: a `Stall` is what they differ by."""
        queued = int(os.pread(self._schedstat, 64, 0).split()[1])
        times = time.thread_time_ns(), time.perf_counter_ns(), queued
        return Stall(*(nanoseconds / 1e6 for nanoseconds in times))


class AddressSpace:
    """An arena of addresses without memory, mapped by no process."""

    size = usable = _ARENA_BYTES
    allocating = False
    descriptors: tuple[int, ...] = ()

    def __init__(self) -> None:
        self._zeros = memoryview(bytearray(_LARGE_BYTES))

    def describe(self, lock_byte: int) -> tuple[SegmentInfo, ...]:
        """Return what there would be to map."""
        return (SegmentInfo(SEGMENT, self.size, lock_byte, self.usable),)

    def memory(self, extent: Extent) -> memoryview:
        """Return zeros."""
        return self._zeros[: extent.length]

    def is_mapped(self, _: int) -> bool:
        """Say that a member that is lost is gone."""
        return False

    def grow(self, _: Callable[[], None]) -> None:
        """Do nothing: it is all there."""

    def stop_growing(self) -> None:
        """Do nothing."""


class Client:
    """A blocking connection of one member."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(300)
        self._socket.connect(address)
        self._reader = FrameReader()
        self._heard: list[ServiceMessage] = []
        self.seq = 0
        self.ask(Hello(), Welcome)

    def say(self, *messages: Message) -> None:
        """Send messages."""
        self._socket.sendall(b"".join(encode(message) for message in messages))

    def hear(self, wanted: type[Any]) -> Any:
        """Return the next message of a kind."""
        while True:
            while not self._heard:
                data = self._socket.recv(1 << 20)
                if not data:
                    raise ConnectionError("the service closed the connection")
                self._heard = [decode_service(body) for body in self._reader.feed(data)]
            message = self._heard.pop(0)
            if isinstance(message, wanted):
                return message

    def ask(self, message: Message, wanted: type[Any]) -> Any:
        """Send a message and return the answer."""
        self.say(message)
        return self.hear(wanted)

    def reliably(self, *messages: Message) -> None:
        """Send reliable messages, numbered from `next_seq`, and wait until they are handled."""
        self.say(*messages)
        while self.hear(Ack).seq < self.seq:
            pass

    def next_seq(self) -> int:
        """Return the number of the next reliable message."""
        self.seq += 1
        return self.seq

    def close(self) -> None:
        """Disconnect."""
        self._socket.close()


class Engine:
    """One rank and a scheduler of a model whose chunks have one shard of `chunk_bytes`."""

    _numbers = itertools.count(1)

    def __init__(self, address: str, model: str, chunk_bytes: int = _CHUNK_BYTES) -> None:
        fields = {"model": model}
        self.shard = Shard(ShardId(0, (0, 1), (0, 1)), chunk_bytes)
        self.checksum = xxhash.xxh3_128_digest(bytes(chunk_bytes))
        self.digest = namespace_digest(fields)
        self.namespace = Namespace(self.digest, fields, ShardTable((self.shard,)))
        name = f"{model}-{next(self._numbers)}"
        self.rank, self.scheduler = Client(address), Client(address)
        attach = AttachRank(1, name, f"{name}-r", 0, 1, self.digest, fields, (self.shard,))
        segment = self.rank.ask(attach, Attached).segments[SEGMENT]
        number = self.rank.next_seq()
        self.rank.reliably(Ready(number, SEGMENT, segment.lock_byte, segment.usable))
        self.scheduler.ask(AttachScheduler(1, name, f"{name}-s", 1, 5000), Attached)

    def reserve(
        self, keys: Sequence[ChunkKey], tenant: TenantId = NO_TENANT, parent: bytes = b""
    ) -> list[tuple[ChunkKey, int, list[bytes]]]:
        """Reserve chunks; return what a commit says of those that were granted."""
        number = next(self._numbers)
        granted = self.rank.ask(
            Reserve(number, parent, b"".join(keys), number, tenant), Granted
        ).grants
        pairs = zip(keys, granted, strict=True)
        return [(key, grant[2], [self.checksum]) for key, grant in pairs if grant is not None]

    def save(
        self, keys: Sequence[ChunkKey], tenant: TenantId = NO_TENANT, parent: bytes = b""
    ) -> int:
        """Reserve and commit chunks; return how many were granted."""
        chunks = self.reserve(keys, tenant, parent)
        self.rank.reliably(Commit(self.rank.next_seq(), chunks))
        return len(chunks)

    def acquire(self, keys: Sequence[ChunkKey], tenant: TenantId = NO_TENANT) -> tuple[int, int]:
        """Lease chunks; return the ticket, and how many there were."""
        lease_id = next(self._numbers)
        answer = self.scheduler.ask(Acquire(lease_id, b"".join(keys), 60_000, tenant), Acquired)
        while not answer.final:
            answer = self.scheduler.hear(Acquired)
        return lease_id, len(answer.extents)

    def release(self, lease_ids: Sequence[int]) -> None:
        """End leases."""
        self.scheduler.reliably(Release(self.scheduler.next_seq(), list(lease_ids)))

    def close(self) -> None:
        """Disconnect."""
        self.rank.close()
        self.scheduler.close()


def chain(name: str, length: int = _CHAIN) -> list[ChunkKey]:
    """Return the keys of a chain."""
    return [ChunkKey(hashlib.sha256(f"{name}/{at}".encode()).digest()) for at in range(length)]


BIG = tenant_id("big")
_DISK = TierName("disk")


class Story:
    """What happens, in turn, to a service that is full; each method is a kind of event."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._address = str(root / "service.sock")
        many = _CHUNKS // 100 * 45 // _CHAIN
        self.mine = [chain(f"mine {n}") for n in range(many)]
        self.big = [chain(f"big {n}") for n in range(_CHUNKS // 4 // _CHAIN)]
        self.small = [
            (tenant_id(f"user {n}"), chain(f"user {n}", 10))
            for n in range(min(_TENANTS, _CHUNKS // 200))
        ]
        self.cold = [chain(f"cold {n}") for n in range(32)]
        left = _CHUNKS - sum(map(len, (*self.mine, *self.big))) - 10 * len(self.small)
        self.other = [chain(f"other {n}") for n in range(left // _CHAIN + 1)]

    def stored(self) -> list[tuple[str, TenantId, list[ChunkKey]]]:
        """Return what is to be on the disk at the start, that which is only there at the end."""
        return [
            *self.resident(),
            *(("one", NO_TENANT, keys) for keys in self.cold),
        ]

    def resident(self) -> list[tuple[str, TenantId, list[ChunkKey]]]:
        """Return what is to be in the arena."""
        return [
            *(("one", NO_TENANT, keys) for keys in self.mine),
            *(("one", BIG, keys) for keys in self.big),
            *(("one", tenant, keys) for tenant, keys in self.small),
            *(("two", NO_TENANT, keys) for keys in self.other),
        ]

    def make_files(self) -> None:
        """Make what the disk holds from an earlier life of the service."""
        whole = {keys[0] for keys in self.cold}
        _make_files(self._root / "disk", self.stored(), whole)

    def scan(self) -> None:
        """Start a service on a full disk."""
        wanted = sum(len(keys) for _, _, keys in self.stored())
        while self._status().catalog.tiers[_DISK].chunks < wanted:
            time.sleep(1)

    def fill(self) -> None:
        """Save a million chunks."""
        self.one = Engine(self._address, "one")
        self.two = Engine(self._address, "two")
        for model, tenant, keys in self.resident():
            engine = self.one if model == "one" else self.two
            engine.save(keys, tenant)

    def acquire(self) -> None:
        """Lease chains of 512 chunks, and let go."""
        for keys in self.mine[:500]:
            self.one.release([self.one.acquire(keys)[0]])

    def promote(self) -> None:
        """Ask for chains that are only on the disk, and for long prompts."""
        for keys in self.cold[:8]:
            lease_id, found = self.one.acquire(keys)
            assert found == len(keys), found
            self.one.release([lease_id])
        for first in (8, 16):
            keys = list(itertools.chain.from_iterable(self.cold[first : 2 * first]))
            lease_id, found = self.one.acquire(keys)
            assert found == len(keys), found
            self.one.release([lease_id])

    def acquire_long(self) -> None:
        """Ask for prompts of 1,000,000 tokens and more."""
        keys = list(itertools.chain.from_iterable(self.other[:64]))
        for length in (4096, 16384, 32768):
            lease_id, found = self.two.acquire(keys[:length])
            assert found == min(length, len(keys)), found
            self.two.release([lease_id])

    def prefetch(self) -> None:
        """See new requests."""
        for keys in self.mine[:200]:
            self.one.scheduler.say(Prefetch(b"".join(keys)))
        self.one.release([0])

    def prefetch_long(self) -> None:
        """See a long request."""
        keys = list(itertools.chain.from_iterable(self.other[:64]))
        self.two.scheduler.say(Prefetch(b"".join(keys)))
        self.two.release([0])

    def status(self) -> None:
        """Look at it."""
        for _ in range(5):
            self._status()

    def save(self) -> None:
        """Save into the full arena: one goes for each that comes."""
        for number in range(40):
            self.one.save(chain(f"new {number}"))

    def save_long(self) -> None:
        """Save one long prompt bit by bit, and another at once."""
        keys, parent = chain("bit by bit", 4096), b""
        for part in batches(keys, 8):
            self.one.save(part, parent=parent)
            parent = part[-1]
        self.one.save(chain("at once", 4096))

    def save_large(self) -> None:
        """Save chunks of another size into the full arena."""
        engine = Engine(self._address, "large", _LARGE_BYTES)
        saved = 0
        for number in range(30):
            saved += engine.save(chain(f"large {number}", 16))
        assert saved, "nothing of another size was saved"
        engine.close()

    def hold(self) -> None:
        """Lease a fifth of all chunks, use the rest, and save until the held ones are oldest."""
        held = self.mine[: _CHUNKS // 5 // _CHAIN]
        lease_ids = [self.one.acquire(keys)[0] for keys in held]
        for keys in (*self.mine[len(held) :], *self.other):
            self.one.scheduler.say(Prefetch(b"".join(keys)))
            self.two.scheduler.say(Prefetch(b"".join(keys)))
        for keys in self.big:
            self.one.scheduler.say(Prefetch(b"".join(keys), BIG))
        for number in range(40):
            self.two.save(chain(f"held {number}"))
        for part in batches(lease_ids, 1000):
            self.one.release(part)

    def burst(self) -> None:
        """Say many small things at once."""
        client = self.one.scheduler
        client.reliably(*(Release(client.next_seq(), [n]) for n in range(20_000)))

    def lose(self) -> None:
        """Lose a rank that was writing, and learn that it is gone."""
        engine = Engine(self._address, "one")
        for number in range(40):
            engine.reserve(chain(f"lost {number}"))
        engine.close()

    def limit(self) -> None:
        """Give a tenant with a quarter of all its first quota."""
        with connect(self._address, 60) as control:
            control.limit(BIG, memory=_CHUNKS // 8 * _CHUNK_BYTES)

    def limit_disk(self) -> None:
        """Give it one of the disk."""
        with connect(self._address, 60) as control:
            control.limit(BIG, disk=_CHUNKS // 8 * stored_bytes(_CHUNK_BYTES))

    def clear_tenant(self) -> None:
        """Clear it."""
        with connect(self._address, 60) as control:
            control.clear(tenant=BIG)

    def clear_namespace(self) -> None:
        """Clear a namespace."""
        with connect(self._address, 60) as control:
            control.clear(self.two.digest)

    def clear_all(self) -> None:
        """Clear everything."""
        with connect(self._address, 60) as control:
            control.clear()

    def end(self) -> None:
        """Wait until everything is stored."""
        with connect(self._address, 60) as control:
            control.flush(600)

    def _status(self) -> ServiceStatus:
        with connect(self._address, 60) as control:
            return msgspec.json.decode(control.status(), type=ServiceStatus)


def measure(say: Callable[[str], None]) -> list[Result]:
    """Let everything happen to a service with a million chunks."""
    shm = "/dev/shm" if Path("/dev/shm").is_dir() else None
    root = Path(tempfile.mkdtemp(prefix="kvhaven-stall-", dir=shm))
    logging.getLogger("kvhaven").setLevel(logging.ERROR)
    try:
        watch = asyncio.run(_run(root, say))
    finally:
        shutil.rmtree(root, ignore_errors=True)
    watch.close()
    worst = max(watch.longest.values())
    same = sorted(watch.same)
    walls = sorted(watch.walls)
    p9999 = walls[len(walls) * 9999 // 10000]
    return [
        *(_result(f"loop.stall.{kind}", stall) for kind, stall in watch.longest.items()),
        _result("loop.stall", worst),
        Result("loop.stall.machine", same[-1], "ms", statistics.median(same), len(same), _SAME),
        Result("loop.stall.often", _often(watch.held), "/min", _often(watch.same), 1, _SAME_OFTEN),
        at_most("loop.stall.p9999", p9999, "ms", _P9999_LIMIT_MS, len(walls), "the design's"),
    ]


def _often(held: Sequence[float]) -> float:
    """Return how many of these took longer than is allowed, in a minute of all of them."""
    return sum(ms > _LIMIT_MS for ms in held) / (sum(held) / 60_000)


def _result(name: str, stall: Stall) -> Result:
    waited = max(0.0, stall.wall - stall.held - stall.queued)
    what = (
        f"what the design allows; processor time of a callback that took {stall.wall:.1f} ms by "
        f"the clock, and waited {stall.queued:.1f} for a processor and {waited:.1f} for others"
    )
    return at_most(name, stall.held, "ms", _LIMIT_MS, 1, what)


async def _run(root: Path, say: Callable[[str], None]) -> Watch:
    settings = Settings(
        max_local_cpu_size=_ARENA_BYTES,
        local_disk=str(root / "disk"),
        max_local_disk_size=(_CHUNKS + 20_000) * stored_bytes(_CHUNK_BYTES),
    )
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_play, args=(root, theirs), daemon=True
    )
    process.start()

    async def step(name: str) -> None:
        ours.send(name)
        if (failure := await asyncio.to_thread(ours.recv)) is not None:
            raise ProcessError(f"{name}: {failure}")

    say(f"making {_CHUNKS} files")
    await step("make_files")
    service = Service(settings, AddressSpace(), make_tiers(settings))  # type: ignore[arg-type]  # an arena without memory
    tame_collector()
    favour_the_loop()
    stop, watch = asyncio.Event(), Watch()
    with watch.watching():
        serving = asyncio.create_task(service.run(Listener(str(root / "service.sock")), stop))
        collecting = asyncio.create_task(collect_young(service))
        for kind in _STEPS:
            await asyncio.sleep(0)
            watch.kind, began = kind, time.monotonic()
            await step(kind)
            await asyncio.sleep(_REST_S)
            while not service.driver.idle:  # noqa: ASYNC110  whatever makes it idle
                await asyncio.sleep(_REST_S)
            stall, took = watch.longest[kind], time.monotonic() - began
            say(f"{kind}: {stall.held:.2f} ms, {stall.wall:.2f} by the clock, in {took:.0f} s")
        watch.kind = _IDLE
        await watch.do_the_same()
        collecting.cancel()
        stop.set()
        await serving
    process.kill()
    return watch


def _play(root: Path, orders: Connection) -> None:
    """Do what the process that measures says, in a process beside it."""
    story = Story(root)
    while True:
        try:
            getattr(story, orders.recv())()
        except EOFError:
            return
        except Exception as error:  # noqa: BLE001  the other process is to end, and say why
            orders.send(repr(error))
        else:
            orders.send(None)


def _make_files(
    path: Path, stored: Sequence[tuple[str, TenantId, list[ChunkKey]]], read: set[ChunkKey]
) -> None:
    """Make the disk tier's files: sparse ones, of the right names and sizes."""
    path.mkdir(mode=0o700)
    shard = Shard(ShardId(0, (0, 1), (0, 1)), _CHUNK_BYTES)
    size = stored_bytes(_CHUNK_BYTES)
    checksum = Checksum(xxhash.xxh3_128_digest(bytes(_CHUNK_BYTES)))
    folders = {}
    for model in ("one", "two"):
        fields = {"model": model}
        namespace = Namespace(namespace_digest(fields), fields, ShardTable((shard,)))
        folder = folders[model] = path / folder_name(namespace)
        for digit in "0123456789abcdef":
            (folder / digit).mkdir(mode=0o700, parents=True)
        (folder / MANIFEST_NAME).write_bytes(pack_manifest(namespace))
    for model, tenant, keys in stored:
        digest = namespace_digest({"model": model})
        owner = f".t{tenant.hex()}" if tenant else ""
        whole = keys[0] in read
        for key in keys:
            name = key.hex()
            file = os.open(
                f"{folders[model]}/{name[0]}/{name}{owner}.{shard.id}.kv",
                os.O_WRONLY | os.O_CREAT,
                0o600,
            )
            os.ftruncate(file, size)
            if whole:
                os.pwrite(
                    file,
                    pack_header(StoredShard(digest, key, shard.id, _CHUNK_BYTES, tenant), checksum),
                    0,
                )
            os.close(file)
