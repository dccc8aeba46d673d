# SPDX-License-Identifier: Apache-2.0
"""What simulated engines save: they reserve, write, commit, give up, and are wrong at times."""

from kvhaven.catalog.actions import CommitResult
from kvhaven.types import Checksum
from tests.simulation.catalog_engines import Engine, Engines, Part, Process, Save
from tests.simulation.catalog_model import (
    CHAIN_CHUNKS,
    CHAIN_KEYS,
    TAIL_TOKENS,
    TAILS,
    Copy,
    World,
    bits_of,
    checksum_of,
    end_of,
)


class Saving:
    """The saves of all engines. An event is a method, as with `Engines`."""

    def __init__(self, world: World, engines: Engines) -> None:
        self._world = world
        self._engines = engines
        self._numbers = 0

    def plan_save(self) -> None:
        """An engine decides which part of a chain its ranks are to save."""
        if not self._engines.all:
            return
        engine = self._world.pick(self._engines.all)
        tenant, keys, tails = self._world.pick(CHAIN_KEYS[engine.namespace.digest])
        first = self._world.choose(CHAIN_CHUNKS)
        end = first + 1 + self._world.choose(CHAIN_CHUNKS - first)
        self._numbers += 1
        spoiled_on = self._world.choose(engine.world) if self._world.one_in(6) else None
        parent = keys[first - 1] if first else None
        wanted, tail = keys[first:end], 0
        if self._world.one_in(5):
            wanted, tail = [tails[first]], TAIL_TOKENS
        save = Save(self._numbers, tenant, parent, wanted, spoiled_on, tail)
        engine.to_save.extend((rank, save) for rank in range(engine.world))

    def reserve(self) -> None:
        """A rank asks for the space of a part that it is to save, or is too late for it."""
        process = self._engines.process(
            lambda p: p.connected and any(rank == p.rank for rank, _ in p.engine.to_save)
        )
        if process is None or process.rank is None:
            return
        engine, rank = process.engine, process.rank
        job = next(job for job in engine.to_save if job[0] == rank)
        engine.to_save.remove(job)
        save = job[1]
        if self._world.one_in(4 if save.spoiled_on == rank else 12):
            return
        digest = engine.namespace.digest
        nobody_goes = self._engines.nobody_goes_in_vain(engine)
        tails_first = self._world.tails_go_first(engine.namespace, save.tenant)
        with self._world.nobody_else_pays(save.tenant), nobody_goes, tails_first:
            grants = self._world.catalog.reserve(
                process.id, digest, save.parent, save.keys, save.number, save.tenant, save.tail
            )
        for key, grant in zip(save.keys, grants, strict=True):
            if grant is not None:
                assert grant.key == key
                bits = bits_of(grant.shards)
                assert bits in ([], bits_of(engine.split[rank])), f"{grant} is of half a part"
                claim = ("save", process.id, grant.extent.generation)
                self._begin(
                    process, Part(save, Copy(engine.namespace, key, grant.extent, bits, claim))
                )

    def write(self) -> None:
        """A rank, maybe a zombie, writes pages of its shards, and commits after the last."""
        process = self._engines.process(lambda p: p.alive and bool(p.saves))
        if process is None:
            return
        part = self._world.pick(process.saves)
        while not part.copy.ended:
            self._world.memory.write(part.copy, good=part.save.spoiled_on is None)
            if self._world.one_in(3):
                return
        self._end(process, part, committed=part.save.spoiled_on != process.rank)

    def abort(self) -> None:
        """A rank gives up a part."""
        process = self._engines.process(lambda p: p.alive and bool(p.saves))
        if process is not None:
            self._end(process, self._world.pick(process.saves), committed=False)

    def commit_nonsense(self) -> None:
        """A commit comes with a generation that is not the reservation's."""
        process = self._engines.process(lambda p: p.connected and bool(p.saves))
        if process is not None:
            copy = self._world.pick(process.saves).copy
            key, generation = copy.key, copy.extent.generation + 1_000_000_000
            checksums = [Checksum(b"x" * 16)] * len(copy.bits)
            result = self._world.catalog.commit(process.id, key, generation, checksums)
            assert result is CommitResult.REFUSED

    def _begin(self, process: Process, part: Part) -> None:
        engine, rank, copy = process.engine, process.rank, part.copy
        memory, generation = self._world.memory, part.copy.extent.generation
        written = memory.committed.get(generation, set())
        assert not written & set(copy.bits), f"{copy.claim} is of shards that are written"
        save = memory.saves.setdefault(generation, part.save)
        assert save is part.save, f"{copy.claim} is of an extent that another save writes"
        memory.splits[generation] = engine.split
        awaited = memory.awaited.setdefault(generation, set(range(engine.world)))
        assert rank in awaited, f"{copy.claim} was committed before"
        assert end_of(copy.extent) <= process.prepared, f"{copy.claim}, but it is not ready"
        memory.claim(copy)
        process.saves.append(part)
        self._world.counts["twins"] += not copy.bits

    def _end(self, process: Process, part: Part, *, committed: bool) -> None:
        """Say that a part is done, or given up: now, or when there is a connection again."""
        catalog, copy = self._world.catalog, part.copy
        process.saves.remove(part)
        self._world.memory.drop(copy)
        if committed:
            self._engines.send(process, lambda: self._commit(process.engine, process, copy))
        else:
            generation = copy.extent.generation
            self._engines.send(process, lambda: catalog.abort(process.id, copy.key, generation))

    def _commit(self, engine: Engine, process: Process, copy: Copy) -> None:
        memory, extent = self._world.memory, copy.extent
        checksums = [checksum_of(copy.key, bit) for bit in copy.bits]
        result = self._world.catalog.commit(process.id, copy.key, extent.generation, checksums)
        self._world.counts[result.value] += 1
        assert result is not CommitResult.REFUSED, f"the commit of {copy.claim} was refused"
        if result is not CommitResult.DISCARDED:
            memory.committed.setdefault(extent.generation, set()).update(copy.bits)
            memory.awaited[extent.generation].discard(process.rank or 0)
            whole = memory.is_whole(engine.namespace, extent)
            assert whole == (result is CommitResult.RESIDENT), f"{extent} is {result}"
            if whole and copy.key in TAILS:
                self._world.tail_used[copy.key] = self._world.now
                self._world.counts["tail saved"] += 1
