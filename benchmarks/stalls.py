# SPDX-License-Identifier: Apache-2.0
"""`loop.stall`: longest callback of the service's event loop in milliseconds, at a million chunks.

A real node service with a real disk tier runs in this process, and another process uses it over its
socket. A million chunks of two models and 5,000 tenants are in the arena, and in the disk's index.
Only metadata is real: the arena is address space without memory, and the disk tier's files are
sparse. All of it is done three times (`KVHAVEN_STALL_RUNS`), each time in new processes. Each kind
of event has a row (`loop.stall.clear_all`): the median of the runs' longest callbacks.
`loop.stall` is the largest of the rows. The limit is that of the design, 5 ms.
`loop.stall.p9999` is the 99.99th percentile of all callbacks in elapsed time, with a limit of
10 ms.

A stall is one callback of the loop. Its length is the CPU time of the loop's thread, so that other
processes of a busy machine do not count. The results also have its elapsed time, and the parts that
the thread waited: for a CPU (the second field of `/proc/thread-self/schedstat`), or for anything
else, mostly for the interpreter while a tier's thread held it. CPU time still depends on the effect
of other processes on caches, and on the cores below a virtual machine: now and then it is many
times that of the same work a moment before. That is why the median of three runs counts: work that
is too long is too long in each of them. For comparison, `loop.stall.machine` is the longest of
20,000 repetitions of a reference work of about a millisecond, also the median of the runs, and its
limit the median of all. `loop.stall.often` is the number of callbacks that took more than 5 ms, per
minute of CPU time, in all runs, and its limit the same for the reference work.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
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
_RUNS = int(os.environ.get("KVHAVEN_STALL_RUNS", "3"))
_CHUNK_BYTES = 64 << 10
_LARGE_BYTES = 640 << 10
_ARENA_BYTES = (_CHUNKS + 1024) * _CHUNK_BYTES
_CHAIN = 512
_TENANTS = 5000
_LIMIT_MS = 5.0
_P9999_LIMIT_MS = 10.0
_REST_S = 0.3
_IDLE = ""
_SAME = "the median of the reference work"
_SAME_OFTEN = "the same for the reference work"
_STEPS = (
    *("scan", "fill", "acquire", "promote", "interleaved", "acquire_long"),
    *("prefetch", "prefetch_long", "status"),
    *("save", "save_long", "save_large", "hold", "burst", "lose", "limit", "limit_disk"),
    *("clear_tenant", "clear_namespace", "clear_all"),
)


class Stall(NamedTuple):
    """The longest callback of a kind: three durations in milliseconds.

    `held` is CPU time, `wall` is elapsed time, and `queued` the part of `wall` waiting for a CPU.
    """

    held: float
    wall: float
    queued: float


class Watch:
    """Timer of all callbacks of this thread's loop, by the present kind of event."""

    def __init__(self) -> None:
        self.kind = _IDLE
        self.longest: dict[str, Stall] = {}
        self.walls = array("f")
        self.held = array("f")
        self.same = array("f")
        self._schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    async def do_the_same(self, times: int = 20_000) -> None:
        """Record the CPU time of the reference work: dictionary lookups, as in the service."""
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
        """Time all callbacks while the context is active."""
        handle: Any = asyncio.Handle
        run = handle._run  # noqa: SLF001  asyncio itself can only log elapsed time

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
        """Close the descriptor, after the loop has ended."""
        os.close(self._schedstat)

    def _note(self, stall: Stall) -> None:
        if self.kind != _IDLE:
            self.walls.append(stall.wall)
            self.held.append(stall.held)
            if stall.held > self.longest.setdefault(self.kind, stall).held:
                self.longest[self.kind] = stall

    def _now(self) -> Stall:
        """Return the thread's clocks; a `Stall` is the difference of two results."""
        queued = int(os.pread(self._schedstat, 64, 0).split()[1])
        times = time.thread_time_ns(), time.perf_counter_ns(), queued
        return Stall(*(nanoseconds / 1e6 for nanoseconds in times))


class AddressSpace:
    """An arena of addresses without memory, which no process maps."""

    size = usable = _ARENA_BYTES
    allocating = False
    descriptors: tuple[int, ...] = ()

    def __init__(self) -> None:
        self._zeros = memoryview(bytearray(_LARGE_BYTES))

    def describe(self, lock_byte: int) -> tuple[SegmentInfo, ...]:
        """Return the segment that a member would map."""
        return (SegmentInfo(SEGMENT, self.size, lock_byte, self.usable),)

    def memory(self, extent: Extent) -> memoryview:
        """Return zeros."""
        return self._zeros[: extent.length]

    def is_mapped(self, _: int) -> bool:
        """Return that no member maps the arena: a lost member counts as gone."""
        return False

    def grow(self, _: Callable[[], None]) -> None:
        """Do nothing, as the arena has its final size."""

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
        """Reserve chunks; return the items for a commit of the granted ones."""
        number = next(self._numbers)
        granted = self.rank.ask(
            Reserve(number, parent, b"".join(keys), number, tenant), Granted
        ).grants
        pairs = zip(keys, granted, strict=True)
        return [(key, grant[2], [self.checksum]) for key, grant in pairs if grant is not None]

    def save(
        self, keys: Sequence[ChunkKey], tenant: TenantId = NO_TENANT, parent: bytes = b""
    ) -> int:
        """Reserve and commit chunks; return the number granted."""
        chunks = self.reserve(keys, tenant, parent)
        self.rank.reliably(Commit(self.rank.next_seq(), chunks))
        return len(chunks)

    def acquire(self, keys: Sequence[ChunkKey], compute_s: float = 0.0) -> tuple[int, int]:
        """Lease chunks; return the lease id and the number of chunks.

        `compute_s` is how long the engine says to take for the first of them; 0: unknown.
        """
        lease_id = next(self._numbers)
        asked = Acquire(lease_id, b"".join(keys), 60_000, compute_s=compute_s)
        answer = self.scheduler.ask(asked, Acquired)
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
    """The sequence of events for a full service; each method is a kind of event."""

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
        self.mixed = [chain(f"mixed {n}", 2 * _CHAIN) for n in range(2)]
        left = _CHUNKS - sum(map(len, (*self.mine, *self.big))) - 10 * len(self.small)
        self.other = [chain(f"other {n}") for n in range(left // _CHAIN + 1)]

    def stored(self) -> list[tuple[str, TenantId, list[ChunkKey]]]:
        """Return the chunks on the disk at the start; those that are only there come last."""
        return [
            *self.resident(),
            *(("one", NO_TENANT, keys) for keys in (*self.cold, *self.mixed)),
        ]

    def resident(self) -> list[tuple[str, TenantId, list[ChunkKey]]]:
        """Return the chunks for the arena."""
        return [
            *(("one", NO_TENANT, keys) for keys in self.mine),
            *(("one", BIG, keys) for keys in self.big),
            *(("one", tenant, keys) for tenant, keys in self.small),
            *(("two", NO_TENANT, keys) for keys in self.other),
        ]

    def make_files(self) -> None:
        """Create the files of an earlier run of the service."""
        whole = {keys[0] for keys in (*self.cold, *self.mixed)}
        _make_files(self._root / "disk", self.stored(), whole)

    def scan(self) -> None:
        """Wait until the service has scanned a full disk."""
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
        """Lease and release chains of 512 chunks."""
        for keys in self.mine[:500]:
            self.one.release([self.one.acquire(keys)[0]])

    def promote(self) -> None:
        """Lease chains that are only on the disk, and then several as one long prompt."""
        for keys in self.cold[:8]:
            lease_id, found = self.one.acquire(keys)
            assert found == len(keys), found
            self.one.release([lease_id])
        for first in (8, 16):
            keys = list(itertools.chain.from_iterable(self.cold[first : 2 * first]))
            lease_id, found = self.one.acquire(keys)
            assert found == len(keys), found
            self.one.release([lease_id])

    def interleaved(self) -> None:
        """Lease chains that alternate between arena and disk, which is worth its measured time."""
        for keys in self.mixed:
            self.one.save(keys[::2])
            lease_id, found = self.one.acquire(keys, compute_s=1.0)
            assert found == len(keys), found
            self.one.release([lease_id])

    def acquire_long(self) -> None:
        """Lease prompts of 1,000,000 tokens and more."""
        keys = list(itertools.chain.from_iterable(self.other[:64]))
        for length in (4096, 16384, 32768):
            lease_id, found = self.two.acquire(keys[:length])
            assert found == min(length, len(keys)), found
            self.two.release([lease_id])

    def prefetch(self) -> None:
        """Prefetch for new requests."""
        for keys in self.mine[:200]:
            self.one.scheduler.say(Prefetch(b"".join(keys)))
        self.one.release([0])

    def prefetch_long(self) -> None:
        """Prefetch for a long request."""
        keys = list(itertools.chain.from_iterable(self.other[:64]))
        self.two.scheduler.say(Prefetch(b"".join(keys)))
        self.two.release([0])

    def status(self) -> None:
        """Request the status."""
        for _ in range(5):
            self._status()

    def save(self) -> None:
        """Save into the full arena: each new chunk evicts one."""
        for number in range(40):
            self.one.save(chain(f"new {number}"))

    def save_long(self) -> None:
        """Save one long prompt in parts, and another in one request."""
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
        assert saved, "no chunk of another size was saved"
        engine.close()

    def hold(self) -> None:
        """Lease a fifth of all chunks, use the rest, and save while the leased are oldest."""
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
        """Send many small messages together."""
        client = self.one.scheduler
        client.reliably(*(Release(client.next_seq(), [n]) for n in range(20_000)))

    def lose(self) -> None:
        """Disconnect a rank that is writing; the service then finds it gone."""
        engine = Engine(self._address, "one")
        for number in range(40):
            engine.reserve(chain(f"lost {number}"))
        engine.close()

    def limit(self) -> None:
        """Set the first memory quota of a tenant that has a quarter of all chunks."""
        with connect(self._address, 60) as control:
            control.limit(BIG, memory=_CHUNKS // 8 * _CHUNK_BYTES)

    def limit_disk(self) -> None:
        """Set a disk quota of the same tenant."""
        with connect(self._address, 60) as control:
            control.limit(BIG, disk=_CHUNKS // 8 * stored_bytes(_CHUNK_BYTES))

    def clear_tenant(self) -> None:
        """Clear that tenant."""
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
        """Wait until all chunks are stored."""
        with connect(self._address, 60) as control:
            control.flush(600)

    def _status(self) -> ServiceStatus:
        with connect(self._address, 60) as control:
            return msgspec.json.decode(control.status(), type=ServiceStatus)


class Outcome(NamedTuple):
    """What one run measured: the longest callback of each kind, and the times of all in ms."""

    longest: dict[str, Stall]
    walls: Sequence[float]
    held: Sequence[float]
    same: Sequence[float]


def measure(say: Callable[[str], None]) -> list[Result]:
    """Run all kinds of events against a service with a million chunks, several times."""
    outcomes = []
    for number in range(1, _RUNS + 1):
        say(f"run {number} of {_RUNS}")
        outcomes.append(_run_apart(say))
    rows = {
        kind: sorted(outcome.longest[kind] for outcome in outcomes) for kind in outcomes[0].longest
    }
    worst = max(rows.values(), key=lambda stalls: _median(stalls).held)
    same = [sorted(outcome.same) for outcome in outcomes]
    machine = statistics.median(times[-1] for times in same)
    usual = statistics.median(itertools.chain.from_iterable(same))
    walls = sorted(itertools.chain.from_iterable(outcome.walls for outcome in outcomes))
    p9999 = walls[len(walls) * 9999 // 10000]
    often, often_same = _often(o.held for o in outcomes), _often(o.same for o in outcomes)
    return [
        *(_result(f"loop.stall.{kind}", stalls) for kind, stalls in rows.items()),
        _result("loop.stall", worst),
        Result("loop.stall.machine", machine, "ms", usual, _RUNS, _SAME),
        Result("loop.stall.often", often, "/min", often_same, _RUNS, _SAME_OFTEN),
        at_most("loop.stall.p9999", p9999, "ms", _P9999_LIMIT_MS, len(walls), "set by the design"),
    ]


def _run_apart(say: Callable[[str], None]) -> Outcome:
    """Do one run in a process of its own, which begins with no memory in use."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run_here, args=(theirs,))
    process.start()
    theirs.close()
    try:
        while isinstance(heard := ours.recv(), str):
            say(heard)
    except EOFError:
        raise ProcessError("a run ended early") from None
    finally:
        process.join()
    assert isinstance(heard, Outcome)
    return heard


def _run_here(results: Connection) -> None:
    """Do one run; send a line for each step, then the outcome."""
    shm = "/dev/shm" if Path("/dev/shm").is_dir() else None
    root = Path(tempfile.mkdtemp(prefix="kvhaven-stall-", dir=shm))
    logging.getLogger("kvhaven").setLevel(logging.ERROR)
    try:
        watch = asyncio.run(_run(root, results.send))
    finally:
        shutil.rmtree(root, ignore_errors=True)
    watch.close()
    results.send(Outcome(watch.longest, watch.walls, watch.held, watch.same))


def _median(stalls: Sequence[Stall]) -> Stall:
    """Return the middle one of sorted stalls; of two, the longer."""
    return stalls[len(stalls) // 2]


def _often(runs: Iterable[Sequence[float]]) -> float:
    """Return the number of callbacks above the limit, per minute of their total time."""
    held = list(itertools.chain.from_iterable(runs))
    return sum(ms > _LIMIT_MS for ms in held) / (sum(held) / 60_000)


def _result(name: str, stalls: Sequence[Stall]) -> Result:
    stall = _median(stalls)
    waited = max(0.0, stall.wall - stall.held - stall.queued)
    what = (
        f"set by the design; the longest of each run: "
        f"{', '.join(f'{each.held:.1f}' for each in stalls)} ms of CPU time. The middle one "
        f"had {stall.wall:.1f} ms elapsed, of which it waited {stall.queued:.1f} ms for a CPU and "
        f"{waited:.1f} ms otherwise"
    )
    return at_most(name, stall.held, "ms", _LIMIT_MS, len(stalls), what)


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

    say(f"creating {_CHUNKS} files")
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
            while not service.driver.idle:  # noqa: ASYNC110  no event signals idle
                await asyncio.sleep(_REST_S)
            stall, took = watch.longest[kind], time.monotonic() - began
            say(f"{kind}: {stall.held:.2f} ms of CPU, {stall.wall:.2f} ms elapsed, in {took:.0f} s")
        watch.kind = _IDLE
        await watch.do_the_same()
        collecting.cancel()
        stop.set()
        await serving
    process.kill()
    return watch


def _play(root: Path, orders: Connection) -> None:
    """Run the steps that the measuring process orders, in another process."""
    story = Story(root)
    while True:
        try:
            getattr(story, orders.recv())()
        except EOFError:
            return
        except Exception as error:  # noqa: BLE001  the measuring process reports it
            orders.send(repr(error))
        else:
            orders.send(None)


def _make_files(
    path: Path, stored: Sequence[tuple[str, TenantId, list[ChunkKey]]], read: set[ChunkKey]
) -> None:
    """Create the disk tier's files: sparse, with valid names and sizes."""
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
