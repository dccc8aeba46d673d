# SPDX-License-Identifier: Apache-2.0
"""What the API answers for one service, and its streams of snapshots."""

import asyncio
import contextlib
import hashlib
import logging
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final, TypeVar

import msgspec
from aiohttp import web

from kvhaven.catalog.ghosts import Reason
from kvhaven.errors import KVHavenError, ServiceUnavailableError
from kvhaven.gateway import models
from kvhaven.gateway.access import Access
from kvhaven.gateway.answers import answered, audit, hex_of, json_of, number, problem, switch
from kvhaven.gateway.engine_server import EngineServer
from kvhaven.gateway.history import History
from kvhaven.gateway.metrics import CONTENT_TYPE, Requests, text_of
from kvhaven.gateway.observer import Observer, Seen
from kvhaven.gateway.openapi import SELECTOR
from kvhaven.gateway.plugins import Plugins, PluginSettings
from kvhaven.gateway.reuse import ReuseCurve
from kvhaven.gateway.sorting import MOST_CURSOR, Order, WholeLists
from kvhaven.gateway.steering import Steering
from kvhaven.gateway.tenants import Tenants
from kvhaven.gateway.views import health_of, stats_of, tiers_of, tokens_in_memory
from kvhaven.protocol import MOST_ROWS, ListKind
from kvhaven.service.accounts import RequestRow
from kvhaven.service.jobs import JobRow
from kvhaven.service.pins import PinRow
from kvhaven.service.reuse import decoded
from kvhaven.service.runtime_settings import Config
from kvhaven.service.snapshot import EngineRow, NamespaceRow, TenantRow
from kvhaven.service.steering_messages import Age, Dropped, DropUnused, GetConfig
from kvhaven.types import KEY_BYTES, TENANT_BYTES, TenantId

T = TypeVar("T")
logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MOST_STREAMS: Final = 128
"""Streams of snapshots, half of the connections, so that the other paths stay reachable."""
_MOST_PAGES: Final = 10
"""Pages of a list that one answer collects."""
_MOST_CURSOR: Final = 256
"""Characters of a cursor that is an id."""
_FILTERS: Final = ("engine", "tenant", "reason")
_MOST_REQUEST_PAGES: Final = 11
"""Pages of the requests that are kept."""
_SKIPPED: Final = 10
"""A stream whose client did not take the last event is skipped so many times, then ended."""
_STREAM_BUFFER: Final = 64 << 10
"""Bytes that the transport, and the kernel, buffer for a stream; an event has about 4 KB."""
_STREAM_PAUSE_S: Final = 5.0
_NO_PLUGINS: Final = PluginSettings()


class Gateway:
    """HTTP API over one observer. It keeps no state that matters.

    `requests` counts those of all gateways of this process. `gateway.server` checks each request
    before its handler runs.
    """

    def __init__(
        self,
        observer: Observer,
        access: Access,
        requests: Requests,
        plugins: PluginSettings = _NO_PLUGINS,
    ) -> None:
        self._observer = observer
        self._access = access
        self._requests = requests
        server = EngineServer(plugins.engine_url)
        self._steering = steering = Steering(observer, self._all, server)
        self._plugins = Plugins(observer, plugins, steering.keys_of, steering.engines, server)
        self._namespaces: tuple[str, list[NamespaceRow]] = ("", [])
        self._history = History()
        self._tenants = Tenants(observer)
        self._whole = WholeLists(observer)
        self._reuse, self._reuse_of = ReuseCurve(), ""
        observer.listeners.append(self._on_snapshot)

    def handler(self, name: str) -> Handler:
        """Return the handler of a route."""
        own: Handler | None = getattr(self, f"_on_{name}", None)
        return own or getattr(self._steering, name)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Observe the service within a context."""
        observing = asyncio.create_task(self._observer.run())
        tenants = asyncio.create_task(self._tenants.run())
        plugins = asyncio.create_task(self._plugins.run())
        for task in (plugins, tenants):
            task.add_done_callback(log_failure)
        try:
            yield
        finally:
            for task in (plugins, tenants, observing):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    # --- health -----------------------------------------------------------------------------

    async def _on_health(self, request: web.Request) -> web.Response:
        health, answers = health_of(self._observer)
        ready = answers and health.status != "stopping"
        return json_of(self._visible(health, request), 200 if ready else 503)

    async def _on_readyz(self, request: web.Request) -> web.Response:
        return await self._on_health(request)

    async def _on_livez(self, request: web.Request) -> web.Response:
        health, answers = health_of(self._observer)
        return json_of(self._visible(health, request), 200 if answers else 503)

    def _visible(self, health: models.Health, request: web.Request) -> models.Health:
        """Return the part of the health that a client may see."""
        if self._access.may_read(request.headers.get("Authorization", "")):
            return health
        return models.Health(health.status, [])

    # --- statistics -------------------------------------------------------------------------

    async def _on_stats(self, _: web.Request) -> web.Response:
        seen = self._seen()
        rows = await self._namespaces_at(seen)
        whole = len(rows) < _MOST_PAGES * MOST_ROWS
        tokens = tokens_in_memory(rows, seen.snapshot.catalog.tails) if whole else None
        return json_of(stats_of(seen.snapshot, tokens, self._reuse.curve(time.time())))

    async def _on_metrics(self, _: web.Request) -> web.Response:
        seen = self._seen()
        rows = await self._namespaces_at(seen)
        text = text_of(
            seen.snapshot,
            rows[:MOST_ROWS],
            self._requests,
            self._reuse.curve(time.time()),
            self._tenants.largest(),
            list(self._plugins.samples()),
        )
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})

    async def _namespaces_at(self, seen: Seen) -> list[NamespaceRow]:
        """Return the namespaces, requested once for each snapshot, however often clients ask."""
        if self._namespaces[0] != seen.id:
            self._namespaces = seen.id, await self._all("namespaces", NamespaceRow)
        return self._namespaces[1]

    async def _on_history(self, _: web.Request) -> web.Response:
        return json_of(self._history.recent(self._seen().snapshot, time.time()))

    def _on_snapshot(self, seen: Seen) -> None:
        now = time.time()
        self._history.note(seen.snapshot, now)
        try:
            requests = list(decoded(seen.sample))
        except ValueError as error:
            logger.warning("api: the sample of requests is malformed: %s", error)
            return
        if seen.snapshot.service != self._reuse_of:
            self._reuse, self._reuse_of = ReuseCurve(), seen.snapshot.service
        self._reuse.note(seen.snapshot.catalog.capacity_bytes, requests, now)

    async def _on_curve(self, _: web.Request) -> web.Response:
        self._seen()
        return json_of(self._reuse.curve(time.time()))

    async def _on_inference_info(self, _: web.Request) -> web.Response:
        return json_of(models.InferenceInfo(await self._all("engines", EngineRow)))

    async def _on_config(self, request: web.Request) -> web.Response:
        answer = answered(await self._observer.steer(GetConfig()))
        assert isinstance(answer.body, bytes)
        version = msgspec.json.decode(answer.body, type=Config).version
        tag = f"{version}-{hashlib.sha256(answer.body).hexdigest()[:16]}"
        if any(known.value in {tag, "*"} for known in request.if_none_match or ()):
            answer = web.Response(status=304)
        answer.etag = tag
        return answer

    # --- lists ------------------------------------------------------------------------------

    async def _on_engines(self, request: web.Request) -> web.Response:
        return await self._page(request, "engines", EngineRow)

    async def _on_namespaces(self, request: web.Request) -> web.Response:
        return await self._page(request, "namespaces", NamespaceRow)

    async def _on_tenants(self, request: web.Request) -> web.Response:
        return await self._page(request, "tenants", TenantRow)

    async def _on_jobs(self, request: web.Request) -> web.Response:
        return await self._page(request, "jobs", JobRow)

    async def _on_pins(self, request: web.Request) -> web.Response:
        return await self._page(request, "pins", PinRow)

    async def _on_requests(self, request: web.Request) -> web.Response:
        given = {name: request.query[name] for name in _FILTERS if name in request.query}
        if not given:
            newest, more = await self._observer.rows("requests", *_page_of(request))
            return json_of({"rows": newest, "next": more or None})
        if given.get("reason", Reason.COLD.label) not in {reason.label for reason in Reason}:
            raise KVHavenError(
                f"reason: unknown (got {given['reason'][:64]!r}); expected one of "
                f"{', '.join(reason.label for reason in Reason)}"
            )
        cursor, limit = _page_of(request)
        found: list[RequestRow] = []
        for _ in range(_MOST_REQUEST_PAGES):
            raw, cursor = await self._observer.rows("requests", cursor)
            rows = msgspec.json.decode(raw, type=list[RequestRow])
            found += [row for row in rows if _matches(row, given)]
            if not cursor or len(found) > limit:
                break
        if len(found) > limit:
            found, cursor = found[:limit], found[limit - 1].id
        return json_of(models.Requests(found, cursor or None))

    async def _on_tiers(self, request: web.Request) -> web.Response:
        cursor, limit = _page_of(request)
        rows = tiers_of(self._seen().snapshot)
        if "sort" in request.query:
            order = Order(models.TierRow, request.query["sort"], cursor)
            return json_of(models.Tiers(*order.page(rows, limit)))
        rows = [row for row in rows if row.id > cursor]
        more = len(rows) > limit
        return json_of(models.Tiers(rows[:limit], rows[limit - 1].id if more else None))

    async def _on_plugins(self, request: web.Request) -> web.Response:
        cursor, limit = _page_of(request)
        rows = [row for row in self._plugins.rows() if row.id > cursor]
        more = len(rows) > limit
        return json_of(models.Plugins(rows[:limit], rows[limit - 1].id if more else None))

    async def _page(
        self,
        request: web.Request,
        kind: ListKind,
        row: type[Any],  # Any struct with an id
    ) -> web.Response:
        """Return a page, by default in the order of the ids, which the service itself keeps."""
        cursor, limit = _page_of(request)
        if "sort" in request.query:
            order = Order(row, request.query["sort"], cursor)
            found, following = order.page(await self._whole.rows(kind, row), limit)
            return json_of({"rows": found, "next": following})
        raw, more = await self._observer.rows(kind, cursor, limit)
        return json_of({"rows": raw, "next": more or None})

    async def _all(self, kind: ListKind, row: type[T]) -> list[T]:
        """Return all rows of a list, at most those of `_MOST_PAGES` pages."""
        found: list[T] = []
        cursor = ""
        for _ in range(_MOST_PAGES):
            raw, cursor = await self._observer.rows(kind, cursor)
            found += msgspec.json.decode(raw, type=list[row])  # type: ignore[valid-type]
            if not cursor:
                break
        return found

    def _seen(self) -> Seen:
        """Return the last snapshot. Raises `ServiceUnavailableError` if the service is silent."""
        health, answers = health_of(self._observer)
        seen = self._observer.seen
        if seen is None or not answers:
            raise ServiceUnavailableError(health.checks[0].detail)
        return seen

    # --- changes ----------------------------------------------------------------------------

    async def _on_drop_chunks(self, request: web.Request) -> web.Response:
        given = request.query
        unknown = given.keys() - {str(parameter["name"]) for parameter in SELECTOR}
        if unknown:
            raise KVHavenError(f"unknown parameter {min(unknown)[:32]!r}; nothing was dropped")
        everything, dry_run = switch(given, "all"), switch(given, "dry_run")
        named = [name for name in ("namespace", "tenant", "tier") if name in given]
        if everything == bool(named):
            raise KVHavenError("expected namespace, tenant or tier, or else all=true")
        namespace = (
            hex_of(given["namespace"], "namespace", KEY_BYTES) if "namespace" in given else b""
        )
        tenant = TenantId(
            hex_of(given["tenant"], "tenant", TENANT_BYTES) if "tenant" in given else b""
        )
        tier = given.get("tier", "")
        local = {row.id for row in tiers_of(self._seen().snapshot) if not row.shared} | {"memory"}
        if "tier" in given and tier not in local:
            raise KVHavenError(
                f"tier: not memory or a local tier (got {tier[:64]!r}); expected one of "
                f"{', '.join(sorted(local))}. `kvhaven clear` clears shared tiers"
            )
        if "older_than_s" in given:
            age = number(given, "older_than_s", Age)
            unused = DropUnused(
                older_than_s=age, namespace=namespace, tier=tier, tenant=tenant, dry_run=dry_run
            )
            answer = await self._observer.steer(unused)
            if not dry_run:
                audit(request, f"status {answer.status}")
            return answered(answer)
        cleared = await self._observer.clear(namespace, tier, tenant, dry_run=dry_run)
        if not dry_run:
            audit(request, f"dropped {cleared.chunks} chunks, {cleared.bytes} bytes")
            await self._observer.refresh()
        return json_of(Dropped(cleared.chunks, cleared.bytes, dry_run))

    # --- streams ----------------------------------------------------------------------------

    async def _on_events(self, request: web.Request) -> web.StreamResponse:
        """Send each new snapshot. A client that does not read gets no buffer, and is dropped."""
        if self._requests.streams >= MOST_STREAMS:
            answer = problem(503, f"events: there are {MOST_STREAMS} streams already")
            answer.headers["Retry-After"] = "5"
            answer.force_close()
            return answer
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        transport = request.transport
        self._requests.streams += 1
        try:
            if isinstance(transport, asyncio.Transport):
                _bound(transport)
                await stream.prepare(request)
                await self._send_events(stream, transport, request.headers.get("Last-Event-ID", ""))
        except ConnectionError:
            pass  # the client went away
        finally:
            self._requests.streams -= 1
        return stream

    async def _send_events(
        self, stream: web.StreamResponse, transport: asyncio.Transport, last: str
    ) -> None:
        skipped = 0
        while not transport.is_closing():
            try:
                async with asyncio.timeout(_STREAM_PAUSE_S):
                    seen = await self._observer.newer(last)
                last = seen.id
                event = b"id: %s\nevent: snapshot\ndata: %s\n\n" % (last.encode(), seen.raw)
            except TimeoutError:
                event = b": the service is silent\n\n"
            if not transport.get_write_buffer_size():
                skipped = 0
                await stream.write(event)  # it fits into the buffer, so this does not wait
            elif skipped < _SKIPPED:
                skipped += 1
            else:
                logger.info("api: ended a stream of a client that does not read")
                _reset(transport)


def log_failure(task: asyncio.Task[None]) -> None:
    """Log the exception with which a task ended."""
    if not task.cancelled() and task.exception() is not None:
        logger.error("api: a task failed", exc_info=task.exception())


def _bound(transport: asyncio.Transport) -> None:
    """Limit what the kernel and the transport buffer for a client that does not read."""
    transport.set_write_buffer_limits(high=_STREAM_BUFFER)
    sock: socket.socket | None = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _STREAM_BUFFER)


def _reset(transport: asyncio.Transport) -> None:
    """Close a connection, and let the kernel drop the bytes that the client did not read."""
    sock: socket.socket | None = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


def _matches(row: RequestRow, given: Mapping[str, str]) -> bool:
    """Return whether a request is one of those that a client asks for."""
    return (
        given.get("engine", row.engine) == row.engine
        and given.get("tenant", row.tenant) == row.tenant
        and ("reason" not in given or given["reason"] in row.missed)
    )


def _page_of(request: web.Request) -> tuple[str, int]:
    """Return cursor and limit of a request. Raises `KVHavenError` if one is not valid."""
    text, cursor = request.query.get("limit", str(MOST_ROWS)), request.query.get("cursor", "")
    limit = int(text) if text.isascii() and text.isdigit() and len(text) < 4 else 0  # noqa: PLR2004
    if not 1 <= limit <= MOST_ROWS:
        raise KVHavenError(f"limit: out of range (got {text[:32]!r}); expected 1 to {MOST_ROWS}")
    most = MOST_CURSOR if "sort" in request.query else _MOST_CURSOR
    if len(cursor) > most:
        raise KVHavenError(f"cursor: too long; expected at most {most} characters")
    return cursor, limit
