# SPDX-License-Identifier: Apache-2.0
"""Saves: ranks' requests and reports while they write chunks into the arena."""

from collections.abc import Callable, Collection
from typing import Final

from kvhaven.catalog.actions import CommitResult
from kvhaven.errors import ProtocolError
from kvhaven.protocol import Abort, Commit, Granted, KeyList, Reserve, batches, tenant_of
from kvhaven.service.accounts import Accounts
from kvhaven.service.connection import Connection
from kvhaven.service.driver import Driver
from kvhaven.service.engines import AttachedEngine, AttachedProcess
from kvhaven.service.turns import Job
from kvhaven.tiers.base import Namespace
from kvhaven.types import KEY_BYTES, Checksum, ChunkKey

_PIECE: Final = 32
"""Chunks that one piece of a job reserves or commits; takes 0.3 ms."""
_ACCEPTED: Final = {CommitResult.RESIDENT, CommitResult.WAITING}


class Saves:
    """Handler of messages about saves: passes them to the catalog, a few chunks at a time.

    `on_saved` is called with each chunk that has become visible.
    """

    def __init__(
        self, driver: Driver, on_saved: Callable[[ChunkKey], None], accounts: Accounts
    ) -> None:
        self._driver = driver
        self._accounts = accounts
        self.draining = False
        """Grant nothing."""
        self._on_saved = on_saved

    def reserve(self, connection: Connection, member: AttachedProcess, message: Reserve) -> Job:
        """Grant space for chunks that are absent, as far as there is space.

        Without a complete session, and while draining, nothing is granted.

        Raises `ProtocolError` for a scheduler, a parent key of another length, or tails that the
        namespace cannot have.
        """
        if member.rank is None:
            raise ProtocolError("a scheduler sent Reserve; only ranks save chunks")
        if message.parent and len(message.parent) != KEY_BYTES:
            raise ProtocolError(f"a parent of {len(message.parent)} bytes is not a key")
        keys, tenant = KeyList(message.keys), tenant_of(message.tenant)
        session = member.session
        engine, size = member.engine, member.engine.chunk_tokens
        if session.namespace is None or self.draining:
            if self.draining and member.rank == 0:
                self._skip(engine, "draining", len(keys) * (message.tail or size))
            connection.send(Granted(message.id, [None] * len(keys)))
            return
        _require_tail(session.namespace, message.tail)
        offset = session.offsets[member.rank]
        grants: list[tuple[int, int, int, bool] | None] = []
        parent = ChunkKey(message.parent) if message.parent else None
        for part in batches(keys, _PIECE):
            if grants:
                yield
            quota, space = self._driver.catalog.refused_saves
            for grant in self._driver.catalog.reserve(
                member.id, session.digest, parent, part, message.save, tenant, message.tail
            ):
                if grant is None:
                    grants.append(None)
                    continue
                extent = grant.extent
                member.granted[extent.generation] = grant.key
                place = extent.segment, extent.offset + offset
                grants.append((*place, extent.generation, bool(grant.shards)))
            parent = part[-1]
            now = self._driver.catalog.refused_saves
            self._skip(engine, "quota", (now[0] - quota) * (message.tail or size))
            self._skip(engine, "space", (now[1] - space) * (message.tail or size))
        connection.send(Granted(message.id, grants))

    def commit(self, member: AttachedProcess, message: Commit) -> Job:
        """Record that a rank has written its part of these chunks."""
        saved = written = 0
        for part in batches(message.chunks, _PIECE):
            for key, generation, sums in part:
                member.granted.pop(generation, None)
                checksums = [Checksum(checksum) for checksum in sums]
                result = self._driver.catalog.commit(
                    member.id, ChunkKey(key), generation, checksums
                )
                written += bool(checksums) and result in _ACCEPTED
                if result is CommitResult.RESIDENT:
                    self._on_saved(ChunkKey(key))
                    saved += 1
            yield
        if member.rank is not None:
            bytes_ = member.session.rank_bytes(member.rank)
            member.engine.traffic.saved_bytes += written * bytes_
        if saved and member.engine.chunk_tokens:
            self._accounts.saved(member.session.digest, saved * member.engine.chunk_tokens)

    def _skip(self, engine: AttachedEngine, reason: str, tokens: int) -> None:
        """Count tokens that an engine wanted to save and could not."""
        self._accounts.skipped[reason] += tokens
        engine.traffic.skipped_tokens += tokens

    def abort(self, member: AttachedProcess, message: Abort) -> Job:
        """Record that a rank has given up these chunks."""
        for part in batches(message.chunks, _PIECE):
            for key, generation in part:
                member.granted.pop(generation, None)
                self._driver.catalog.abort(member.id, ChunkKey(key), generation)
            yield

    def returned(self, member: AttachedProcess, holding: Collection[int]) -> None:
        """Abort the grants that never reached a rank, which attached again with `holding`."""
        lost = member.granted.keys() - set(holding)
        self._driver.turns.start(
            self._abort_all(member, [(g, member.granted.pop(g)) for g in lost])
        )

    def _abort_all(self, member: AttachedProcess, grants: list[tuple[int, ChunkKey]]) -> Job:
        for part in batches(grants, _PIECE):
            for generation, key in part:
                self._driver.catalog.abort(member.id, key, generation)
            yield


def _require_tail(namespace: Namespace, tokens: int) -> None:
    """Raise `ProtocolError` unless tails of so many stored tokens can exist; 0 is no tail."""
    if tokens and not namespace.has_tails_of(tokens):
        raise ProtocolError(
            f"tail: {tokens} tokens are not a part of a chunk of this namespace "
            f"(its chunk_size is {namespace.fields.get('chunk_size', 'unknown')})"
        )
