# SPDX-License-Identifier: Apache-2.0
"""OpenAPI 3.1 description of the HTTP API, from its routes and the types of its answers."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from kvhaven import __version__
from kvhaven.catalog.ghosts import Reason
from kvhaven.gateway.models import Problem
from kvhaven.gateway.sorting import MOST_CURSOR, MOST_SORTED, columns
from kvhaven.service.steering_messages import MOST_AGE_S

_SCHEMA: Final = "#/components/schemas/{name}"
_TEXT: Final = {"type": "string"}
Parameter = Mapping[str, Any]

PAGE: Final[Sequence[Parameter]] = (
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

_SORTED_CURSOR: Final[Parameter] = {
    "name": "cursor",
    "in": "query",
    "description": "`next` of the previous page, with the same `sort`.",
    "schema": {"type": "string", "maxLength": MOST_CURSOR},
}


def sorted_page(row: type[msgspec.Struct]) -> Sequence[Parameter]:
    """Return the parameters of a list whose rows have this type."""
    allowed = list(columns(row))
    sort = {
        "name": "sort",
        "in": "query",
        "description": "Column to sort by, descending with - before it; by default, rows are in "
        "ascending order of their ids. `chunks` and `bytes` count all places together. Rows "
        f"without a value are last. Lists of more than {MOST_SORTED} rows are not sorted.",
        "schema": {"type": "string", "enum": [*allowed, *(f"-{name}" for name in allowed)]},
    }
    return (PAGE[0], _SORTED_CURSOR, sort)


TENANT: Final[Parameter] = {
    "name": "id",
    "in": "path",
    "required": True,
    "description": "A tenant's id, as `/v1/tenants` shows it.",
    "schema": {"type": "string", "pattern": "^[0-9a-f]{16}$"},
}
JOB: Final[Parameter] = {
    "name": "id",
    "in": "path",
    "required": True,
    "description": "An id of a job or of a pin.",
    "schema": {"type": "string", "pattern": "^[0-9]{16}$"},
}
CHUNK: Final[Parameter] = {
    "name": "id",
    "in": "path",
    "required": True,
    "description": "A chunk's id, as `/v1/lookup?chunks=true` tells it.",
    "schema": {"type": "string", "pattern": "^[0-9a-f]{16}$"},
}
REQUESTS: Final[Sequence[Parameter]] = (
    *PAGE,
    {
        "name": "engine",
        "in": "query",
        "description": "Only requests of this engine.",
        "schema": {"type": "string", "maxLength": 256},
    },
    {
        "name": "tenant",
        "in": "query",
        "description": "Only requests of this tenant; empty: of none.",
        "schema": {"type": "string", "pattern": "^([0-9a-f]{16})?$"},
    },
    {
        "name": "reason",
        "in": "query",
        "description": "Only requests with tokens that were missed for this reason.",
        "schema": {"type": "string", "enum": [reason.label for reason in Reason]},
    },
)
CHUNKS: Final[Parameter] = {
    "name": "chunks",
    "in": "query",
    "description": "Also return the ids of the prompt's chunks.",
    "schema": {"type": "boolean", "default": False},
}
TIER: Final[Parameter] = {
    "name": "name",
    "in": "path",
    "required": True,
    "description": "A tier, as `/v1/tiers` shows it.",
    "schema": {"type": "string", "maxLength": 64},
}
DRY_RUN: Final[Parameter] = {
    "name": "dry_run",
    "in": "query",
    "description": "Change nothing: check, and say what the change would do.",
    "schema": {"type": "boolean", "default": False},
}
PERSIST: Final[Parameter] = {
    "name": "persist",
    "in": "query",
    "description": "Also write the settings to the service's settings file.",
    "schema": {"type": "boolean", "default": False},
}
IF_MATCH: Final[Parameter] = {
    "name": "If-Match",
    "in": "header",
    "description": "The ETag of `/config`; another one is refused.",
    "schema": {"type": "string"},
}
SELECTOR: Final[Sequence[Parameter]] = (
    {
        "name": "namespace",
        "in": "query",
        "description": "Digest of a namespace; all namespaces without it.",
        "schema": {"type": "string", "pattern": "^[0-9a-f]{64}$"},
    },
    {
        "name": "tenant",
        "in": "query",
        "description": "Id of a tenant; all chunks without it.",
        "schema": {"type": "string", "pattern": "^[0-9a-f]{16}$"},
    },
    {
        "name": "tier",
        "in": "query",
        "description": "memory, or a local tier; all of these without it.",
        "schema": {"type": "string", "maxLength": 64},
    },
    {
        "name": "older_than_s",
        "in": "query",
        "description": "Only chunks without a use in so many seconds, as far as it is known.",
        "schema": {"type": "number", "minimum": 1, "maximum": MOST_AGE_S},
    },
    {
        "name": "all",
        "in": "query",
        "description": "Needed to drop everything, without namespace, tenant and tier.",
        "schema": {"type": "boolean", "default": False},
    },
    DRY_RUN,
)


class Route(NamedTuple):
    """A path, the name of its handler, its statuses, and the type of its answers.

    `answer` is a struct for JSON, or a media type. `parameters` and the struct of the `body` are
    those of the request. A method other than `get` changes something, which needs the token.
    `plan` is the type of the answer to a dry run, if it is another one than `answer`.
    """

    path: str
    handler: str
    summary: str
    answer: type[msgspec.Struct] | str
    statuses: Sequence[int]
    parameters: Sequence[Parameter] = ()
    body: type[msgspec.Struct] | Any = None
    method: str = "get"
    plan: type[msgspec.Struct] | None = None


def document(routes: Sequence[Route]) -> bytes:
    """Return the description as JSON."""
    kinds: list[Any] = [route.answer for route in routes if not isinstance(route.answer, str)]
    kinds += [route.plan for route in routes if route.plan is not None]
    kinds += [route.body for route in routes if _is_struct(route.body)]
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method] = _operation(route)
    bodies = [route.body for route in routes if route.body is not None]
    schemas, components = msgspec.json.schema_components(
        [*bodies, *kinds, Problem], ref_template=_SCHEMA
    )
    for route, schema in zip(
        (route for route in routes if route.body is not None), schemas, strict=False
    ):
        paths[route.path][route.method]["requestBody"] = {
            "required": route.handler not in _OPTIONAL_BODIES,
            "content": {"application/json": {"schema": schema}},
        }
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "KVHaven",
                "version": __version__,
                "summary": "HTTP API of a KVHaven node service.",
                "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            },
            "paths": paths,
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
    if route.parameters:
        found["parameters"] = list(route.parameters)
    if route.method != "get":
        found["security"] = [{"token": []}]
    return found


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


_OPTIONAL_BODIES: Final = frozenset({"flush", "drain"})
_MEANINGS: Final = {
    200: "The answer.",
    201: "Made.",
    202: "Begun, as a job.",
    304: "Not modified since the ETag in If-None-Match.",
    400: "A parameter is not valid, or the service refuses the request.",
    401: "The token is missing or wrong.",
    403: "No token is set, so nothing can be changed.",
    404: "Unknown.",
    409: "Refused as a whole, with the reason.",
    412: "The settings have another ETag than If-Match.",
    503: "The service is stopping or does not answer, or there are too many streams.",
}
_OK: Final = 200
_DONE: Final = {_OK, 201, 202}
_STATES: Final = {200, 503}


def _response(route: Route, status: int) -> dict[str, Any]:
    found: dict[str, Any] = {"description": _MEANINGS[status]}
    if status == _OK and route.plan is not None:
        return {
            "description": "The answer to a dry run, or to a change without a job.",
            "content": {"application/json": {"schema": _reference(route.plan)}},
        }
    own = status in _DONE or (status in _STATES and _shows_health(route))
    if status == 304:  # noqa: PLR2004  it has no body
        return found
    if own and isinstance(route.answer, str):
        schema = {"type": "object"} if route.answer == "application/json" else _TEXT
        found["content"] = {route.answer: {"schema": schema}}
        return found
    kind = route.answer if own and not isinstance(route.answer, str) else Problem
    found["content"] = {"application/json": {"schema": _reference(kind)}}
    return found


def _reference(kind: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": _SCHEMA.format(name=kind.__name__)}


def _shows_health(route: Route) -> bool:
    """Return whether the answer is the same type while the service does not answer."""
    return not isinstance(route.answer, str) and route.answer.__name__ == "Health"
