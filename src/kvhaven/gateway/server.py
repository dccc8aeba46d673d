# SPDX-License-Identifier: Apache-2.0
"""HTTP server of the API: the routes of every service, and the checks of every request."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Final

from aiohttp import web

from kvhaven.errors import KVHavenError, ServiceUnavailableError
from kvhaven.gateway import models
from kvhaven.gateway.access import Access
from kvhaven.gateway.answers import audit, json_of, problem
from kvhaven.gateway.app import Gateway, Handler, log_failure
from kvhaven.gateway.metrics import Requests
from kvhaven.gateway.observer import Observer
from kvhaven.gateway.openapi import document
from kvhaven.gateway.page import FILES, Page
from kvhaven.gateway.plugins import PluginSettings
from kvhaven.gateway.routes import METRICS, ROUTES
from kvhaven.gateway.services import PREFIX, Services
from kvhaven.http_server import Guard

logger = logging.getLogger(__name__)

MOST_BODY: Final = 1 << 20
_OTHERS: Final = PREFIX + "/{service}"
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
_SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_NO_PLUGINS: Final = PluginSettings()


class Server:
    """The API of a node: all routes for the service of `observer`, and below `/services/NAME`.

    Every request is checked before its handler runs: its `Host`, its length, and beyond loopback
    its token. Answers carry no CORS headers, so pages of other sites cannot read them. Plugins
    belong to the first service.
    """

    def __init__(
        self,
        observer: Observer,
        access: Access,
        guard: Guard,
        plugins: PluginSettings = _NO_PLUGINS,
    ) -> None:
        self._access = access
        self._guard = guard
        self._requests = Requests()
        self._document = document(ROUTES)
        self._page = Page()

        self._services = Services(
            Gateway(observer, access, self._requests, plugins),
            observer,
            lambda neighbour: Gateway(neighbour, access, self._requests),
        )

    def app(self) -> web.Application:
        """Return the application; it observes the services while it runs."""
        app = web.Application(client_max_size=MOST_BODY, middlewares=[self._checked])
        for route in ROUTES:
            for prefix in ("", _OTHERS):
                app.router.add_route(
                    route.method.upper(), prefix + route.path, self._handler(route.handler)
                )
        app.on_response_prepare.append(_add_headers)
        app.cleanup_ctx.append(self._running)
        return app

    async def _running(self, _: web.Application) -> AsyncIterator[None]:
        observing = asyncio.create_task(self._services.run())
        observing.add_done_callback(log_failure)
        yield
        observing.cancel()
        await asyncio.wait([observing])

    def _handler(self, name: str) -> Handler:
        common: Handler | None = getattr(self, f"_on_{name}", None)

        async def handle(request: web.Request) -> web.StreamResponse:
            gateway = self._gateway_of(request)
            if gateway is None:
                return problem(404, "no such service; /v1/services lists those that are running")
            return await (common or gateway.handler(name))(request)

        return handle

    def _gateway_of(self, request: web.Request) -> Gateway | None:
        name = request.match_info.get("service")
        return self._services.first if name is None else self._services.named(name)

    # --- every request ----------------------------------------------------------------------

    @web.middleware
    async def _checked(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        transport = request.transport
        self._guard.began(transport)
        try:
            answer = self._refusal(request) or await self._answer(request, handler)
        finally:
            self._guard.ended(transport)
        self._requests.count(_path_of(request), answer.status)
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
        path, authorization = _path_of(request), request.headers.get("Authorization", "")
        may_read = self._access.may_read if path != METRICS else self._access.may_read_metrics
        if not may_read(authorization) and path not in _OPEN_PATHS:
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

    # --- the same for every service ---------------------------------------------------------

    async def _on_page(self, request: web.Request) -> web.StreamResponse:
        return await self._page.answer(request, _path_of(request))

    _on_page_style = _on_page_program = _on_page

    async def _on_openapi(self, _: web.Request) -> web.Response:
        return web.Response(body=self._document, content_type="application/json")

    async def _on_services(self, request: web.Request) -> web.Response:
        gateway = self._gateway_of(request)
        assert gateway is not None, "checked"
        return json_of(models.Services(self._services.rows(gateway)))


def _path_of(request: web.Request) -> str:
    """Return the path of a request's route within a service, with names for what varies."""
    resource = request.match_info.route.resource
    return resource.canonical.removeprefix(_OTHERS) if resource is not None else "other"


async def _add_headers(_: web.Request, answer: web.StreamResponse) -> None:
    for name, value in _NO_CONTENT_OF_OTHERS.items():
        answer.headers.setdefault(name, value)
    if "ETag" in answer.headers:
        answer.headers["Cache-Control"] = "no-cache"
    answer.headers.pop("Server", None)


def _unauthorized() -> web.Response:
    answer = problem(401, "Authorization: expected Bearer and the token of the API")
    answer.headers["WWW-Authenticate"] = "Bearer"
    return answer
