# SPDX-License-Identifier: Apache-2.0
"""Simulated engines: their schedulers and ranks save, load, hang, lose connections and die."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvhaven.catalog.actions import Acquisition, CommitResult, Leased, MemberId, SessionId, Ticket
from kvhaven.tiers.base import Namespace
from kvhaven.types import Checksum, ChunkKey
from tests.simulation.catalog_model import (
    CHAIN_CHUNKS,
    CHAIN_KEYS,
    NAMESPACES,
    Copy,
    World,
    checksum_of,
)


@dataclass(eq=False)
class Load:
    """A lease as its scheduler sees it; `held` are the claims of a lease nobody loads yet."""

    ticket: Ticket
    keys: Sequence[ChunkKey]
    chunks: tuple[Leased, ...] = ()
    final: bool = False
    dispatched: bool = False
    held: list[Copy] = field(default_factory=list)


@dataclass(eq=False)
class Process:
    """A scheduler (`rank` is None) or a rank; alive but not connected, it is a zombie."""

    id: MemberId
    engine: "Engine"
    rank: int | None
    alive: bool = True
    connected: bool = True
    lost: bool = False  # the service knows
    saves: list[Copy] = field(default_factory=list)
    loads: list[tuple[Load, list[Copy]]] = field(default_factory=list)
    unsent: list[Callable[[], None]] = field(default_factory=list)


@dataclass(eq=False)
class Engine:
    """A session, with its leases and what its ranks are to save (rank, parent, keys)."""

    id: SessionId
    namespace: Namespace
    world: int
    processes: list[Process] = field(default_factory=list)
    loads: dict[Ticket, Load] = field(default_factory=dict)
    to_save: list[tuple[int, ChunkKey | None, list[ChunkKey]]] = field(default_factory=list)


class Engines:
    """All engines. An event is a method; it does nothing when there is nothing to do."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._engines: list[Engine] = []
        self._names = 0

    # They come and go

    def start(self) -> None:
        """An engine starts, unless there are three."""
        if len(self._engines) >= 3:
            return
        self._names += 1
        world = 1 + self._world.choose(2)
        name = SessionId(f"engine-{self._names}")
        engine = Engine(name, self._world.pick(NAMESPACES[world]), world)
        for rank in (*range(world), None):
            process = Process(MemberId(f"{name}/{rank}"), engine, rank)
            engine.processes.append(process)
            self._attach(process)
        self._engines.append(engine)

    def disconnect(self) -> None:
        """A connection breaks; the process lives, and copies on."""
        process = self._process(lambda p: p.connected)
        if process is not None:
            process.connected = False

    def kill(self) -> None:
        """A process is killed."""
        process = self._process(lambda p: p.alive)
        if process is not None:
            self._kill(process)

    def kill_engine(self) -> None:
        """All processes of an engine are killed."""
        if self._engines:
            for process in self._world.pick(self._engines).processes:
                self._kill(process)

    def kill_all(self) -> None:
        """All processes are killed, and the service notices."""
        for engine in tuple(self._engines):
            for process in tuple(engine.processes):
                self._kill(process)
                while process in engine.processes:
                    self._notice(process)
        assert not self._engines

    def notice(self) -> None:
        """The service sees that a connection is closed, or later that the process is gone."""
        process = self._process(lambda p: not p.connected)
        if process is not None:
            self._notice(process)

    def reconnect(self) -> None:
        """A process that was lost is back, and sends what it could not."""
        process = self._process(lambda p: p.alive and p.lost)
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

    # Saving

    def plan_save(self) -> None:
        """An engine decides which part of a chain its ranks are to save."""
        if not self._engines:
            return
        engine = self._world.pick(self._engines)
        keys = self._world.pick(CHAIN_KEYS[engine.namespace.digest])
        first = self._world.choose(CHAIN_CHUNKS)
        end = first + 1 + self._world.choose(CHAIN_CHUNKS - first)
        parent = keys[first - 1] if first else None
        engine.to_save.extend((rank, parent, keys[first:end]) for rank in range(engine.world))

    def reserve(self) -> None:
        """A rank asks for the space of a part that it is to save."""
        process = self._process(
            lambda p: p.connected and any(job[0] == p.rank for job in p.engine.to_save)
        )
        if process is None or process.rank is None:
            return
        engine, rank, memory = process.engine, process.rank, self._world.memory
        job = next(j for j in engine.to_save if j[0] == rank)
        engine.to_save.remove(job)
        grants = self._world.catalog.reserve(process.id, engine.namespace.digest, job[1], job[2])
        for key, grant in zip(job[2], grants, strict=True):
            if grant is None:
                continue
            assert grant.key == key
            written = memory.committed.get(grant.extent.generation, ())
            assert rank not in written, f"{grant} is of a shard that is written"
            claim = ("save", process.id, grant.extent.generation)
            copy = Copy(engine.namespace, key, grant.extent, [rank], claim)
            memory.claim(copy)
            process.saves.append(copy)

    def write(self) -> None:
        """A rank, maybe a zombie, writes pages of a shard, and commits after the last."""
        process = self._process(lambda p: p.alive and bool(p.saves))
        if process is None:
            return
        copy = self._world.pick(process.saves)
        while not copy.ended:
            self._world.memory.write(copy)
            if self._world.one_in(3):
                return
        process.saves.remove(copy)
        self._world.memory.drop(copy)
        self._send(process, lambda: self._commit(process, copy))

    def abort(self) -> None:
        """A rank gives up a copy."""
        process = self._process(lambda p: p.alive and bool(p.saves))
        if process is None:
            return
        copy = self._world.pick(process.saves)
        process.saves.remove(copy)
        self._world.memory.drop(copy)
        catalog, generation = self._world.catalog, copy.extent.generation
        self._send(process, lambda: catalog.abort(process.id, copy.key, generation))

    def commit_nonsense(self) -> None:
        """A commit comes with a generation that is not the reservation's."""
        process = self._process(lambda p: p.connected and bool(p.saves))
        if process is not None:
            copy = self._world.pick(process.saves)
            key, generation = copy.key, copy.extent.generation + 1_000_000_000
            result = self._world.catalog.commit(process.id, key, generation, Checksum(b"x" * 16))
            assert result is CommitResult.REFUSED

    # Loading

    def prefetch(self) -> None:
        """A scheduler sees a new request."""
        if self._engines:
            namespace = self._world.pick(self._engines).namespace
            keys = self._world.pick(CHAIN_KEYS[namespace.digest])
            self._world.catalog.prefetch(namespace.digest, keys)

    def acquire(self) -> None:
        """A scheduler asks for a chain, twice; what is resident must be in the answer."""
        process = self._process(lambda p: p.rank is None and p.connected)
        if process is None or len(process.engine.loads) >= 4:
            return
        engine, catalog = process.engine, self._world.catalog
        digest = engine.namespace.digest
        keys = self._world.pick(CHAIN_KEYS[digest])[: 1 + self._world.choose(CHAIN_CHUNKS)]
        self._names += 1
        load = Load(Ticket(self._names), keys)
        resident = 0
        while resident < len(keys) and catalog.checksums(keys[resident]) is not None:
            resident += 1
        stats = catalog.stats()
        most = len(keys) * engine.namespace.table.extent_bytes
        roomy = stats.leased_bytes + stats.promoting_bytes + most <= stats.pin_limit_bytes
        answer = catalog.acquire(engine.id, load.ticket, digest, keys)
        assert len(answer.chunks) >= resident or not roomy, "a resident prefix was not offered"
        if answer.chunks or answer.promoting:
            assert catalog.acquire(engine.id, load.ticket, digest, keys) == answer
            engine.loads[load.ticket] = load
            self._world.counts["hits"] += len(answer.chunks)
            self._answered(engine, load, answer)

    def updated(self, session: SessionId, answer: Acquisition) -> None:
        """The catalog says that a lease is final; it may not be heard."""
        for engine in self._engines:
            scheduler = next((p for p in engine.processes if p.rank is None), None)
            load = engine.loads.get(answer.ticket)
            if engine.id == session and scheduler is not None and load is not None:
                assert not load.final, f"{answer} is final twice"
                assert not answer.promoting
                if scheduler.connected:
                    self._answered(engine, load, answer)

    def settle(self) -> None:
        """A scheduler's deadline is over."""
        found = self._load(lambda p, load: p.connected and not load.final)
        if found is not None:
            engine, load = found
            answer = self._world.catalog.settle(engine.id, load.ticket)
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
            claim = ("load", process.id, load.ticket)
            copies = [
                Copy(engine.namespace, c.key, c.extent, [process.rank], claim) for c in load.chunks
            ]
            for copy in copies:
                self._world.memory.claim(copy)
            process.loads.append((load, copies))
        load.dispatched = True
        self._let_go(load)
        self._world.counts["dispatched"] += bool(ranks)

    def load(self) -> None:
        """A rank, maybe a zombie, reads pages of a lease, and says so after the last."""
        process = self._process(lambda p: p.alive and bool(p.loads))
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
        self._send(process, lambda: catalog.loaded(engine.id, load.ticket, process.id))
        self._world.counts["loaded"] += 1
        if not any(other is load for p in engine.processes for other, _ in p.loads):
            engine.loads.pop(load.ticket, None)

    def release(self) -> None:
        """A scheduler does not want a lease any more."""
        found = self._load(lambda p, load: p.connected and not load.dispatched)
        if found is not None:
            self._release(*found)

    # What these are made of

    def _process(self, wanted: Callable[[Process], bool]) -> Process | None:
        found = [p for e in self._engines for p in e.processes if wanted(p)]
        return self._world.pick(found) if found else None

    def _load(self, wanted: Callable[[Process, Load], bool]) -> tuple[Engine, Load] | None:
        """Return a lease of a scheduler that lives."""
        found = [
            (engine, load)
            for engine in self._engines
            for process in engine.processes
            if process.rank is None and process.alive
            for load in engine.loads.values()
            if wanted(process, load)
        ]
        return self._world.pick(found) if found else None

    def _attach(self, process: Process) -> None:
        engine = process.engine
        digest = engine.namespace.digest
        self._world.catalog.attach(engine.id, process.id, process.rank, digest, engine.world)

    def _send(self, process: Process, message: Callable[[], None]) -> None:
        if process.connected:
            message()
        else:
            process.unsent.append(message)

    def _commit(self, process: Process, copy: Copy) -> None:
        bit, extent = copy.bits[0], copy.extent
        checksum = checksum_of(copy.key, bit)
        result = self._world.catalog.commit(process.id, copy.key, extent.generation, checksum)
        self._world.counts[result.value] += 1
        assert result is not CommitResult.REFUSED, f"the commit of {copy.claim} was refused"
        if result is not CommitResult.DISCARDED:
            self._world.memory.committed.setdefault(extent.generation, set()).add(bit)
            whole = self._world.memory.is_whole(copy.namespace, extent)
            assert whole == (result is CommitResult.RESIDENT), f"{extent} is {result}"

    def _answered(self, engine: Engine, load: Load, answer: Acquisition) -> None:
        """Check every byte that is offered, and hold it."""
        assert [c.key for c in answer.chunks] == list(load.keys[: len(answer.chunks)])
        self._let_go(load)
        load.chunks, load.final = answer.chunks, not answer.promoting
        bits = range(engine.world)
        for chunk in answer.chunks:
            self._world.memory.verify(engine.namespace, chunk)
            claim = ("lease", engine.id, load.ticket)
            copy = Copy(engine.namespace, chunk.key, chunk.extent, bits, claim)
            self._world.memory.claim(copy)
            load.held.append(copy)
        if load.final and not load.chunks:
            del engine.loads[load.ticket]
            self._world.catalog.release(engine.id, load.ticket)

    def _let_go(self, load: Load) -> None:
        for copy in load.held:
            self._world.memory.drop(copy)
        load.held.clear()

    def _release(self, engine: Engine, load: Load) -> None:
        self._let_go(load)
        del engine.loads[load.ticket]
        self._world.catalog.release(engine.id, load.ticket)

    def _kill(self, process: Process) -> None:
        process.alive = process.connected = False
        for copy in [*process.saves, *(c for _, copies in process.loads for c in copies)]:
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
                self._engines.remove(engine)

    def _forget_held(self, engine: Engine) -> None:
        for ticket, load in tuple(engine.loads.items()):
            if not load.dispatched:
                self._let_go(load)
                del engine.loads[ticket]
