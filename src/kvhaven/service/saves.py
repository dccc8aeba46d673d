# SPDX-License-Identifier: Apache-2.0
"""Saves: what ranks ask for and say while they write chunks into the arena."""

from collections.abc import Collection

from kvhaven.catalog import Catalog
from kvhaven.errors import ProtocolError
from kvhaven.protocol import Abort, Commit, Granted, Reserve, split_keys, tenant_of
from kvhaven.service.connection import Connection
from kvhaven.service.sessions import Member
from kvhaven.types import KEY_BYTES, Checksum, ChunkKey


class Saves:
    """Turns ranks' messages about saves into the catalog's events."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def reserve(self, connection: Connection, member: Member, message: Reserve) -> None:
        """Grant space for chunks that are absent, where there is space."""
        if member.rank is None:
            raise ProtocolError("a scheduler writes no chunks")
        if message.parent and len(message.parent) != KEY_BYTES:
            raise ProtocolError(f"a parent of {len(message.parent)} bytes is no key")
        keys, tenant = split_keys(message.keys), tenant_of(message.tenant)
        session = member.session
        if session.namespace is None or not keys:
            connection.send(Granted(message.id, [None] * len(keys)))
            return
        offset = session.holdings.offsets[member.rank]
        grants: list[tuple[int, int, int, bool] | None] = []
        parent = ChunkKey(message.parent) if message.parent else None
        for grant in self._catalog.reserve(
            member.id, session.digest, parent, keys, message.save, tenant
        ):
            if grant is None:
                grants.append(None)
                continue
            extent = grant.extent
            member.granted[extent.generation] = grant.key
            place = extent.segment, extent.offset + offset
            grants.append((*place, extent.generation, bool(grant.shards)))
        connection.send(Granted(message.id, grants))

    def commit(self, member: Member, message: Commit) -> None:
        """Note that a rank has done its part of chunks."""
        for key, generation, sums in message.chunks:
            member.granted.pop(generation, None)
            checksums = [Checksum(checksum) for checksum in sums]
            self._catalog.commit(member.id, ChunkKey(key), generation, checksums)

    def abort(self, member: Member, message: Abort) -> None:
        """Note chunks that a rank has given up."""
        for key, generation in message.chunks:
            member.granted.pop(generation, None)
            self._catalog.abort(member.id, ChunkKey(key), generation)

    def returned(self, member: Member, holding: Collection[int]) -> None:
        """A rank is back and holds these grants: those that never reached it end."""
        for generation in member.granted.keys() - set(holding):
            self._catalog.abort(member.id, member.granted.pop(generation), generation)
