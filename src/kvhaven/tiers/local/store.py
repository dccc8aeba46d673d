# SPDX-License-Identifier: Apache-2.0
"""Open disk store on the event loop: users of its descriptors, and shards being changed."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence

from kvhaven.tiers.base import StoredShard
from kvhaven.tiers.local.files import ShardFiles
from kvhaven.tiers.local.index import Index
from kvhaven.types import NamespaceDigest


class OpenStore:
    """Files and index of one opening of the directory. Not thread-safe.

    `manifests` holds the namespaces whose manifests are known to be valid; `writing_bytes` is
    the stored size of the writes in progress; `room_bytes` is the free space of the file system
    (None until measured).
    """

    def __init__(self, files: ShardFiles, index: Index) -> None:
        self.files = files
        self.index = index
        self.manifests: set[NamespaceDigest] = set()
        self.writing_bytes = 0
        self.room_bytes: int | None = None
        self.scanned = False
        self._changing: dict[StoredShard, asyncio.Future[None]] = {}
        self._users = 0
        self._retired = False

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Keep the descriptors open while a thread may use them, also after `retire`."""
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            self._close_when_idle()

    def retire(self) -> None:
        """Close the directory once no call uses it."""
        self._retired = True
        self._close_when_idle()

    @contextlib.asynccontextmanager
    async def change(self, shards: Sequence[StoredShard]) -> AsyncIterator[None]:
        """Serialize changes of shards' files: changes of the same shard run one after the other."""
        while others := {self._changing[shard] for shard in shards if shard in self._changing}:
            await asyncio.wait(others)
        done = asyncio.get_running_loop().create_future()
        self._changing.update(dict.fromkeys(shards, done))
        try:
            yield
        finally:
            for shard in set(shards):
                del self._changing[shard]
            done.set_result(None)

    def _close_when_idle(self) -> None:
        if self._retired and not self._users:
            self._retired = False
            self.files.directory.close()


def name_of(shard: StoredShard) -> bytes:
    """Return a unique name of a shard, which begins with its key."""
    return shard.key + shard.namespace + shard.tenant + str(shard.shard).encode()
