# SPDX-License-Identifier: Apache-2.0
"""Index of a shared tier: pending lookups, and a cache of their results with a time to live."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

import msgspec

from kvhaven.catalog.actions import Action, TierDelete, TierLookup
from kvhaven.catalog.entries import NamespaceState
from kvhaven.catalog.holdings import Scope
from kvhaven.catalog.sessions import Lookup
from kvhaven.catalog.tier_spec import TierFigures, TierSpec, TierTransfers
from kvhaven.catalog.work import Job, Work
from kvhaven.errors import KVHavenError
from kvhaven.maps import OrderedMap
from kvhaven.types import ChunkKey

LOOKUP_SHARDS = 1024
"""Maximum number of shards in a lookup; a single chunk may have more."""
MOST_PENDING = 1 << 14
"""Maximum number of chunks in pending lookups of a tier; beyond, it gets no more lookups."""
MOST_EXPECTED = MOST_PENDING // 2
"""Maximum number of pending chunks with which more are expected; the rest is for lookups."""
MOST_KNOWN = 1 << 17
"""Maximum number of cached results; beyond, the oldest are dropped."""
FAILED_S = 1.0
"""Seconds for which a failed lookup is not repeated for the same chunks, at most."""


class _Answer:
    """Cached lookup result of one chunk, or of a tail of `tail` tokens, with its expiry time."""

    __slots__ = ("namespace", "present", "tail", "until")

    def __init__(
        self, namespace: NamespaceState | None, until: float, *, present: bool, tail: int = 0
    ) -> None:
        self.namespace = namespace
        self.present = present
        self.until = until
        self.tail = tail


class SharedTierIndex(TierTransfers):
    """Index of a tier that other nodes write to as well. See `TierState`.

    A cached result may be wrong when it is used. A read of a chunk that is no longer present is a
    miss. A chunk that was written by another node since is missed until its result expires. Only a
    verified read makes a chunk visible.
    """

    def __init__(self, spec: TierSpec, actions: list[Action], work: Work) -> None:
        super().__init__()
        self.spec = spec
        self.now = 0.0
        self.known = OrderedMap[ChunkKey, _Answer]()  # oldest result first
        self.lookups: dict[int, Lookup] = {}
        self.pending: dict[ChunkKey, Lookup] = {}
        self.looked_up = 0
        self.found = 0
        self._actions = actions
        self._work = work
        self._numbers = 0

    # Cached results

    def believe(self, seconds: float) -> None:
        """Set how long results are cached; a shorter time drops those that are cached."""
        seconds = min(seconds, self.spec.most_lookup_ttl_s)
        if seconds < self.spec.lookup_ttl_s:
            old, self.known = self.known, OrderedMap()
            self._work.start(_forget(old))
        self.spec = msgspec.structs.replace(self.spec, lookup_ttl_s=seconds)

    def holds(self, key: ChunkKey, namespace: NamespaceState) -> bool:
        """Return whether an unexpired result says that every shard is present."""
        known = self._known(key)
        return known is not None and known.present and known.namespace is namespace

    def decided(self, key: ChunkKey, namespace: NamespaceState) -> bool:
        """Return whether there is an unexpired result, present or absent."""
        known = self._known(key)
        return known is not None and known.namespace in {None, namespace}

    def tail_tokens(self, key: ChunkKey, namespace: NamespaceState) -> int:
        """Return the stored tokens of a tail that is present, 0 if it is not."""
        known = self._known(key)
        there = known is not None and known.present and known.namespace is namespace
        return known.tail if known is not None and there else 0

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        """Do nothing: a shared tier ages its chunks itself."""

    def forget(self, key: ChunkKey) -> int:
        """Record a chunk as absent, after a read that missed."""
        self._believe(key, None, self.spec.lookup_ttl_s, present=False)
        return 0

    # Lookups

    def ask(self, namespace: NamespaceState, keys: Sequence[ChunkKey]) -> None:
        """Request a lookup of the chunks without a pending one, unless too many are pending."""
        room = MOST_PENDING - len(self.pending)
        new = dict.fromkeys(key for key in keys if key not in self.pending)  # keys may repeat
        wanted = tuple(new)[: max(0, room)]
        if not wanted:
            return
        self._numbers += 1
        lookup = self.lookups[self._numbers] = Lookup(self._numbers, namespace, wanted)
        self.pending.update(dict.fromkeys(wanted, lookup))
        self.looked_up += len(wanted)
        space, tenant = namespace.namespace, namespace.tenant.id
        self._actions.append(TierLookup(self.spec.name, lookup.number, space, wanted, tenant))

    def expect(self, namespace: NamespaceState, keys: Sequence[ChunkKey]) -> dict[ChunkKey, int]:
        """Return the number of a pending lookup for each chunk without one, as far as allowed.

        No action requests these lookups: another node says when it has computed the chunks. A
        result that says otherwise is dropped.
        """
        room = max(0, MOST_EXPECTED - len(self.pending))
        numbers: dict[ChunkKey, int] = {}
        for key in [key for key in dict.fromkeys(keys) if key not in self.pending][:room]:
            if key in self.known:
                self.known.pop(key)
            self._numbers += 1
            lookup = Lookup(self._numbers, namespace, (key,))
            self.lookups[lookup.number] = self.pending[key] = lookup
            numbers[key] = lookup.number
        return numbers

    def withdraw(self, number: int) -> Lookup:
        """Drop a lookup without an answer and return it."""
        return self._ended(number, ())

    def _ended(self, number: int, found: Iterable[ChunkKey]) -> Lookup:
        """Drop a pending lookup that names all of `found`, and return it."""
        lookup = self.lookups.get(number)
        if lookup is None or not set(found) <= set(lookup.keys):
            raise KVHavenError(
                f"lookup {number} of tier {self.spec.name} is not pending, or does not name these "
                "chunks; answer each TierLookup once, for the chunks that it names"
            )
        del self.lookups[number]
        for key in lookup.keys:
            self.pending.pop(key, None)
        return lookup

    def answered(self, number: int, found: Mapping[ChunkKey, int] | None, tail: int = 0) -> Lookup:
        """Process an answer (see `Catalog.tier_looked_up`) and return its lookup."""
        lookup = self._ended(number, found or ())
        for key in lookup.keys:
            present = found is not None and found.get(key, 0) == lookup.namespace.complete
            self.found += present
            # A chunk written since the lookup began is present, whatever the lookup saw.
            if not present and self.holds(key, lookup.namespace):
                continue
            seconds = self.spec.lookup_ttl_s
            if found is None:
                self._believe(key, None, min(FAILED_S, seconds), present=False)
            else:
                self._believe(key, lookup.namespace, seconds, present=present, tail=tail)
        return lookup

    def arrived(self, namespace: NamespaceState, key: ChunkKey, tail: int = 0) -> Lookup | None:
        """Record a chunk as present, or a tail of so many stored tokens.

        Returns its pending lookup, for which nothing needs to wait any longer.
        """
        self._believe(key, namespace, self.spec.lookup_ttl_s, present=True, tail=tail)
        return self.pending.get(key)

    # Reads and writes

    def has_room(self, namespace: NamespaceState) -> bool:  # noqa: ARG002 - the tier itself knows
        """Return True: the tier itself decides whether a chunk fits."""
        return True

    def written(self, namespace: NamespaceState, key: ChunkKey, bytes_: int | None) -> None:
        """Record a chunk as present."""
        del bytes_  # the catalog does not limit the size of a shared tier
        self.arrived(namespace, key)

    def unfinished(self, key: ChunkKey, namespace: NamespaceState) -> None:
        """Do nothing: another node may have written the chunk, and each shard is valid alone."""

    def delete(self, key: ChunkKey, namespace: NamespaceState) -> int:
        """Request the deletion of a chunk; a read under way then misses."""
        space, tenant = namespace.namespace, namespace.tenant.id
        self._actions.append(TierDelete(self.spec.name, space, key, tenant))
        return self.forget(key)

    def clear(self, scope: Scope, parts: Sequence[NamespaceState]) -> tuple[int, int]:
        """Drop all cached results; the service clears the store.

        Results for chunks outside of the scope are dropped as well, and looked up again when
        needed.
        """
        del scope, parts
        old, self.known = self.known, OrderedMap()
        self._work.start(_forget(old))
        return 0, 0

    def figures(self) -> TierFigures:
        """Return the present statistics; only the tier itself knows its content."""
        return TierFigures(looking_up=len(self.pending), looked_up=self.looked_up, found=self.found)

    def _known(self, key: ChunkKey) -> _Answer | None:
        known = self.known.get(key)
        return known if known is not None and self.now < known.until else None

    def _believe(
        self,
        key: ChunkKey,
        namespace: NamespaceState | None,
        seconds: float,
        *,
        present: bool,
        tail: int = 0,
    ) -> None:
        known = self.known
        if key in known:
            known.pop(key)
        known.append(key, _Answer(namespace, self.now + seconds, present=present, tail=tail))
        # Two per added result: results that expired in a pause are dropped gradually.
        for oldest in tuple(islice(known, 2)):
            if len(known) > MOST_KNOWN or self.now >= known[oldest].until:
                known.pop(oldest)


def _forget(answers: OrderedMap[ChunkKey, _Answer]) -> Job:
    """Free the memory of results, page by page."""
    for page in answers.walk():
        for key, _ in page:
            answers.pop(key)
        if answers:
            yield
