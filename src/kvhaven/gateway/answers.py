# SPDX-License-Identifier: Apache-2.0
"""Common parts of the API's handlers: bodies, switches, answers, and the log of changes."""

import asyncio
import logging
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from kvhaven.errors import KVHavenError
from kvhaven.gateway import models
from kvhaven.http_server import HEADER_S
from kvhaven.protocol import Steered

T = TypeVar("T")
logger = logging.getLogger(__name__)


async def body_of(request: web.Request, kind: type[T], default: T | None = None) -> T:
    """Return the JSON body of a request. Raises `KVHavenError` if it is not valid."""
    try:
        async with asyncio.timeout(HEADER_S):
            body = await request.read()
        if not body and default is not None:
            return default
        return msgspec.json.decode(body, type=kind)
    except TimeoutError as error:
        raise KVHavenError(f"body: incomplete after {HEADER_S:g} s") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise KVHavenError(f"body: not valid ({error})") from error


def hex_of(text: str, name: str, length: int) -> bytes:
    """Return the bytes of an id. Raises `KVHavenError` if it is malformed."""
    if not re.fullmatch(rf"[0-9a-f]{{{2 * length}}}", text):
        raise KVHavenError(
            f"{name}: malformed (got {text[:64]!r}); expected {2 * length} hex digits"
        )
    return bytes.fromhex(text)


def require_known(request: web.Request, known: set[str]) -> None:
    """Raise `KVHavenError` for a parameter that is not `known`."""
    unknown = request.query.keys() - known
    if unknown:
        raise KVHavenError(f"unknown parameter {min(unknown)[:32]!r}; nothing was changed")


def answered(answer: Steered) -> web.Response:
    """Return the service's answer to a request of an operator."""
    return web.Response(body=answer.answer, status=answer.status, content_type="application/json")


def switch(given: Mapping[str, str], name: str) -> bool:
    """Return a switch of a query, false by default. Raises `KVHavenError` if it is malformed."""
    text = given.get(name, "false")
    if text not in {"true", "false"}:
        raise KVHavenError(f"{name}: malformed (got {text[:32]!r}); expected true or false")
    return text == "true"


def number(given: Mapping[str, str], name: str, kind: Any) -> float:
    """Return a number of a query. Raises `KVHavenError` if it is not of this (annotated) type."""
    try:
        return float(msgspec.json.decode(given[name].encode(errors="replace"), type=kind))
    except msgspec.DecodeError as error:
        raise KVHavenError(f"{name}: not valid ({error})") from error


def audit(request: web.Request, done: str) -> None:
    """Log a change: by which address, with which request, and its result."""
    logger.info("api: audit: %s: %s %s: %s", request.remote, request.method, request.path_qs, done)


def json_of(answer: object, status: int = 200) -> web.Response:
    """Return an answer as JSON."""
    return web.Response(
        body=msgspec.json.encode(answer), status=status, content_type="application/json"
    )


def problem(status: int, reason: str) -> web.Response:
    """Return the reason why a request failed."""
    return json_of(models.Problem(reason), status)
