# SPDX-License-Identifier: Apache-2.0
"""Shared tier in a SQLite database: `remote_url: sqlite:///var/kv.db`."""

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from kvhaven.errors import ConfigError, TierMissError
from kvhaven.tiers.base import StoredShard
from kvhaven.tiers.executor import Lane
from kvhaven.tiers.format.codec import ShardCodec
from kvhaven.tiers.format.header import HEADER_BYTES, may_hold
from kvhaven.tiers.registry import TierOptions
from kvhaven.tiers.shared.remote_store import RemoteStore
from kvhaven.tiers.shared.store import (
    FOLDER,
    Blob,
    StoreFailedError,
    blob_name,
    manifest_name,
    require_size,
    unpack,
)
from kvhaven.tiers.shared.tier import SharedTier
from kvhaven.types import Checksum

_DEADLINE_S = 10.0
_PAGE = 1000


def open_sqlite(url: str, options: TierOptions) -> SharedTier:
    """Return the tier of a database file, not started. Raises `ConfigError` for an invalid URL."""
    path = unquote(urlsplit(url).path)
    if not path.startswith("/") or urlsplit(url).netloc:
        raise ConfigError(
            f"remote_url: not an absolute path of a file (got {url!r}); expected sqlite:///path"
        )
    return SharedTier(RemoteStore(SqliteClient(Path(path)), _DEADLINE_S), retry_s=options.retry_s)


class SqliteClient:
    """`SharedStore` over a table of blobs. Used in the one thread of a `RemoteStore`."""

    name = "sqlite"

    def __init__(self, path: Path) -> None:
        self.title = f"SQLite tier {path}"
        self._path = path
        self._packing = ShardCodec(self.title)
        self._connection: sqlite3.Connection | None = None

    async def open(self) -> None:
        """Open the database, or create it in a directory that exists."""
        try:
            if self._connection is None:
                self._connection = sqlite3.connect(self._path, timeout=5, isolation_level=None)
            self._run("PRAGMA journal_mode=WAL")
            self._run("CREATE TABLE IF NOT EXISTS blobs (name TEXT PRIMARY KEY, content BLOB)")
        except sqlite3.Error as error:
            raise StoreFailedError(f"{self.title}: cannot be opened: {error}") from error

    async def still_open(self) -> bool:
        """Return whether the file exists."""
        return self._path.exists()

    async def close(self, deadline_s: float) -> None:
        """Close the database."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def read(self, shard: StoredShard, into: memoryview) -> Checksum:
        """Read and verify a shard."""
        name = blob_name(shard)
        await asyncio.sleep(0)  # a cancelled call ends here, before the buffer is written
        blob = self._content(name)
        if blob is None:
            raise TierMissError(f"{name} is not stored")
        require_size(len(blob), shard, name)
        into[: len(blob) - HEADER_BYTES] = memoryview(blob)[HEADER_BYTES:]
        return unpack(self._packing, blob[:HEADER_BYTES], into, len(blob), shard, name)

    async def write(self, shard: StoredShard, payload: memoryview, checksum: Checksum) -> int:
        """Write a shard unless it is present."""
        if (await self.contains([shard]))[0]:
            return 0
        blob = b"".join(self._packing.pack(shard, payload, checksum))
        self._run("INSERT OR REPLACE INTO blobs VALUES (?, ?)", blob_name(shard), blob)
        return len(blob)

    async def contains(self, shards: Sequence[StoredShard]) -> Sequence[bool]:
        """Return whether each shard is present."""
        await asyncio.sleep(0)
        sizes = [
            self._run("SELECT length(content) FROM blobs WHERE name = ?", blob_name(shard))
            for shard in shards
        ]
        return [
            bool(rows) and may_hold(rows[0][0], shard.payload_bytes)
            for rows, shard in zip(sizes, shards, strict=True)
        ]

    async def remove(self, names: Sequence[str]) -> None:
        """Remove blobs."""
        for name in names:
            self._run("DELETE FROM blobs WHERE name = ?", name)

    async def load_manifest(self, folder: str) -> bytes | None:
        """Return a manifest."""
        return self._content(manifest_name(folder))

    async def save_manifest(self, folder: str, content: bytes) -> None:
        """Store a manifest."""
        self._run("INSERT OR REPLACE INTO blobs VALUES (?, ?)", manifest_name(folder), content)

    async def folders(self) -> Sequence[str]:
        """Return the namespaces' folders."""
        rows = self._run("SELECT DISTINCT substr(name, 1, instr(name, '/') - 1) FROM blobs")
        return sorted(str(folder) for (folder,) in rows if FOLDER.fullmatch(str(folder)))

    async def list_blobs(self, folder: str) -> AsyncIterator[Sequence[Blob]]:
        """Yield a folder's blobs, page by page, in the order of their names."""
        last, end = f"{folder}/", f"{folder}0"  # "0" follows "/"
        while rows := self._run(
            "SELECT name, length(content) FROM blobs WHERE name > ? AND name < ? AND name != ? "
            "ORDER BY name LIMIT ?",
            *(last, end, manifest_name(folder), _PAGE),
        ):
            yield [Blob(str(name), int(str(size)), None) for name, size in rows]
            last = str(rows[-1][0])

    async def now(self) -> float:
        """Return this machine's time."""
        return time.time()

    async def probe(self, lane: Lane) -> None:
        """Verify that the database answers."""
        self._run("SELECT 1")

    def queued(self, lane: Lane) -> int:
        """Return 0: `RemoteStore` has the queue."""
        return 0

    def longest_running_s(self) -> float:
        """Return 0: every call ends by SQLite's timeout."""
        return 0.0

    def _content(self, name: str) -> bytes | None:
        rows = self._run("SELECT content FROM blobs WHERE name = ?", name)
        return bytes(rows[0][0]) if rows else None

    def _run(self, statement: str, *values: object) -> list[tuple[bytes | int | str, ...]]:
        """Run a statement. Raises `StoreFailedError`."""
        if self._connection is None:
            raise StoreFailedError(f"{self.title}: the database is not open")
        try:
            return self._connection.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise StoreFailedError(f"{self.title}: {error}") from error
