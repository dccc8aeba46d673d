# SPDX-License-Identifier: Apache-2.0
"""Plugins of the HTTP API: their events, and what they may ask of the service."""

import asyncio
import contextlib
import logging
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from kvhaven.config import Settings
from kvhaven.errors import KVHavenError
from kvhaven.gateway import models
from kvhaven.gateway.engine_server import EngineServer, token_ids
from kvhaven.gateway.observer import Observer, Seen
from kvhaven.gateway.plugin_process import Limits, Plugin, Script, Supervised
from kvhaven.gateway.views import tier_state_of, tiers_of
from kvhaven.protocol import Steered
from kvhaven.service.accounts import MOST_REQUESTS, RequestRow
from kvhaven.service.jobs import JobRow
from kvhaven.service.runtime_settings import Config
from kvhaven.service.snapshot import EngineRow, ServiceSnapshot
from kvhaven.service.steering_messages import Found, GetConfig, GetJob, LookUp, PinChain, Promote

_SCRIPT: Final = re.compile(r"(worker|scheduler|all)(_\d+)?(_.*)?\.(py|sh)", re.IGNORECASE)
_JOB_S: Final = 60.0
_JOB_POLL_S: Final = 0.2
_CONFIG_PAUSE_S: Final = 0.5

ChainKeys = tuple[bytes, bytes, bytes]
KeysOf = Callable[[models.Chain], Awaitable[tuple[ChainKeys, int]]]
"""Function that returns namespace, keys and tenant of a prompt, and the tokens of a chunk."""

Engines = Callable[[Callable[[list[EngineRow]], bool]], Awaitable[list[EngineRow]]]
"""Function that returns the attached engines; older ones than now only if they are enough."""

logger = logging.getLogger(__name__)


class PluginSettings(NamedTuple):
    """The settings of plugins."""

    plugins: tuple[str, ...] = ()
    locations: tuple[str, ...] = ()
    engine_url: str | None = None
    may_change: bool = False
    limits: Limits = Limits()


def plugin_settings(settings: Settings) -> PluginSettings:
    """Return the settings of plugins."""
    return PluginSettings(
        tuple((settings.plugins or "").split()),
        tuple((settings.runtime_plugin_locations or "").split()),
        settings.plugin_engine_url,
        settings.plugin_may_change,
        Limits(memory=settings.plugin_memory),
    )


class Plugins:
    """All plugins. They start when the service answers for the first time."""

    def __init__(
        self,
        observer: Observer,
        settings: PluginSettings,
        keys_of: KeysOf,
        engines: Engines,
        server: EngineServer,
    ) -> None:
        self._observer = observer
        self._server = server
        self._settings = settings
        self._keys_of = keys_of
        self._engines = engines
        self._all: list[Supervised] = []
        self._values: dict[str, Any] = {}
        self._generation = 0
        self._tiers: dict[str, str] = {}
        self._service = ""
        self._last = 0

    @property
    def _plugins(self) -> Iterator[Plugin]:
        return (one for one in self._all if isinstance(one, Plugin))

    def rows(self) -> list[models.PluginRow]:
        """Return all plugins, in ascending order of their ids."""
        return sorted(
            (
                models.PluginRow(
                    id=one.name,
                    kind=one.kind,
                    state=one.state,
                    pid=one.pid,
                    starts=one.starts,
                    queued_events=one.queued if isinstance(one, Plugin) else 0,
                    error=one.error,
                )
                for one in self._all
            ),
            key=lambda row: row.id,
        )

    def samples(self) -> Iterator[tuple[Mapping[str, str], float]]:
        """Yield the number of events with their labels."""
        for one in self._all:
            for (hook, result), count in sorted(one.counts.items()):
                yield {"plugin": one.name, "hook": hook, "result": result}, count

    async def run(self) -> None:
        """Run all plugins until cancelled."""
        if not self._settings.plugins and not self._settings.locations:
            return
        seen = await self._observer.newer("")
        self._values = await self._config()
        self._begin(seen)
        self._all = [*self._classes(), *self._scripts()]
        tasks = [asyncio.create_task(one.run()) for one in self._all]
        try:
            while True:
                seen = await self._observer.newer(seen.id)
                with contextlib.suppress(KVHavenError):  # the service is silent; the next one tells
                    await self._tell(seen.snapshot)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _classes(self) -> Iterator[Supervised]:
        for name in self._settings.plugins:
            yield Plugin(name, self._config_now, self._ask, self._settings.limits)

    def _scripts(self) -> Iterator[Supervised]:
        for file in _files(self._settings.locations):
            matched = _SCRIPT.fullmatch(file.name)
            if matched is None:
                logger.warning("plugins: %s is not named ROLE[_ID]_text.py or .sh: skipped", file)
            elif matched[2] in {None, "_0"}:  # of the workers of others, there is only the first
                role = matched[1].lower()
                role = "worker" if role == "all" else role
                yield Script(file, role, self._config_now, self._settings.limits)

    # --- events -----------------------------------------------------------------------------

    def _begin(self, seen: Seen) -> None:
        """Take note of the present state, of which plugins are not told."""
        snapshot = seen.snapshot
        self._service, self._generation = snapshot.service, snapshot.config_generation
        self._tiers = _states(snapshot)
        self._last = _requests_of(snapshot)

    async def _tell(self, snapshot: ServiceSnapshot) -> None:
        """Tell the plugins what has changed. Raises `KVHavenError` if the service is silent."""
        if snapshot.service != self._service:  # it has started again
            self._service, self._last, self._generation = snapshot.service, 0, 0
        states = _states(snapshot)
        for tier, state in states.items():
            if self._tiers.get(tier) != state:
                self._offer("on_tier_state", tier, state)
        self._tiers = states
        if snapshot.config_generation != self._generation:
            before, self._values = self._values, await self._config()
            self._generation = snapshot.config_generation
            changes = {n: v for n, v in self._values.items() if before.get(n) != v}
            if changes:
                self._offer("on_config_changed", changes)
        if _requests_of(snapshot) > self._last and any(self._plugins):
            await self._tell_requests()

    async def _tell_requests(self) -> None:
        """Tell the requests since the last ones, oldest first."""
        rows: list[RequestRow] = []
        cursor = ""
        while len(rows) <= MOST_REQUESTS:
            raw, cursor = await self._observer.rows("requests", cursor)
            page = msgspec.json.decode(raw, type=list[RequestRow])
            rows += [row for row in page if int(row.id) > self._last]
            if not cursor or (page and int(page[-1].id) <= self._last):
                break
        if not rows:
            return
        lost = int(rows[0].id) - self._last - len(rows)
        self._last = int(rows[0].id)
        for plugin in self._plugins:
            if lost > 0:
                plugin.counts["on_request_complete", "dropped"] += lost
        for row in reversed(rows):
            self._offer("on_request_complete", row.request, _stats(row))

    def _offer(self, hook: str, *arguments: object) -> None:
        for plugin in self._plugins:
            plugin.offer(hook, *arguments)

    def _config_now(self) -> Mapping[str, Any]:
        """Return the settings of the service that the plugins were told last."""
        return self._values

    async def _config(self) -> dict[str, Any]:
        """Ask for the settings of the service, until it answers."""
        while True:
            with contextlib.suppress(KVHavenError):
                answer = await self._observer.steer(GetConfig())
                config = msgspec.json.decode(answer.answer, type=Config)
                return {row.name: row.value for row in config.settings}
            await asyncio.sleep(_CONFIG_PAUSE_S)

    # --- questions --------------------------------------------------------------------------

    async def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Answer what a plugin asks. Raises `KVHavenError` if it is refused."""
        if message["do"] == "pin" and not self._settings.may_change:
            raise KVHavenError("plugin_may_change is not set, so plugins may not pin")
        tokens = await self._tokens(message.get("prompt"))
        engine = str(message.get("engine") or "") or await self._only_engine()
        given = models.Chain(
            token_ids=tokens, engine=engine, cache_salt=str(message.get("salt") or "")
        )
        chain, size = await self._keys_of(given)
        if message["do"] == "pin":
            ttl_s = msgspec.convert(message.get("ttl_s"), float)
            return _result(await self._observer.steer(PinChain(*chain, ttl_s=ttl_s)))
        found = _result(await self._observer.steer(LookUp(*chain)))
        if message["do"] == "lookup":
            return found | {"tokens": len(tokens)}
        return await self._prefetch(chain, tokens, size, msgspec.convert(found, Found))

    async def _prefetch(
        self, chain: ChainKeys, tokens: list[int], size: int, found: Found
    ) -> dict[str, Any]:
        """Promote a prompt, and wait for it; have the engine compute it if it is not cached."""
        if found.cached_tokens < len(tokens) // size * size and self._server.known:
            await self._server.compute(tokens)
            return {"computed_tokens": len(tokens)}
        if set(found.by_place) <= {"memory"}:
            return {"cached_tokens": found.cached_tokens}
        job = msgspec.convert(_result(await self._observer.steer(Promote(*chain))), JobRow)
        end = asyncio.get_running_loop().time() + _JOB_S
        while job.state == "running" and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(_JOB_POLL_S)
            job = msgspec.convert(_result(await self._observer.steer(GetJob(job.id))), JobRow)
        return dict(job.result)

    async def _tokens(self, prompt: object) -> list[int]:
        if isinstance(prompt, str):
            return await self._server.tokenize(prompt)
        return token_ids(prompt)

    async def _only_engine(self) -> str:
        engines = await self._engines(_is_one)
        if not _is_one(engines):
            raise KVHavenError(
                f"{len(engines)} engines are attached; expected one, or the argument engine"
            )
        return engines[0].id


def _is_one(engines: list[EngineRow]) -> bool:
    """Return whether all engines have one namespace."""
    return len({engine.namespace for engine in engines}) == 1


def _files(locations: tuple[str, ...]) -> list[Path]:
    """Return the scripts that are named, or in directories that are."""
    found: list[Path] = []
    for location in map(Path, locations):
        if location.is_dir():
            scripts = (p for p in location.iterdir() if p.suffix in {".py", ".sh"})
            found += sorted(path for path in scripts if not path.name.startswith(("_", ".")))
        elif location.is_file():
            found.append(location)
        else:
            logger.error("runtime_plugin_locations: %s is neither a file nor a directory", location)
    return found


def _requests_of(snapshot: ServiceSnapshot) -> int:
    """Return the number of requests so far, which is the id of the last one."""
    return sum(sum(counts.lookups.values()) for counts in snapshot.tokens.values())


def _states(snapshot: ServiceSnapshot) -> dict[str, str]:
    return {row.id: tier_state_of(row) for row in tiers_of(snapshot)}


def _stats(row: RequestRow) -> dict[str, object]:
    """Return the fields of `kvhaven.plugins.RequestStats`."""
    ours = row.prompt_tokens - row.by_source.get("none", 0) - row.by_source.get("engine", 0)
    return {
        "cache_hit": ours > 0,
        "prompt_tokens": row.prompt_tokens,
        "cached_tokens": ours,
        "by_source": row.by_source,
        "load_ms": row.wait_ms,
        "reason": row.reason,
        "tenant": row.tenant,
        "engine": row.engine,
    }


def _result(answer: Steered) -> dict[str, Any]:
    """Return an answer of the service. Raises `KVHavenError` if it is a refusal."""
    found: dict[str, Any] = msgspec.json.decode(answer.answer)
    if "error" in found and set(found) == {"error"}:
        raise KVHavenError(str(found["error"]))
    return found
