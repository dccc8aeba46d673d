# SPDX-License-Identifier: Apache-2.0
"""HTTP server of the API: routes, checks of every request, and streams of snapshots."""

import asyncio
import contextlib
import hashlib
import logging
import re
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, TypeVar

import msgspec
from aiohttp import web

from kvhaven.errors import KVHavenError, ServiceUnavailableError
from kvhaven.gateway import models
from kvhaven.gateway.access import Access
from kvhaven.gateway.answers import answered, audit, body_of, json_of, problem, switch
from kvhaven.gateway.guard import Guard
from kvhaven.gateway.history import History
from kvhaven.gateway.metrics import CONTENT_TYPE, Requests, text_of
from kvhaven.gateway.observer import Observer, Seen
from kvhaven.gateway.openapi import SELECTOR, document
from kvhaven.gateway.page import FILES, Page
from kvhaven.gateway.plugins import Plugins, PluginSettings
from kvhaven.gateway.reuse import ReuseCurve
from kvhaven.gateway.routes import ROUTES
from kvhaven.gateway.steering import Steering
from kvhaven.gateway.tenants import Tenants
from kvhaven.gateway.views import health_of, stats_of, tiers_of, tokens_in_memory
from kvhaven.protocol import MOST_ROWS, NO_LIMIT, ListKind
from kvhaven.service.reuse import decoded
from kvhaven.service.runtime_settings import Config
from kvhaven.service.snapshot import EngineRow, NamespaceRow
from kvhaven.service.steering import GetConfig
from kvhaven.types import KEY_BYTES, TENANT_BYTES, TenantId

T = TypeVar("T")
logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MOST_BODY: Final = 1 << 20
MOST_STREAMS: Final = 128
"""Streams of snapshots, half of the connections, so that the other paths stay reachable."""
_MOST_PAGES: Final = 10
"""Pages of a list that one answer collects."""
_MOST_CURSOR: Final = 256
_SKIPPED: Final = 10
"""A stream whose client did not take the last event is skipped so many times, then ended."""
_STREAM_BUFFER: Final = 64 << 10
"""Bytes that the transport, and the kernel, buffer for a stream; an event has about 4 KB."""
_STREAM_PAUSE_S: Final = 5.0
_NO_CONTENT_OF_OTHERS: Final = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_OPEN_PATHS: Final = frozenset({"/livez", "/readyz", *FILES})
"""Paths that never need the token. Orchestrators have none; without it, they are not shown the
checks. Browsers send none with a page, and the files of the dashboard have no data."""
_NO_PLUGINS: Final = PluginSettings()
_SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})


class Gateway:
    """HTTP API over one observer. It keeps no state that matters.

    Every request is checked before its handler runs: its `Host`, its length, and beyond loopback
    its token. Answers carry no CORS headers, so pages of other sites cannot read them.
    """

    def __init__(
        self,
        observer: Observer,
        access: Access,
        guard: Guard,
        plugins: PluginSettings = _NO_PLUGINS,
    ) -> None:
        self._observer = observer
        self._access = access
        self._guard = guard
        self._requests = Requests()
        self._streams = 0
        self._document = document(ROUTES)
        self._steering = Steering(observer, self._all)
        self._plugins = Plugins(observer, plugins, self._steering.keys_of)
        self._namespaces: tuple[str, list[NamespaceRow]] = ("", [])
        self._page_files = Page()
        self._history = History()
        self._tenants = Tenants(observer)
        self._reuse, self._reuse_of = ReuseCurve(), ""
        observer.listeners.append(self._on_snapshot)

    def app(self) -> web.Application:
        """Return the application; it observes the service while it runs."""
        app = web.Application(client_max_size=MOST_BODY, middlewares=[self._checked])
        for route in ROUTES:
            own = getattr(self, f"_on_{route.handler}", None)
            handler = own or getattr(self._steering, route.handler)
            app.router.add_route(route.method.upper(), route.path, handler)
        app.on_response_prepare.append(_add_headers)
        app.cleanup_ctx.append(self._running)
        return app

    async def _running(self, _: web.Application) -> AsyncIterator[None]:
        observing = asyncio.create_task(self._observer.run())
        tenants = asyncio.create_task(self._tenants.run())
        plugins = asyncio.create_task(self._plugins.run())
        for task in (plugins, tenants):
            task.add_done_callback(_log_failure)
        yield
        for task in (plugins, tenants, observing):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    # --- every request ----------------------------------------------------------------------

    @web.middleware
    async def _checked(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        transport = request.transport
        self._guard.began(transport)
        try:
            answer = self._refusal(request) or await self._answer(request, handler)
        finally:
            self._guard.ended(transport)
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else "other"
        self._requests.count(route, answer.status)
        return answer

    def _refusal(self, request: web.Request) -> web.Response | None:
        """Return why a request is refused; None if it is not."""
        hosts = request.headers.getall("Host", [])
        if len(hosts) != 1:
            return problem(400, f"Host: {len(hosts)} headers; expected one")
        if not self._access.knows_host(hosts[0]):
            return problem(
                421,
                "Host: this name is not one of the API's; use an IP address or localhost, or add "
                "the name to api_hosts",
            )
        if (request.content_length or 0) > MOST_BODY:
            return problem(413, f"body: too long; expected at most {MOST_BODY} bytes")
        if not self._is_admitted(request) and request.path not in _OPEN_PATHS:
            return _unauthorized()
        return None if request.method in _SAFE else self._refusal_of_change(request)

    def _refusal_of_change(self, request: web.Request) -> web.Response | None:
        if not self._access.allows_changes:
            return problem(403, "nothing can be changed here: api_token_file is not set")
        if not self._access.may_change(request.headers.get("Authorization", "")):
            return _unauthorized()
        audit(request, "begins")  # its client may leave before there is a result
        return None

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPException as error:
            answer = problem(error.status, error.reason)
            if "Allow" in error.headers:
                answer.headers["Allow"] = error.headers["Allow"]
            return answer
        except ServiceUnavailableError as error:
            return problem(503, str(error))
        except KVHavenError as error:
            return problem(400, str(error))
        except ConnectionError:
            raise  # the client went away
        except Exception:  # a bug must not show its details to clients
            logger.exception("api: %s %s failed", request.method, request.path)
            return problem(500, "internal error; the log of the API has the details")

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
        if self._is_admitted(request):
            return health
        return models.Health(health.status, [])

    def _is_admitted(self, request: web.Request) -> bool:
        """Return whether a request may read everything."""
        authorization = request.headers.get("Authorization", "")
        return not self._access.remote or self._access.admits(authorization)

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

    async def _on_page(self, request: web.Request) -> web.StreamResponse:
        return await self._page_files.answer(request)

    _on_page_style = _on_page_program = _on_page

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

    async def _on_openapi(self, _: web.Request) -> web.Response:
        return web.Response(body=self._document, content_type="application/json")

    # --- lists ------------------------------------------------------------------------------

    async def _on_engines(self, request: web.Request) -> web.Response:
        return await self._page(request, "engines")

    async def _on_namespaces(self, request: web.Request) -> web.Response:
        return await self._page(request, "namespaces")

    async def _on_tenants(self, request: web.Request) -> web.Response:
        return await self._page(request, "tenants")

    async def _on_jobs(self, request: web.Request) -> web.Response:
        return await self._page(request, "jobs")

    async def _on_pins(self, request: web.Request) -> web.Response:
        return await self._page(request, "pins")

    async def _on_requests(self, request: web.Request) -> web.Response:
        return await self._page(request, "requests")

    async def _on_tiers(self, request: web.Request) -> web.Response:
        cursor, limit = _page_of(request)
        rows = [row for row in tiers_of(self._seen().snapshot) if row.id > cursor]
        more = len(rows) > limit
        return json_of(models.Tiers(rows[:limit], rows[limit - 1].id if more else None))

    async def _on_plugins(self, request: web.Request) -> web.Response:
        cursor, limit = _page_of(request)
        rows = [row for row in self._plugins.rows() if row.id > cursor]
        more = len(rows) > limit
        return json_of(models.Plugins(rows[:limit], rows[limit - 1].id if more else None))

    async def _page(self, request: web.Request, kind: ListKind) -> web.Response:
        rows, more = await self._observer.rows(kind, *_page_of(request))
        return json_of({"rows": rows, "next": more or None})

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

    async def _on_set_quota(self, request: web.Request) -> web.Response:
        tenant = TenantId(_hex(request.match_info["id"], "id", TENANT_BYTES))
        wanted = await body_of(request, models.NewQuota)
        limited = await self._observer.limit(tenant, _quota(wanted.memory), _quota(wanted.disk))
        audit(request, f"quotas of memory {limited.memory}, disk {limited.disk} bytes")
        return json_of(
            models.TenantQuota(
                tenant.hex(),
                limited.memory,
                limited.disk,
                limited.memory_bytes,
                limited.disk_bytes,
            )
        )

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
            _hex(given["namespace"], "namespace", KEY_BYTES) if "namespace" in given else b""
        )
        tenant = TenantId(
            _hex(given["tenant"], "tenant", TENANT_BYTES) if "tenant" in given else b""
        )
        tier = given.get("tier", "")
        local = {row.id for row in tiers_of(self._seen().snapshot) if not row.shared} | {"memory"}
        if "tier" in given and tier not in local:
            raise KVHavenError(
                f"tier: not memory or a local tier (got {tier[:64]!r}); expected one of "
                f"{', '.join(sorted(local))}. `kvhaven clear` clears shared tiers"
            )
        cleared = await self._observer.clear(namespace, tier, tenant, dry_run=dry_run)
        if not dry_run:
            audit(request, f"dropped {cleared.chunks} chunks, {cleared.bytes} bytes")
        return json_of(models.Dropped(cleared.chunks, cleared.bytes, dry_run))

    # --- streams ----------------------------------------------------------------------------

    async def _on_events(self, request: web.Request) -> web.StreamResponse:
        """Send each new snapshot. A client that does not read gets no buffer, and is dropped."""
        if self._streams >= MOST_STREAMS:
            answer = problem(503, f"events: there are {MOST_STREAMS} streams already")
            answer.headers["Retry-After"] = "5"
            answer.force_close()
            return answer
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        transport = request.transport
        self._streams += 1
        try:
            if isinstance(transport, asyncio.Transport):
                _bound(transport)
                await stream.prepare(request)
                await self._send_events(stream, transport, request.headers.get("Last-Event-ID", ""))
        except ConnectionError:
            pass  # the client went away
        finally:
            self._streams -= 1
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


def _log_failure(task: asyncio.Task[None]) -> None:
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


async def _add_headers(_: web.Request, answer: web.StreamResponse) -> None:
    for name, value in _NO_CONTENT_OF_OTHERS.items():
        answer.headers.setdefault(name, value)
    if "ETag" in answer.headers:
        answer.headers["Cache-Control"] = "no-cache"
    answer.headers.pop("Server", None)


def _page_of(request: web.Request) -> tuple[str, int]:
    """Return cursor and limit of a request. Raises `KVHavenError` if one is not valid."""
    text, cursor = request.query.get("limit", str(MOST_ROWS)), request.query.get("cursor", "")
    limit = int(text) if text.isascii() and text.isdigit() and len(text) < 4 else 0  # noqa: PLR2004
    if not 1 <= limit <= MOST_ROWS:
        raise KVHavenError(f"limit: out of range (got {text[:32]!r}); expected 1 to {MOST_ROWS}")
    if len(cursor) > _MOST_CURSOR:
        raise KVHavenError(f"cursor: too long; expected at most {_MOST_CURSOR} characters")
    return cursor, limit


def _hex(text: str, name: str, length: int) -> bytes:
    """Return the bytes of an id. Raises `KVHavenError` if it is malformed."""
    if not re.fullmatch(rf"[0-9a-f]{{{2 * length}}}", text):
        raise KVHavenError(
            f"{name}: malformed (got {text[:64]!r}); expected {2 * length} hex digits"
        )
    return bytes.fromhex(text)


def _quota(wanted: int | msgspec.UnsetType | None) -> int | None:
    """Return a quota as the service expects it."""
    if wanted is msgspec.UNSET:
        return None
    return NO_LIMIT if wanted is None else wanted


def _unauthorized() -> web.Response:
    answer = problem(401, "Authorization: expected Bearer and the token of the API")
    answer.headers["WWW-Authenticate"] = "Bearer"
    return answer
