# SPDX-License-Identifier: Apache-2.0
"""S3 tier: shards as objects in a bucket of AWS, Ceph, MinIO, ... (`kvhaven[s3]`)."""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from datetime import timedelta
from typing import Any, Final, Literal, TypeVar
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotSupportedError
from obstore.store import S3Store

from kvhaven.config.urls import redacted, split_url
from kvhaven.errors import ConfigError, TierMissError
from kvhaven.tiers.base import StoredShard
from kvhaven.tiers.executor import Lane
from kvhaven.tiers.format.codec import DamagedShardError, ShardCodec
from kvhaven.tiers.format.header import HEADER_BYTES, may_hold
from kvhaven.tiers.format.manifest import MOST_BYTES
from kvhaven.tiers.s3 import credentials as aws
from kvhaven.tiers.s3.errors import error_code, error_status, explain
from kvhaven.tiers.shared.codec_threads import CodecThreads
from kvhaven.tiers.shared.known_shards import KnownShards
from kvhaven.tiers.shared.remote_store import RemoteStore
from kvhaven.tiers.shared.retries import PassingError, Retries
from kvhaven.tiers.shared.store import (
    FOLDER,
    Blob,
    blob_name,
    manifest_name,
    require_size,
)
from kvhaven.tiers.shared.tier import SharedTier
from kvhaven.types import Checksum

T = TypeVar("T")

_PROBE_TEXT: Final = b"KVHaven was here\n"
PROBE: Final = "kvhaven.probe"
"""Name of the object that probes read and write."""

HEADS_AT_ONCE: Final = 64
_PIECE_BYTES: Final = 1 << 20
"""Approximate size of the pieces of a body; each is copied once, to its final place."""
_CONNECT_S: Final = 2.0
_AVOID_S: Final = 5.0
_NOT_IMPLEMENTED: Final = 501


def s3_tier(
    url: str,
    *,
    endpoints: Sequence[str] = (),
    compress: bool = False,
    deadline_s: float = 10.0,
    present_s: float = 60.0,
    absent_s: float = 0.2,
    clock: Callable[[], float] = time.monotonic,
    **watching: Any,  # settings of SharedTier, passed on
) -> SharedTier:
    """Return a tier over `s3://bucket/prefix`; see `S3Client` and `KnownShards`.

    Raises `ConfigError` as `S3Client` does.
    """
    client = S3Client(url, endpoints=endpoints, compress=compress, deadline_s=deadline_s)
    presence = KnownShards(clock, present_s=present_s, absent_s=absent_s)
    store = RemoteStore(client, deadline_s)
    return SharedTier(store, presence=presence, codec=client.codec, clock=clock, **watching)


class S3Client:
    """`SharedStore` over a bucket, used in one thread; `SharedStore` documents the methods.

    Requests alternate between the `endpoints`, which all belong to one store; an endpoint that
    failed recently is skipped. Default: the endpoint in the environment, or AWS. Credentials and
    region come from AWS's standard places (see `credentials`). A request may take `deadline_s`
    seconds; transient failures are retried. An object is put in a single request: a multipart
    upload of 8 MiB took 8 times as long on Ceph.

    Raises `ConfigError` if the URL or an endpoint is invalid, or if a package is missing that
    `compress` or the AWS profile needs.
    """

    name = "s3"

    def __init__(
        self, url: str, *, endpoints: Sequence[str], compress: bool, deadline_s: float
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme != "s3" or not parts.netloc or "@" in parts.netloc or parts.query:
            raise ConfigError(
                "remote_url: not a valid S3 URL; expected s3://bucket or s3://bucket/prefix, no "
                "credentials. Store credentials where AWS's tools look for them."
            )
        self.title = f"S3 tier s3://{parts.netloc}{parts.path.rstrip('/')}"
        self.codec = ShardCodec(self.title, zstd=compress)
        self._threads = CodecThreads(self.codec)
        self._bucket = parts.netloc
        self._prefix = parts.path.strip("/")
        self._deadline_s = deadline_s
        self._region = aws.region(os.environ)
        aws.credential_provider(os.environ)  # refuses a profile that cannot be read here
        found = tuple(endpoints) or ((named,) if (named := aws.endpoint(os.environ)) else ())
        self._endpoints = [_Endpoint(name) for name in found or ("",)]
        self._retries = Retries()
        self._heads = asyncio.Semaphore(HEADS_AT_ONCE)
        self._create_only = True

    async def open(self) -> None:
        """Request an object, which need not exist, to verify bucket, credentials and region."""
        for endpoint in self._endpoints:
            endpoint.store = self._connect(endpoint.url)
        await self.probe(Lane.READ)

    async def still_open(self) -> bool:
        """Return True: requests report the loss of a bucket."""
        return True

    async def close(self, deadline_s: float) -> None:
        """Drop the connections."""
        await self._threads.close(deadline_s)
        for endpoint in self._endpoints:
            endpoint.store = None

    async def read(self, shard: StoredShard, into: memoryview) -> Checksum:
        """Get an object, copy each piece to its place, and verify the whole."""
        name = blob_name(shard)

        async def get(store: S3Store) -> Checksum:
            began = time.perf_counter()
            found = await obstore.get_async(store, name)
            size: int = found.meta["size"]
            require_size(size, shard, name)
            head = memoryview(bytearray(HEADER_BYTES))
            at = 0
            async for piece in found.stream(min_chunk_size=_PIECE_BYTES):
                at = _place(memoryview(piece), at, head, into)
            if at != size:
                raise DamagedShardError(f"{name}: {at} bytes arrived", str(at).encode())
            self.codec.moved(Lane.READ, shard.namespace, size, time.perf_counter() - began)
            return await self._threads.unpack(head, into, size, shard, name)

        return await self._ask(get)

    async def write(self, shard: StoredShard, payload: memoryview, checksum: Checksum) -> int:
        """Put an object unless it is present; replace one of an impossible size.

        If the server can refuse to overwrite, no lookup precedes the put: the shard was absent
        in a recent lookup, and another lookup cost a quarter of the throughput.
        """
        name = blob_name(shard)
        body = await self._threads.pack(shard, payload, checksum)  # a copy: stays unchanged
        began = time.perf_counter()
        if self._create_only:
            try:
                await self._ask(lambda store: _put(store, name, body, create=True))
            except AlreadyExistsError:
                pass
            except NotSupportedError:
                self._create_only = False
            else:
                return self._put_in(shard, len(body), time.perf_counter() - began)
        if await self._is_there(shard):
            return 0
        await self._ask(lambda store: _put(store, name, body, create=False))
        return self._put_in(shard, len(body), time.perf_counter() - began)

    async def contains(self, shards: Sequence[StoredShard]) -> Sequence[bool]:
        """Request all HEADs, many concurrently."""
        return await _together([self._is_there(shard) for shard in shards])

    async def remove(self, names: Sequence[str]) -> None:
        """Delete a thousand objects a request."""
        if names:
            await self._ask(lambda store: obstore.delete_async(store, list(names)))

    async def load_manifest(self, folder: str) -> bytes | None:
        """Get a manifest."""

        async def get(store: S3Store) -> bytes | None:
            found = await obstore.get_async(store, manifest_name(folder))
            if found.meta["size"] > MOST_BYTES:
                return b""  # too long for a manifest
            return bytes(await found.bytes_async())

        try:
            return await self._ask(get)
        except TierMissError:
            return None

    async def save_manifest(self, folder: str, content: bytes) -> None:
        """Put a manifest; an existing one is replaced."""
        name = manifest_name(folder)
        await self._ask(lambda store: _put(store, name, content, create=False))

    async def folders(self) -> Sequence[str]:
        """List the common prefixes."""
        found = await self._ask(obstore.list_with_delimiter_async)
        names = (prefix.rstrip("/") for prefix in found["common_prefixes"])
        return sorted(name for name in names if FOLDER.fullmatch(name))

    async def list_blobs(self, folder: str) -> AsyncIterator[Sequence[Blob]]:
        """List a folder, a thousand objects a request."""

        async def begin(store: S3Store) -> Any:  # obstore's stream type does not exist at run time
            return obstore.list(store, prefix=folder, chunk_size=1000)

        listing = aiter(await self._ask(begin))

        async def following(_: S3Store) -> Any:
            return await anext(listing, None)

        # No retry: after a failure the stream would end as if the listing were complete.
        while (page := await self._ask_once(following)) is not None:
            manifest = manifest_name(folder)
            yield [
                Blob(one["path"], one["size"], one["last_modified"].timestamp())
                for one in page
                if one["path"] != manifest
            ]

    async def now(self) -> float:
        """Put an object and return its modification time."""

        async def put_and_ask(store: S3Store) -> float:
            await _put(store, PROBE, _PROBE_TEXT, create=False)
            return (await obstore.head_async(store, PROBE))["last_modified"].timestamp()

        return await self._ask(put_and_ask)

    async def probe(self, lane: Lane) -> None:
        """Get or put an object of a few bytes."""
        if lane is Lane.WRITE:
            await self._ask(lambda store: _put(store, PROBE, _PROBE_TEXT, create=False))
            return
        with contextlib.suppress(TierMissError):
            await self._ask(lambda store: obstore.get_async(store, PROBE))

    def queued(self, lane: Lane) -> int:
        """Return 0: `RemoteStore` has the queue."""
        del lane
        return 0

    def longest_running_s(self) -> float:
        """Return 0: every call ends by its deadline."""
        return 0.0

    async def _is_there(self, shard: StoredShard) -> bool:
        async with self._heads:
            try:
                name = blob_name(shard)
                found = await self._ask(lambda store: obstore.head_async(store, name))
            except TierMissError:
                return False
        return may_hold(found["size"], shard.payload_bytes)

    def _put_in(self, shard: StoredShard, size: int, seconds: float) -> int:
        """Record the duration of a put of `size` bytes; return that size."""
        self.codec.moved(Lane.WRITE, shard.namespace, size, seconds)
        return size

    async def _ask(self, work: Callable[[S3Store], Awaitable[T]]) -> T:
        """Send a request, with retries. Raises the error that `_explain` returns."""
        return await self._retries.run(lambda: self._ask_once(work))

    async def _ask_once(self, work: Callable[[S3Store], Awaitable[T]]) -> T:
        endpoint = self._next_endpoint()
        if endpoint.store is None:
            raise PassingError(f"{self.title} is not open")
        try:
            return await work(endpoint.store)
        except FileNotFoundError as error:
            if error_code(error) not in {"", "NoSuchKey"}:
                raise self._explain(error, endpoint) from None
            raise TierMissError("the object does not exist") from None
        except (AlreadyExistsError, NotSupportedError):
            raise
        except BaseError as error:
            if error_status(error) == _NOT_IMPLEMENTED:
                raise NotSupportedError(error_code(error)) from None
            raise self._explain(error, endpoint) from None

    def _explain(self, error: Exception, endpoint: "_Endpoint") -> Exception:
        what = f"bucket {self._bucket} at {endpoint.shown}"
        meant = explain(error, what, places=aws.places(os.environ), region=self._region)
        if isinstance(meant, PassingError):
            endpoint.avoid_until = time.monotonic() + _AVOID_S
        return meant

    def _next_endpoint(self) -> "_Endpoint":
        """Return the next endpoint that did not fail recently, or the next one if all did."""
        now = time.monotonic()
        best = next((one for one in self._endpoints if one.avoid_until < now), self._endpoints[0])
        self._endpoints.remove(best)
        self._endpoints.append(best)
        return best

    def _connect(self, url: str) -> S3Store:
        config: dict[str, Any] = {"region": self._region} if self._region else {}
        if url:
            config |= {"endpoint": url, "virtual_hosted_style_request": False}
        provider = aws.credential_provider(os.environ)
        if provider is not None:
            config["credential_provider"] = provider
        return S3Store(
            self._bucket,
            prefix=self._prefix or None,
            client_options={
                "allow_http": url.startswith("http://"),
                "timeout": timedelta(seconds=self._deadline_s),
                "connect_timeout": timedelta(seconds=min(_CONNECT_S, self._deadline_s)),
            },
            retry_config={"max_retries": 0},  # `Retries` retries, within its budget
            **config,
        )


class _Endpoint:
    """Endpoint of the store. `shown` is its URL for messages, without credentials."""

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            parts = split_url(url)
        except ValueError:
            parts = urlsplit("")
        if url and (parts.scheme not in {"http", "https"} or not parts.hostname):
            raise ConfigError(
                f"s3_endpoint_url: invalid (got {redacted(url)!r}); expected "
                f"http://host:port or https://host:port, or several of them separated by spaces"
            )
        self.shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}" if url else "AWS"
        self.store: S3Store | None = None
        self.avoid_until = 0.0


def _place(piece: memoryview, at: int, head: memoryview, into: memoryview) -> int:
    """Copy a piece at offset `at` of an object to its place; return the offset of its end."""
    end = at + len(piece)
    if at < HEADER_BYTES:
        first = piece[: HEADER_BYTES - at]
        head[at : at + len(first)] = first
        piece = piece[len(first) :]
        at += len(first)
    start = at - HEADER_BYTES
    if piece and start + len(piece) <= len(into):
        into[start : start + len(piece)] = piece
    return end


async def _put(store: S3Store, name: str, body: bytes, *, create: bool) -> None:
    mode: Literal["create", "overwrite"] = "create" if create else "overwrite"
    await obstore.put_async(store, name, body, mode=mode, use_multipart=False)


async def _together(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all; if one fails, cancel the others, await them, and raise its error."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
