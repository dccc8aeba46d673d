# SPDX-License-Identifier: Apache-2.0
"""Simulated engines: their schedulers and ranks save, load, hang, lose connections and die."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvhaven.catalog import tails
from kvhaven.catalog.actions import Acquisition, Leased, LeaseId, MemberId, SessionId
from kvhaven.tiers.base import Namespace
from kvhaven.types import ChunkKey, TenantId
from tests.simulation.catalog_model import (
    CHAIN_CHUNKS,
    CHAIN_KEYS,
    NAMESPACES,
    PACE,
    STEP_BYTES,
    TAIL_TOKENS,
    TAILS,
    TENANT_OF,
    Copy,
    Split,
    World,
    bits_of,
    end_of,
)
from tests.unit.catalog_kit import described


@dataclass(eq=False)
class Load:
    """A lease as its scheduler sees it; `held` are the claims of a lease nobody loads yet."""

    lease_id: LeaseId
    keys: Sequence[ChunkKey]
    chunks: tuple[Leased, ...] = ()
    final: bool = False
    dispatched: bool = False
    held: list[Copy] = field(default_factory=list)


@dataclass(eq=False)
class Process:
    """A scheduler (`rank` is None) or a rank; alive but not connected, it is a zombie.

    `prepared` is how much of the arena a rank can copy to and from, `told` how much of that the
    service knows.
    """

    id: MemberId
    engine: "Engine"
    rank: int | None
    alive: bool = True
    connected: bool = True
    lost: bool = False  # the service knows
    prepared: int = 0
    told: int = 0
    saves: list["Part"] = field(default_factory=list)
    loads: list[tuple[Load, list[Copy]]] = field(default_factory=list)
    unsent: list[Callable[[], object]] = field(default_factory=list)


@dataclass(eq=False)
class Save:
    """A part of a chain that all ranks of an engine are to save.

    On `spoiled_on`, if any, a load had failed: what all ranks write is wrong, and it knows.
    """

    number: int
    tenant: TenantId
    parent: ChunkKey | None
    keys: list[ChunkKey]
    spoiled_on: int | None
    tail: int = 0


@dataclass(eq=False)
class Part:
    """What a rank was granted of a chunk; the copy has no pages if another rank writes it."""

    save: Save
    copy: Copy


@dataclass(eq=False)
class Engine:
    """A session, with its leases and what each of its ranks is to save."""

    name: str
    namespace: Namespace
    split: Split
    processes: list[Process] = field(default_factory=list)
    loads: dict[LeaseId, Load] = field(default_factory=dict)
    to_save: list[tuple[int, Save]] = field(default_factory=list)
    id: SessionId = SessionId("")  # noqa: RUF009  it is a string

    @property
    def world(self) -> int:
        return len(self.split)

    @property
    def ranks(self) -> list[Process]:
        return [process for process in self.processes if process.rank is not None]

    @property
    def reach(self) -> int:
        """How much of the arena may be offered to it."""
        told = [rank.told for rank in self.ranks]
        return min(told) if len(told) == self.world else 0


class Engines:
    """All engines. An event is a method; it does nothing when there is nothing to do."""

    def __init__(self, world: World) -> None:
        self.all: list[Engine] = []
        self._world = world
        self._names = 0

    # They come and go

    def start(self) -> None:
        """An engine starts, unless there are three."""
        if len(self.all) >= 3:
            return
        self._names += 1
        namespace, splits = self._world.pick(NAMESPACES)
        name = f"engine-{self._names}"
        self._begin(Engine(name, namespace, self._world.pick(splits)))

    def restart(self) -> None:
        """An engine is killed and starts anew by its names, once or twice, while the service works.

        What it held is given back piece by piece, so that may not have ended.
        """
        if not self.all or not self._world.one_in(2):
            return
        engine = self._world.pick(self.all)
        for _ in range(1 + self._world.choose(2)):
            self._end(engine, pieces=3)
            engine = Engine(engine.name, engine.namespace, engine.split)
            self._begin(engine)
        self._world.counts["restarted"] += 1

    def prepare(self) -> None:
        """A rank, maybe a zombie, has got ready for more of the arena."""
        usable = self._world.memory.usable
        process = self.process(lambda p: p.rank is not None and p.alive and p.prepared < usable)
        if process is not None:
            self._prepare(process, min(usable, process.prepared + STEP_BYTES))

    def disconnect(self) -> None:
        """A connection breaks; the process lives, and copies on."""
        process = self.process(lambda p: p.connected)
        if process is not None:
            process.connected = False

    def kill(self) -> None:
        """A process is killed."""
        process = self.process(lambda p: p.alive)
        if process is not None:
            self._kill(process)

    def kill_engine(self) -> None:
        """All processes of an engine are killed."""
        if self.all:
            for process in self._world.pick(self.all).processes:
                self._kill(process)

    def kill_all(self) -> None:
        """All processes are killed, and the service notices."""
        for engine in tuple(self.all):
            self._end(engine)
        assert not self.all

    def notice(self) -> None:
        """The service sees that a connection is closed, or later that the process is gone."""
        process = self.process(lambda p: not p.connected)
        if process is not None:
            self._notice(process)

    def reconnect(self) -> None:
        """A process that was lost is back, and sends what it could not."""
        process = self.process(lambda p: p.alive and p.lost)
        if process is None:
            return
        self._attach(process)
        process.connected, process.lost = True, False
        unsent, process.unsent = process.unsent, []
        for send in unsent:
            send()
        if process.rank is None:
            for load in tuple(process.engine.loads.values()):
                if not load.dispatched:
                    self._release(process.engine, load)
        self._world.counts["reconnected"] += 1

    # Loading

    def prefetch(self) -> None:
        """A scheduler sees a new request."""
        if self.all:
            engine = self._world.pick(self.all)
            digest = engine.namespace.digest
            tenant, keys, _ = self._world.pick(CHAIN_KEYS[digest])
            with self._world.nobody_else_pays(tenant), self.nobody_goes_in_vain(engine):
                self._world.catalog.prefetch(digest, keys, tenant, engine.id)

    def acquire(self) -> None:
        """A scheduler asks for a chain, twice; what is resident must be in the answer."""
        process = self.process(lambda p: p.rank is None and p.connected)
        if process is None or len(process.engine.loads) >= 4:
            return
        engine, catalog = process.engine, self._world.catalog
        digest = engine.namespace.digest
        tenant, chain, behind = self._world.pick(CHAIN_KEYS[digest])
        keys, tail = chain[: 1 + self._world.choose(CHAIN_CHUNKS)], None
        if self._world.one_in(3):
            coming = {key for tier in catalog._tiers.shared.values() for key in tier.pending}
            entries = catalog._space.entries
            here = [n for n, key in enumerate(behind) if key in entries or key in coming]
            keys = chain[: self._world.pick(here)] if here else keys
            tail = behind[len(keys)]
        self._names += 1
        load = Load(LeaseId(self._names), [*keys, tail] if tail is not None else keys)
        resident = 0
        while resident < len(keys) and catalog.checksums(keys[resident]) is not None:
            if end_of(catalog._space.entries[keys[resident]].extent) > engine.reach:
                self._world.counts["unready"] += 1
                break
            resident += 1
        comes = False
        if tail is not None and resident == len(keys):
            comes = self._is_coming(engine, tail)
            resident += self._is_here(engine, tail)
        stats = catalog.stats()
        most = len(load.keys) * engine.namespace.table.extent_bytes
        # What was in the arena may be evicted by the acquire itself.
        busy = {key for key in keys if key in catalog._space.entries}
        roomy = stats.leased_bytes + stats.promoting_bytes + most <= stats.pin_limit_bytes
        tails_first = self._world.tails_go_first(engine.namespace, tenant)
        with self._world.nobody_else_pays(tenant), self.nobody_goes_in_vain(engine), tails_first:
            answer = catalog.acquire(engine.id, load.lease_id, digest, keys, tenant, tail)
        self._world.used.update((chunk.key, self._world.now) for chunk in answer.chunks)
        at_once = min(resident, PACE.leases) if answer.promoting else resident
        assert len(answer.chunks) >= at_once or not roomy, "a resident prefix was not offered"
        assert answer.promoting or not (comes and roomy), "a lease does not wait for its tail"
        if roomy and not answer.promoting and len(answer.chunks) < len(keys):
            self._expect_gap(engine, keys[len(answer.chunks)], busy)
        if answer.chunks or answer.promoting:
            assert catalog.acquire(engine.id, load.lease_id, digest, keys, tenant, tail) == answer
            engine.loads[load.lease_id] = load
            self._world.counts["hits"] += len(answer.chunks)
            self._answered(engine, load, answer)

    def updated(self, session: SessionId, answer: Acquisition) -> None:
        """The catalog says that a lease is final; it may not be heard."""
        for engine in self.all:
            scheduler = next((p for p in engine.processes if p.rank is None), None)
            load = engine.loads.get(answer.lease_id)
            if engine.id == session and scheduler is not None and load is not None:
                assert not load.final, f"{answer} is final twice"
                assert not answer.promoting
                if scheduler.connected:
                    self._answered(engine, load, answer)

    def finalize(self) -> None:
        """A scheduler's deadline is over."""
        found = self._load(lambda p, load: p.connected and not load.final)
        if found is not None:
            engine, load = found
            answer = self._world.catalog.finalize(engine.id, load.lease_id)
            assert not answer.promoting
            self._answered(engine, load, answer)

    def dispatch(self) -> None:
        """A scheduler hands a lease to its ranks."""
        found = self._load(lambda _, load: load.final and not load.dispatched)
        if found is None:
            return
        engine, load = found
        ranks = [p for p in engine.processes if p.rank is not None and p.alive]
        for process in ranks:
            assert process.rank is not None
            claim = ("load", process.id, load.lease_id)
            bits = bits_of(engine.split[process.rank])
            copies = [Copy(engine.namespace, c.key, c.extent, bits, claim) for c in load.chunks]
            for copy in copies:
                self._world.memory.claim(copy)
            process.loads.append((load, copies))
        load.dispatched = True
        self._let_go(load)
        self._world.counts["dispatched"] += bool(ranks)

    def load(self) -> None:
        """A rank, maybe a zombie, reads pages of a lease, and says so after the last."""
        process = self.process(lambda p: p.alive and bool(p.loads))
        if process is None:
            return
        load, copies = pair = self._world.pick(process.loads)
        for copy in copies:
            while not copy.ended:
                self._world.memory.read(copy)
                if self._world.one_in(6):
                    return
        process.loads.remove(pair)
        for copy in copies:
            self._world.memory.drop(copy)
        engine, catalog = process.engine, self._world.catalog
        self.send(process, lambda: catalog.loaded(engine.id, load.lease_id, process.id))
        self._world.counts["loaded"] += 1
        if not any(other is load for p in engine.processes for other, _ in p.loads):
            engine.loads.pop(load.lease_id, None)

    def release(self) -> None:
        """A scheduler does not want a lease any more."""
        found = self._load(lambda p, load: p.connected and not load.dispatched)
        if found is not None:
            self._release(*found)

    # What others need of them

    def awaited(self) -> list[tuple[set[ChunkKey], ChunkKey | None]]:
        """Return, for each lease that waits, the chunks it waits for and the one it asks for.

        While the catalog has work to do, without those of which the lease is yet to be told how
        they ended.
        """
        catalog = self._world.catalog
        homes = catalog._sessions.sessions.values()
        leases = [lease for home in homes for lease in home.leases.values() if not lease.final]
        tiers = [tier for tier in catalog._tiers.shared.values() if tier.online]
        awaited: list[tuple[set[ChunkKey], ChunkKey | None]] = []
        for lease in leases:
            reads = {k for k, at in lease.waiting.items() if lease.slots[at].reading}
            asked = [q for q in lease.lookups if any(t.lookups.get(q.number) is q for t in tiers)]
            if not catalog.busy:
                reads, asked = set(lease.waiting), list(lease.lookups)
            behind = [*lease.keys, lease.tail]
            awaited.append((reads, behind[len(lease.slots)] if asked else None))
        return awaited

    def process(self, wanted: Callable[[Process], bool]) -> Process | None:
        """Return one of these processes, if there are any."""
        found = [p for e in self.all for p in e.processes if wanted(p)]
        return self._world.pick(found) if found else None

    @contextlib.contextmanager
    def nobody_goes_in_vain(self, engine: Engine) -> Iterator[None]:
        """Assert that meanwhile nothing is evicted if the engine could not use all its space."""
        catalog = self._world.catalog
        before, ready = catalog.stats().evictions, engine.reach >= self._world.memory.usable
        yield
        assert ready or catalog.stats().evictions == before, "evicted for an engine not ready"

    def send(self, process: Process, message: Callable[[], object]) -> None:
        """Send a message, or keep it until the process is connected again."""
        if process.connected:
            message()
        else:
            process.unsent.append(message)

    # What these are made of

    def _is_coming(self, engine: Engine, tail: ChunkKey) -> bool:
        """Whether another node may still send a tail that is not here."""
        catalog = self._world.catalog
        if tail in catalog._space.entries:
            return False
        shared = [tier for tier in catalog._tiers.shared.values() if tier.online]
        part = catalog._owners.part(engine.namespace.digest, TENANT_OF[tail])
        return any(tail in tier.pending and not tier.decided(tail, part) for tier in shared)

    def _is_here(self, engine: Engine, tail: ChunkKey) -> bool:
        """Whether a tail must be offered behind its chain: it is resident, and not too old."""
        entry = self._world.catalog._space.entries.get(tail)
        if entry is None or self._world.catalog.checksums(tail) is None:
            return False
        if self._world.catalog._space.tails.expired(tail) and not entry.pinned:
            return False
        return end_of(entry.extent) <= engine.reach

    def _expect_gap(self, engine: Engine, key: ChunkKey, busy: set[ChunkKey]) -> None:
        """Assert that a lease has ended before a chunk for a reason."""
        catalog = self._world.catalog
        namespace = catalog._owners.part(engine.namespace.digest, TENANT_OF[key])
        asked = [tier.pending.get(key) for tier in catalog._tiers.shared.values()]
        if any(lookup is not None and lookup.namespace is not namespace for lookup in asked):
            return  # somebody asked for it as another, and it is not asked for twice
        if key not in busy and catalog._tiers.source(key, namespace) is None:
            assert self._world.may_be_missed(key), f"no tier was asked for {key.hex()}"
            self._world.counts["missed"] += 1

    def _load(self, wanted: Callable[[Process, Load], bool]) -> tuple[Engine, Load] | None:
        """Return a lease of a scheduler that lives."""
        found = [
            (engine, load)
            for engine in self.all
            for process in engine.processes
            if process.rank is None and process.alive
            for load in engine.loads.values()
            if wanted(process, load)
        ]
        return self._world.pick(found) if found else None

    def _begin(self, engine: Engine) -> None:
        for rank in (*range(engine.world), None):
            process = Process(MemberId(f"{engine.name}/{rank}"), engine, rank)
            engine.processes.append(process)
            self._attach(process)
        self.all.append(engine)
        if self._world.one_in(2):
            for process in engine.ranks:
                self._prepare(process, self._world.memory.usable)

    def _end(self, engine: Engine, pieces: int = 0) -> None:
        """Kill all processes, one by one; in between are fewer than so many pieces of work."""
        for process in tuple(engine.processes):
            self._kill(process)
            while process in engine.processes:
                self._notice(process)
            if pieces:
                self._world.catalog.work(self._world.choose(pieces))

    def _attach(self, process: Process) -> None:
        engine = process.engine
        catalog, rank = self._world.catalog, process.rank
        if rank is None:
            session = catalog.attach_scheduler(engine.name, process.id, engine.world)
            assert session is not None
        else:
            description = described(engine.namespace, engine.split, rank)
            session = catalog.attach_rank(engine.name, process.id, rank, description)
        engine.id = session.id

    def _prepare(self, process: Process, prepared: int) -> None:
        def tell() -> None:
            process.told = max(prepared, process.told)
            self._world.catalog.ready(process.id, 0, prepared)

        process.prepared = prepared
        self.send(process, tell)
        self._world.counts["prepared"] += 1

    def _answered(self, engine: Engine, load: Load, answer: Acquisition) -> None:
        """Check every byte that is offered, and hold it."""
        assert [c.key for c in answer.chunks] == list(load.keys[: len(answer.chunks)])
        self._let_go(load)
        load.chunks, load.final = tuple(answer.chunks), not answer.promoting
        bits = range(len(engine.namespace.table.shards))
        for chunk in answer.chunks:
            self._world.memory.verify(engine.namespace, chunk)
            assert chunk.tail == (TAIL_TOKENS if chunk.key in TAILS else 0)
            if chunk.key in TAILS:
                self._tail_offered(chunk.key)
                self._world.awaited.pop(chunk.extent.generation, None)
                self._world.check_retained()
            unready = [p.id for p in engine.ranks if p.prepared < end_of(chunk.extent)]
            assert not unready, f"{chunk} is offered, but {unready} cannot load it"
            writer = self._world.memory.splits.get(chunk.extent.generation, engine.split)
            self._world.counts["shared"] += writer != engine.split
            claim = ("lease", engine.id, load.lease_id)
            copy = Copy(engine.namespace, chunk.key, chunk.extent, bits, claim)
            self._world.memory.claim(copy)
            load.held.append(copy)
        if load.final and not load.chunks:
            del engine.loads[load.lease_id]
            self._world.catalog.release(engine.id, load.lease_id)

    def _tail_offered(self, tail: ChunkKey) -> None:
        """Assert that a tail was used a short time ago, and note its use."""
        world = self._world
        old = world.now - world.tail_used[tail]
        assert old < tails.KEEP_S, f"a tail is offered {old} s after its last use"
        world.tail_used[tail] = world.now
        world.counts["tail offered"] += 1

    def _let_go(self, load: Load) -> None:
        for copy in load.held:
            self._world.memory.drop(copy)
        load.held.clear()

    def _release(self, engine: Engine, load: Load) -> None:
        self._let_go(load)
        del engine.loads[load.lease_id]
        self._world.catalog.release(engine.id, load.lease_id)

    def _kill(self, process: Process) -> None:
        process.alive = process.connected = False
        for copy in [
            *(p.copy for p in process.saves),
            *(c for _, copies in process.loads for c in copies),
        ]:
            self._world.memory.drop(copy)
        process.saves.clear()
        process.loads.clear()
        process.unsent.clear()
        if process.rank is None:
            self._forget_held(process.engine)

    def _notice(self, process: Process) -> None:
        catalog, engine = self._world.catalog, process.engine
        if not process.lost:
            process.lost = True
            catalog.lost(process.id)
            assert process.id in set(catalog.lost_members())
        elif not process.alive:
            catalog.gone(process.id)
            self._world.counts["gone"] += 1
            engine.processes.remove(process)
            if not any(p.rank is not None for p in engine.processes):
                self._forget_held(engine)  # nobody is left who could load
            if not engine.processes:
                self.all.remove(engine)

    def _forget_held(self, engine: Engine) -> None:
        for lease_id, load in tuple(engine.loads.items()):
            if not load.dispatched:
                self._let_go(load)
                del engine.loads[lease_id]
