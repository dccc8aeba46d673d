# SPDX-License-Identifier: Apache-2.0
"""All tiers together: where a chunk can be promoted from, and where it is to be written."""

from collections.abc import Iterable, Sequence

from kvhaven.catalog.actions import Action, TierName, TierRead
from kvhaven.catalog.entries import Entry, NamespaceState
from kvhaven.catalog.tierindex import TierIndex, TierSpec
from kvhaven.catalog.writebehind import WriteBehind
from kvhaven.errors import KVHavenError
from kvhaven.types import ChunkKey


class Tiers:
    """The tiers in the order in which they are asked, the fastest first."""

    def __init__(
        self, specs: Sequence[TierSpec], write_queue_bytes: int, actions: list[Action]
    ) -> None:
        self.indexes = {spec.name: TierIndex(spec, actions) for spec in specs}
        self.writes = {
            name: WriteBehind(index, write_queue_bytes, actions)
            for name, index in self.indexes.items()
        }
        self._actions = actions

    def index(self, tier: TierName) -> TierIndex:
        """Return a tier's index. Raises KVHavenError for an unknown tier."""
        known = self.indexes.get(tier)
        if known is None:
            raise KVHavenError(f"tier {tier} is unknown; there are: {', '.join(self.indexes)}")
        return known

    def source(self, key: ChunkKey, namespace: NamespaceState) -> TierIndex | None:
        """Return the first tier that is online and holds the chunk whole."""
        for index in self.indexes.values():
            if index.online and index.holds(key, namespace):
                return index
        return None

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        """Note a use of these chunks in every tier, tail to head."""
        tail_first = list(keys)
        for index in self.indexes.values():
            index.touch(tail_first)

    def read(self, index: TierIndex, entry: Entry) -> None:
        """Ask for the read that fills a chunk."""
        index.read_begins(entry.key)
        digest = entry.namespace.namespace.digest
        self._actions.append(TierRead(index.spec.name, digest, entry.key, entry.extent))

    def write_behind(self, entry: Entry, *, but: TierName | None = None) -> None:
        """Have a chunk that is resident now written to every online tier that lacks it."""
        for name, writes in self.writes.items():
            if name != but:
                writes.offer(entry)

    def set_online(self, tier: TierName, online: bool) -> None:
        """Use a tier, or leave it alone."""
        self.index(tier).online = online
        if not online:
            self.writes[tier].drop_queue()

    def discard(self, entry: Entry) -> None:
        """Do not keep what is being written of a chunk: its bytes are not to be trusted."""
        for writes in self.writes.values():
            writes.cancel(lambda e: e is entry)

    def clear(self, tiers: Iterable[TierName], namespace: NamespaceState | None) -> tuple[int, int]:
        """Delete a namespace's chunks (all, for None); return how many, and their bytes."""
        chunks = bytes_ = 0
        for name in tiers:
            index = self.index(name)
            self.writes[name].cancel(lambda e: namespace is None or e.namespace is namespace)
            for key, stored in tuple(index.stored.items()):
                if namespace is None or stored.namespace is namespace:
                    chunks += 1
                    bytes_ += index.delete(key, stored.namespace)
        return chunks, bytes_
