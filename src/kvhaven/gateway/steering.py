# SPDX-License-Identifier: Apache-2.0
"""Handlers of the API that steer the service: settings, prompts, pins, tiers, jobs."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Any, Final, TypeVar

import msgspec
from aiohttp import web

from kvhaven.catalog.ghosts import Reason
from kvhaven.errors import KVHavenError
from kvhaven.gateway import models
from kvhaven.gateway.answers import (
    answered,
    audit,
    body_of,
    hex_of,
    json_of,
    problem,
    require_known,
    switch,
)
from kvhaven.gateway.engine_server import EngineServer
from kvhaven.gateway.observer import Observer
from kvhaven.keys import Extras, KeyChain, tenant_id
from kvhaven.protocol import MOST_KEYS, NO_LIMIT, KeyList, ListKind
from kvhaven.service.runtime_settings import Config
from kvhaven.service.snapshot import EngineRow, NamespaceRow
from kvhaven.service.steering import chunk_id
from kvhaven.service.steering_messages import (
    Configure,
    Drain,
    FlushAll,
    Found,
    GetChunk,
    GetConfig,
    GetJob,
    LookUp,
    Move,
    PinChain,
    Promote,
    Request,
    SetQuotas,
    SwitchTier,
    Unpin,
    Verify,
)
from kvhaven.types import TENANT_BYTES

_MOST_NAMES: Final = 256
_MOST_CHUNKS: Final = 1 << 16
"""Chunks whose ids are known: those of the last lookups that asked for them."""

_ENGINES_S: Final = 1.0

C = TypeVar("C", bound=models.Chain)
Rows = Callable[[ListKind, type[Any]], Awaitable[list[Any]]]
"""Function that returns all rows of a kind."""


class Steering:
    """Handlers, each with the name that its route has."""

    def __init__(self, observer: Observer, rows: Rows, server: EngineServer) -> None:
        self._observer = observer
        self._server = server
        self._chunks: dict[str, tuple[bytes, bytes, bytes]] = {}
        self._rows = rows
        self._engines: list[EngineRow] = []
        self._engines_until = 0.0

    async def configure(self, request: web.Request) -> web.Response:
        """Change settings."""
        values = await body_of(request, models.Values)
        version = None
        if request.if_match is not None and not any(t.value == "*" for t in request.if_match):
            config = await self._observer.steer(GetConfig())
            version = msgspec.json.decode(config.answer, type=Config).version
            if not any(tag.value.startswith(f"{version}-") for tag in request.if_match):
                return problem(412, "If-Match: the settings have changed; read /config again")
        names = ", ".join(sorted(values))[:_MOST_NAMES]
        persist = switch(request.query, "persist")
        return await self._steered(
            request,
            Configure(values, version, persist=persist),
            f": {names!r}{', persisted' if persist else ''}",
            {"persist"},
        )

    async def lookup(self, request: web.Request) -> web.Response:
        """Say where a prompt's chunks are."""
        require_known(request, {"chunks"})
        with_chunks = switch(request.query, "chunks")
        wanted = await self._prompt(request, models.Chain)
        chain, size = await self.keys_of(wanted)
        answer = await self._observer.steer(LookUp(*chain))
        if answer.status != 200:  # noqa: PLR2004  OK
            return answered(answer)
        found = msgspec.json.decode(answer.answer, type=Found)
        tokens = len(wanted.token_ids)
        if found.first_gap is None and tokens > found.cached_tokens:
            # Behind the last full chunk, or behind the most chunks that a lookup may have.
            gap, reason = found.cached_tokens, Reason.COLD
            if tokens - gap < size:
                reason = Reason.PARTIAL_CHUNK
            found = msgspec.structs.replace(found, first_gap=gap, reason=reason.label)
        if with_chunks:
            found = msgspec.structs.replace(found, chunks=self._remember(*chain))
        return json_of(msgspec.structs.replace(found, tokens=tokens))

    async def chunk(self, request: web.Request) -> web.Response:
        """Return a chunk."""
        known = self._chunks.get(request.match_info["id"])
        if known is None:
            return problem(404, "unknown chunk; /v1/lookup?chunks=true tells the ids of a prompt's")
        return answered(await self._observer.steer(GetChunk(*known)))

    def _remember(self, namespace: bytes, keys: bytes, tenant: bytes) -> list[str]:
        """Return the ids of chunks, and remember the last ones with their keys."""
        ids = []
        for key in KeyList(keys):
            ids.append(chunk_id(key))
            self._chunks.pop(ids[-1], None)
            self._chunks[ids[-1]] = (namespace, key, tenant)
        while len(self._chunks) > _MOST_CHUNKS:
            del self._chunks[next(iter(self._chunks))]
        return ids

    async def prefetch(self, request: web.Request) -> web.Response:
        """Promote a prompt's chunks."""
        chain, _ = await self.keys_of(await self._prompt(request, models.Chain))
        return await self._steered(request, Promote(*chain))

    async def verify(self, request: web.Request) -> web.Response:
        """Verify a prompt's chunks."""
        chain, _ = await self.keys_of(await self._prompt(request, models.Chain))
        return await self._steered(request, Verify(*chain))

    async def move(self, request: web.Request) -> web.Response:
        """Write a prompt's chunks to a tier, or promote them."""
        wanted = await self._prompt(request, models.MovedChain)
        chain, _ = await self.keys_of(wanted)
        if wanted.to == "memory":
            return await self._steered(request, Promote(*chain))
        return await self._steered(request, Move(*chain, to=wanted.to))

    async def pin(self, request: web.Request) -> web.Response:
        """Pin a prompt's chunks."""
        wanted = await self._prompt(request, models.PinnedChain)
        chain, _ = await self.keys_of(wanted)
        return await self._steered(request, PinChain(*chain, ttl_s=wanted.ttl_s))

    async def unpin(self, request: web.Request) -> web.Response:
        """End a pin."""
        return await self._steered(request, Unpin(request.match_info["id"]))

    async def switch_tier(self, request: web.Request) -> web.Response:
        """Switch a tier."""
        wanted = await body_of(request, models.NewState)
        return await self._steered(request, SwitchTier(request.match_info["name"], wanted.state))

    async def set_quota(self, request: web.Request) -> web.Response:
        """Set the quotas of a tenant."""
        tenant = hex_of(request.match_info["id"], "id", TENANT_BYTES)
        wanted = await body_of(request, models.NewQuota)
        quotas = SetQuotas(tenant, _quota(wanted.memory), _quota(wanted.disk))
        return await self._steered(
            request, quotas, f": memory {_text(wanted.memory)}, disk {_text(wanted.disk)}"
        )

    async def flush(self, request: web.Request) -> web.Response:
        """Wait for all writes."""
        wanted = await body_of(request, models.Waiting, models.Waiting())
        return await self._steered(request, FlushAll(wanted.wait_s))

    async def drain(self, request: web.Request) -> web.Response:
        """Prepare for the end."""
        wanted = await body_of(request, models.NewDrain, models.NewDrain())
        return await self._steered(request, Drain(wanted.on, wanted.wait_s))

    async def job(self, request: web.Request) -> web.Response:
        """Return a job."""
        return answered(await self._observer.steer(GetJob(request.match_info["id"])))

    async def _steered(
        self,
        request: web.Request,
        wanted: Request,
        detail: str = "",
        parameters: Collection[str] = (),
    ) -> web.Response:
        """Answer a change with a line in the log, or the dry run of one."""
        require_known(request, {"dry_run", *parameters})
        dry_run = switch(request.query, "dry_run")
        answer = await self._observer.steer(msgspec.structs.replace(wanted, dry_run=dry_run))
        if dry_run:
            return answered(answer)
        audit(request, f"status {answer.status}{detail}")
        if answer.status < 400:  # noqa: PLR2004  Bad Request: nothing has changed
            await self._observer.refresh()
        return answered(answer)

    async def _prompt(self, request: web.Request, kind: type[C]) -> C:
        """Return the prompt in a body, with the tokens of its text if it has a text.

        Raises `KVHavenError` if it has neither or both, or the engine does not tokenize it.
        """
        given = await body_of(request, kind)
        if bool(given.token_ids) == bool(given.text):
            found = "both" if given.text else "neither"
            raise KVHavenError(f"prompt: expected token_ids or text, not empty; got {found}")
        if not given.text:
            return given
        return msgspec.structs.replace(given, token_ids=await self._server.tokenize(given.text))

    async def engines(self, enough: Callable[[list[EngineRow]], bool]) -> list[EngineRow]:
        """Return the attached engines, as they were at most a second ago if that is `enough`.

        Each question about a prompt needs them, and a plugin may ask for every request.
        """
        now = asyncio.get_running_loop().time()
        if now >= self._engines_until or not enough(self._engines):
            self._engines = await self._rows("engines", EngineRow)
            self._engines_until = now + _ENGINES_S
        return self._engines

    async def keys_of(self, chain: models.Chain) -> tuple[tuple[bytes, bytes, bytes], int]:
        """Return namespace, keys and tenant of a prompt, and the tokens of a chunk.

        Raises `KVHavenError` if it names no namespace, or an unknown one.
        """
        if bool(chain.engine) == bool(chain.namespace):
            raise KVHavenError("expected engine or namespace")
        if chain.engine:
            engines = await self.engines(lambda rows: any(row.id == chain.engine for row in rows))
            known = [(row.namespace, row.chunk_tokens) for row in engines if row.id == chain.engine]
        else:
            namespaces = await self._rows("namespaces", NamespaceRow)
            known = [(n.id, n.chunk_tokens) for n in namespaces if n.id == chain.namespace]
        if not known:
            raise KVHavenError(
                f"unknown engine or namespace (got {(chain.engine or chain.namespace)[:64]!r}); "
                "/v1/engines and /v1/namespaces list all"
            )
        ((digest, size), *_) = known
        if not size:
            raise KVHavenError("the engine does not name its chunk size")
        root, extras = bytes.fromhex(digest), Extras(salt=chain.cache_salt)
        keys = await asyncio.to_thread(_hashed, root, size, chain.token_ids, extras)
        return (root, keys, tenant_id(chain.cache_salt)), size


def _quota(wanted: int | msgspec.UnsetType | None) -> int | None:
    """Return a quota as the service expects it."""
    if wanted is msgspec.UNSET:
        return None
    return NO_LIMIT if wanted is None else wanted


def _text(wanted: int | msgspec.UnsetType | None) -> str:
    """Return a quota for the log."""
    if wanted is msgspec.UNSET:
        return "unchanged"
    return "none" if wanted is None else f"{wanted} bytes"


def _hashed(root: bytes, size: int, tokens: list[int], extras: Extras) -> bytes:
    """Return the keys of the full chunks of a prompt."""
    chain = KeyChain(root, size, extras)
    chain.extend(tokens)
    return b"".join(chain.keys[:MOST_KEYS])
