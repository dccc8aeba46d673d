# SPDX-License-Identifier: Apache-2.0
"""OpenAPI 3.1 description of the HTTP API, from its routes and the types of its answers."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec

from kvhaven import __version__
from kvhaven.gateway.models import Problem

_SCHEMA: Final = "#/components/schemas/{name}"
_TEXT: Final = {"type": "string"}
_PAGE: Final = (
    {
        "name": "limit",
        "in": "query",
        "description": "Most rows of the page.",
        "schema": {"type": "integer", "minimum": 1, "maximum": 100, "default": 100},
    },
    {
        "name": "cursor",
        "in": "query",
        "description": "`next` of the previous page. It stays valid when rows come and go.",
        "schema": {"type": "string", "maxLength": 256},
    },
)


class Route(NamedTuple):
    """A path, the name of its handler, its statuses, and the type of its answers.

    `answer` is a struct for JSON, or a media type. `paged` adds the parameters of a page.
    """

    path: str
    handler: str
    summary: str
    answer: type[msgspec.Struct] | str
    statuses: Sequence[int]
    paged: bool = False


def document(routes: Sequence[Route]) -> bytes:
    """Return the description as JSON."""
    kinds = [route.answer for route in routes if not isinstance(route.answer, str)]
    _, components = msgspec.json.schema_components([*kinds, Problem], ref_template=_SCHEMA)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "KVHaven",
                "version": __version__,
                "summary": "HTTP API of a KVHaven node service.",
                "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            },
            "paths": {route.path: {"get": _operation(route)} for route in routes},
            "components": {
                "schemas": components,
                "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            },
            # The token is needed beyond loopback only.
            "security": [{}, {"token": []}],
        }
    )


def _operation(route: Route) -> dict[str, Any]:
    found: dict[str, Any] = {
        "operationId": route.handler,
        "summary": route.summary,
        "responses": {str(status): _response(route, status) for status in route.statuses},
    }
    if route.paged:
        found["parameters"] = list(_PAGE)
    return found


_MEANINGS: Final = {
    200: "The answer.",
    304: "Not modified since the ETag in If-None-Match.",
    400: "A parameter is not valid.",
    503: "The service is stopping or does not answer, or there are too many streams.",
}
_STATES: Final = {200, 503}


def _response(route: Route, status: int) -> dict[str, Any]:
    found: dict[str, Any] = {"description": _MEANINGS[status]}
    own = status == 200 or (status in _STATES and _shows_health(route))  # noqa: PLR2004  OK
    if status == 304:  # noqa: PLR2004  it has no body
        return found
    if own and isinstance(route.answer, str):
        found["content"] = {route.answer: {"schema": _TEXT}}
        return found
    kind = route.answer if own and not isinstance(route.answer, str) else Problem
    found["content"] = {
        "application/json": {"schema": {"$ref": _SCHEMA.format(name=kind.__name__)}}
    }
    return found


def _shows_health(route: Route) -> bool:
    """Return whether the answer is the same type while the service does not answer."""
    return not isinstance(route.answer, str) and route.answer.__name__ == "Health"
