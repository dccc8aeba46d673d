# SPDX-License-Identifier: Apache-2.0
"""Saves: what ranks ask for and say while they write chunks into the arena."""

from collections.abc import Collection

from kvhaven.catalog import Catalog
from kvhaven.errors import ProtocolError
from kvhaven.protocol import Abort, Commit, Granted, Reserve, split_keys
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
        keys = split_keys(message.keys)
        session = member.session
        if session.namespace is None or not keys:
            connection.send(Granted(message.id, [None] * len(keys)))
            return
        offset = session.table.offsets[member.rank]
        grants: list[tuple[int, int, int] | None] = []
        parent = ChunkKey(message.parent) if message.parent else None
        for grant in self._catalog.reserve(member.id, session.digest, parent, keys):
            if grant is None:
                grants.append(None)
                continue
            extent = grant.extent
            member.granted[extent.generation] = grant.key
            grants.append((extent.segment, extent.offset + offset, extent.generation))
        connection.send(Granted(message.id, grants))

    def commit(self, member: Member, message: Commit) -> None:
        """Note shards that are written."""
        for key, generation, checksum in message.shards:
            member.granted.pop(generation, None)
            self._catalog.commit(member.id, ChunkKey(key), generation, Checksum(checksum))

    def abort(self, member: Member, message: Abort) -> None:
        """Note shards that will not be written."""
        for key, generation in message.shards:
            member.granted.pop(generation, None)
            self._catalog.abort(member.id, ChunkKey(key), generation)

    def returned(self, member: Member, holding: Collection[int]) -> None:
        """A rank is back and holds these grants: those that never reached it end."""
        for generation in member.granted.keys() - set(holding):
            self._catalog.abort(member.id, member.granted.pop(generation), generation)
