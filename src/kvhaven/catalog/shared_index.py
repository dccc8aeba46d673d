# SPDX-License-Identifier: Apache-2.0
"""What a shared tier was heard to hold: answers, and how long they are believed."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

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
"""A tier is asked for so many shards at a time, or for one chunk if that has more."""
MOST_PENDING = 1 << 14
"""Chunks that a tier may be asked for and has not answered; beyond, it is not asked."""
MOST_KNOWN = 1 << 17
"""Answers that are remembered; beyond, the oldest are forgotten."""
FAILED_S = 1.0
"""How long a tier that gave no answer is not asked for the same chunks again, at most."""


class _Answer:
    """What is believed of one chunk, and until when."""

    __slots__ = ("namespace", "present", "until")

    def __init__(self, namespace: NamespaceState | None, until: float, *, present: bool) -> None:
        self.namespace = namespace
        self.present = present
        self.until = until


class SharedTierIndex(TierTransfers):
    """A tier that others write to as well. See `TierState`.

    All it says may be wrong by the time it is used: a chunk that is believed present and is not
    is a read that misses; one that is believed absent and is not is a hit that is missed, until
    the answer is too old. Only a read, verified, makes anything visible.
    """

    def __init__(self, spec: TierSpec, actions: list[Action], work: Work) -> None:
        super().__init__()
        self.spec = spec
        self.now = 0.0
        self.known = OrderedMap[ChunkKey, _Answer]()  # the oldest answer first
        self.lookups: dict[int, Lookup] = {}
        self.pending: dict[ChunkKey, Lookup] = {}
        self.looked_up = 0
        self.found = 0
        self._actions = actions
        self._work = work
        self._numbers = 0

    # What is believed

    def holds(self, key: ChunkKey, namespace: NamespaceState) -> bool:
        """Whether the tier said, not long ago, that it has every shard."""
        known = self._known(key)
        return known is not None and known.present and known.namespace is namespace

    def decided(self, key: ChunkKey, namespace: NamespaceState) -> bool:
        """Whether there is an answer that is believed, of whatever kind."""
        known = self._known(key)
        return known is not None and known.namespace in {None, namespace}

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        """Change nothing: such a tier ages its chunks by itself."""

    def forget(self, key: ChunkKey) -> int:
        """Believe that a chunk is not there: a read missed it."""
        self._believe(key, None, self.spec.lookup_ttl_s, present=False)
        return 0

    # Asking

    def ask(self, namespace: NamespaceState, keys: Sequence[ChunkKey]) -> None:
        """Ask for chunks that were not asked for yet, unless too many answers are outstanding."""
        room = MOST_PENDING - len(self.pending)
        wanted = tuple(key for key in keys if key not in self.pending)[: max(0, room)]
        if not wanted:
            return
        self._numbers += 1
        lookup = self.lookups[self._numbers] = Lookup(self._numbers, namespace, wanted)
        self.pending.update(dict.fromkeys(wanted, lookup))
        self.looked_up += len(wanted)
        space, tenant = namespace.namespace, namespace.tenant.id
        self._actions.append(TierLookup(self.spec.name, lookup.number, space, wanted, tenant))

    def answered(self, number: int, found: Mapping[ChunkKey, int] | None) -> Lookup:
        """Take an answer (see `Catalog.tier_looked_up`) and return the question."""
        lookup = self.lookups.get(number)
        if lookup is None or (found is not None and not found.keys() <= set(lookup.keys)):
            raise KVHavenError(
                f"lookup {number} of tier {self.spec.name} is not under way, or not for these "
                "chunks; answer each TierLookup once, for the chunks that it names"
            )
        del self.lookups[number]
        for key in lookup.keys:
            del self.pending[key]
            if found is None:
                self._believe(key, None, min(FAILED_S, self.spec.lookup_ttl_s), present=False)
                continue
            present = found.get(key, 0) == lookup.namespace.complete
            self.found += present
            # What was written since it was asked is there, whatever was seen before.
            if present or not self.holds(key, lookup.namespace):
                self._believe(key, lookup.namespace, self.spec.lookup_ttl_s, present=present)
        return lookup

    # Reading and writing

    def has_room(self, namespace: NamespaceState) -> bool:  # noqa: ARG002 - the tier itself knows
        """Say yes: whether it fits, the tier itself decides."""
        return True

    def written(self, namespace: NamespaceState, key: ChunkKey, bytes_: int | None) -> None:
        """Believe that a chunk is there."""
        del bytes_  # the tier is not ours to keep to a size
        self._believe(key, namespace, self.spec.lookup_ttl_s, present=True)

    def unfinished(self, key: ChunkKey, namespace: NamespaceState) -> None:
        """Leave what is there: another node may have written it, and each shard is right."""

    def delete(self, key: ChunkKey, namespace: NamespaceState) -> int:
        """Have a chunk deleted; a read under way then misses, as when another node deletes."""
        space, tenant = namespace.namespace, namespace.tenant.id
        self._actions.append(TierDelete(self.spec.name, space, key, tenant))
        return self.forget(key)

    def clear(self, scope: Scope, parts: Sequence[NamespaceState]) -> tuple[int, int]:
        """Believe nothing any more; the store itself is the service's to clear.

        Not of others' chunks either: they are asked for again when they are wanted.
        """
        del scope, parts
        old, self.known = self.known, OrderedMap()
        self._work.start(_forget(old))
        return 0, 0

    def figures(self) -> TierFigures:
        """Return the figures of this moment; what it holds, only the tier itself knows."""
        return TierFigures(looking_up=len(self.pending), looked_up=self.looked_up, found=self.found)

    def _known(self, key: ChunkKey) -> _Answer | None:
        known = self.known.get(key)
        return known if known is not None and self.now < known.until else None

    def _believe(
        self, key: ChunkKey, namespace: NamespaceState | None, seconds: float, *, present: bool
    ) -> None:
        known = self.known
        if key in known:
            known.pop(key)
        known.append(key, _Answer(namespace, self.now + seconds, present=present))
        # Two for each that is added: what grew too old in a pause goes bit by bit.
        for oldest in tuple(islice(known, 2)):
            if len(known) > MOST_KNOWN or self.now >= known[oldest].until:
                known.pop(oldest)


def _forget(answers: OrderedMap[ChunkKey, _Answer]) -> Job:
    """Give the memory of answers back, page by page."""
    for page in answers.walk():
        for key, _ in page:
            answers.pop(key)
        if answers:
            yield
