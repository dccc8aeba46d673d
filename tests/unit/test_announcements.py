# SPDX-License-Identifier: Apache-2.0
"""Announcements: the views of followers converge on what is in the arena, whatever gets lost.

The model here is sans-IO: a catalog that saves, evicts and clears, one log, and followers whose
messages get lost or come late. Each fault below breaks the promise.
"""

import hashlib
import random
from collections import Counter
from collections.abc import Callable

import pytest

from kvhaven import maps
from kvhaven.arena.allocator import SlabAllocator
from kvhaven.catalog import Catalog, announcer
from kvhaven.catalog.actions import MemberId
from kvhaven.catalog.announcer import START, Announcer, Batch, Cursor
from kvhaven.catalog.entries import Entry
from kvhaven.catalog.policies import make_policy
from kvhaven.keys import announced_digest, tenant_id
from kvhaven.maps import StripedDict
from kvhaven.peers.view import PeerView
from kvhaven.tiers.base import Namespace
from kvhaven.types import (
    NO_TENANT,
    Checksum,
    ChunkKey,
    NamespaceDigest,
    Shard,
    ShardId,
    ShardTable,
    TenantId,
)
from tests.unit.catalog_kit import described

SIZE = 1 << 16
"""Space for 16 chunks of a page."""
SHARD = Shard(ShardId(0, (0, 1), (0, 1)), 4096)
SPACE = Namespace(NamespaceDigest(b"n" * 32), {}, ShardTable((SHARD,)))
RANK = MemberId("rank")
ANN = tenant_id("ann")
KEYS = [ChunkKey(hashlib.sha256(bytes([at])).digest()) for at in range(60)]
TAILS = {*KEYS[50:]}


@pytest.fixture(autouse=True)
def many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the catalog's mapping have 256 parts from 8 chunks on, as with thousands."""
    monkeypatch.setattr(maps, "_WHOLE", 8)


class Node:
    """A catalog with one engine, which saves single chunks."""

    def __init__(self, name: str, *, tenants: bool = True, most: int = 24) -> None:
        self.name = name
        self.announcer = Announcer(tenants=tenants, most=most)
        self.catalog = Catalog(
            SlabAllocator({0: SIZE}), make_policy("lru"), announcer=self.announcer
        )
        self.catalog.attach_rank("engine", RANK, 0, described(SPACE, (1,), 0))
        self.catalog.ready(RANK, 0, SIZE)
        self._saves = 0

    def save(self, key: ChunkKey, tenant: TenantId = NO_TENANT) -> None:
        self._saves += 1
        tail = 3 if key in TAILS else 0
        (grant,) = self.catalog.reserve(RANK, SPACE.digest, None, [key], self._saves, tenant, tail)
        if grant is not None:
            sums = [Checksum(bytes(16))]
            self.catalog.commit(RANK, key, grant.extent.generation, sums)

    def clear(self) -> None:
        self.catalog.clear()
        while self.catalog.busy:
            self.catalog.work()

    def held(self, tenant: TenantId = NO_TENANT) -> set[int]:
        """Return the digests of the full chunks in memory."""
        there = self.catalog.has(SPACE.digest, KEYS, tenant)
        return {
            announced_digest(SPACE.digest, key, tenant)
            for key, has in zip(KEYS, there, strict=True)
            if has and key not in TAILS
        }

    def answer(self, source: str, cursor: Cursor, most: int) -> Batch:
        return self.catalog.announced(cursor if source == self.name else START, most)


def digests_of(view: PeerView) -> set[int]:
    return {digest for stripe in view._stripes for digest in stripe}


class History:
    """A node, and followers of which each hears of it now and then."""

    def __init__(self, seed: int) -> None:
        self.counts = Counter[str]()
        self._dice = random.Random(seed)
        self._node = Node("0")
        self._views = [PeerView(), PeerView(), PeerView(most=9)]

    def run(self, steps: int = 600) -> None:
        """Let random things happen; then let followers hear all."""
        methods = {self.save: 55, self.hear: 38, self.save_many: 5, self.clear: 1, self.restart: 1}
        for method in self._dice.choices([*methods], [*methods.values()], k=steps):
            method()
        for view in self._views[:2]:
            for _ in range(2000):
                batch = self._node.answer(view.source, view.cursor, 4)
                view.apply(self._node.name, batch)
                if batch.whole:
                    break
            self._verify(view)

    def save(self) -> None:
        for _ in range(self._dice.randrange(1, 4)):
            tenant = self._dice.choice((NO_TENANT, NO_TENANT, ANN))
            self._node.save(self._dice.choice(KEYS), tenant)

    def save_many(self) -> None:
        """Save more than the node remembers."""
        for _ in range(30):
            self._node.save(self._dice.choice(KEYS))

    def clear(self) -> None:
        self._node.clear()

    def restart(self) -> None:
        self.counts["restart"] += 1
        self._node = Node(str(self.counts["restart"]))

    def hear(self) -> None:
        """A follower asks; its answer may get lost."""
        view = self._dice.choice(self._views)
        before = view.cursor
        batch = self._node.answer(view.source, before, self._dice.choice((1, 4, 20)))
        if self._dice.random() < 0.2:
            self.counts["lost"] += 1
            return
        view.apply(self._node.name, batch)
        self.counts["snapshot"] += batch.fresh
        self.counts["gap"] += batch.fresh and before != START
        self.counts["overflow"] += view.overflowed
        assert view.digests == len(digests_of(view))
        if batch.whole and not view.overflowed:
            self.counts["whole"] += 1
            self._verify(view)

    def _verify(self, view: PeerView) -> None:
        """Assert that a view that has heard all is that of the catalog."""
        assert view.synced
        assert digests_of(view) == self._node.held() | self._node.held(ANN)


def run_some() -> None:
    for seed in range(12):
        History(seed).run()


def test_views_converge_however_much_is_lost() -> None:
    counts = Counter[str]()
    for seed in range(12):
        history = History(seed)
        history.run()
        counts += history.counts
    for what in ("snapshot", "gap", "lost", "whole", "restart", "overflow"):
        assert counts[what], f"{what} never happened"


def _no_gap(
    self: Announcer, entries: StripedDict[ChunkKey, Entry], cursor: Cursor, most: int
) -> Batch:
    if cursor != START:
        cursor = Cursor(max(cursor.seq, self.seq - self._most), cursor.part)
    return _next(self, entries, cursor, most)


def _late_snapshot(
    self: Announcer, entries: StripedDict[ChunkKey, Entry], cursor: Cursor, most: int
) -> Batch:
    """Let changes during a snapshot be taken as known."""
    batch = _next(self, entries, cursor, most)
    if not batch.whole and (batch.fresh or cursor.part < announcer._ALL):
        return batch._replace(cursor=Cursor(self.seq, batch.cursor.part))
    return batch


def _order_is_lost(
    self: Announcer, entries: StripedDict[ChunkKey, Entry], cursor: Cursor, most: int
) -> Batch:
    """Announce both an addition and a later removal of a digest, and the reverse, as both."""
    batch = _next(self, entries, cursor, most)
    if cursor.seq < 0 or batch.fresh or cursor.part < announcer._ALL:
        return batch
    changes = range(cursor.seq, batch.cursor.seq)
    digests = {self._digests[at % self._most] for at in changes if self._added[at % self._most]}
    return batch._replace(added=[*digests], removed=[*set(batch.removed) - digests])


def _keeps_the_old(view: PeerView, source: str, batch: Batch) -> None:
    view.source, view.cursor = source, batch.cursor
    view._add(batch.added)
    for digest in batch.removed:
        view.forget(digest)
    view.synced = view.synced or batch.whole


def _forgets_removals(self: Announcer, entry: Entry, *, added: bool) -> None:
    if added:
        _note(self, entry, added=added)


def _announces_tails(self: Announcer, entry: Entry, *, added: bool) -> None:
    tail, entry.tail = entry.tail, 0
    _note(self, entry, added=added)
    entry.tail = tail


_next, _note = Announcer.next, Announcer.note


def test_of_a_restarted_node_nothing_is_believed() -> None:
    node, view = Node("one"), PeerView()
    for key in KEYS[:9]:
        node.save(key)
    view.apply(node.name, node.answer(view.source, view.cursor, 99))
    view.apply(node.name, node.answer(view.source, view.cursor, 99))
    assert (view.synced, view.digests) == (True, 9)
    later = Node("two")
    for key in KEYS[9:20]:
        later.save(key)
    # Another node at the address answers for the cursor of the first: it is not applied.
    view.apply(later.name, later.catalog.announced(view.cursor, 99))
    assert not view.synced
    for _ in range(300):
        view.apply(later.name, later.answer(view.source, view.cursor, 99))
    assert digests_of(view) == later.held()


@pytest.mark.parametrize(
    ("of", "name", "broken"),
    [
        (Announcer, "next", _no_gap),
        (Announcer, "next", _late_snapshot),
        (Announcer, "next", _order_is_lost),
        (Announcer, "note", _forgets_removals),
        (Announcer, "note", _announces_tails),
        (PeerView, "apply", _keeps_the_old),
    ],
)
def test_each_fault_breaks_the_promise(
    monkeypatch: pytest.MonkeyPatch, of: type, name: str, broken: Callable[..., object]
) -> None:
    monkeypatch.setattr(of, name, broken)
    with pytest.raises(AssertionError):
        run_some()


def test_chunks_of_tenants_are_left_out_if_they_stay_on_their_node() -> None:
    node, view = Node("one", tenants=False), PeerView()
    node.save(KEYS[0])
    node.save(KEYS[1], ANN)
    for _ in range(2):
        view.apply(node.name, node.answer(view.source, view.cursor, 99))
    assert view.synced
    assert digests_of(view) == node.held()
    assert node.held(ANN)
    node.save(KEYS[2], ANN)
    assert node.announcer.seq == 1


def test_a_digest_is_of_one_namespace_tenant_and_key() -> None:
    other = NamespaceDigest(b"o" * 32)
    names = [(SPACE.digest, KEYS[0], NO_TENANT), (other, KEYS[0], NO_TENANT)]
    names += [(SPACE.digest, KEYS[0], ANN), (SPACE.digest, KEYS[1], NO_TENANT)]
    assert len({announced_digest(*name) for name in names}) == len(names)
    # Written down, because nodes of other versions compute it as well.
    assert announced_digest(*names[2]) == 18065493263695572386
