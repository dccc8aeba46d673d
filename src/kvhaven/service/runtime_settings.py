# SPDX-License-Identifier: Apache-2.0
"""Settings that can be changed while the service runs, and those that wait for something."""

import asyncio
import contextlib
import logging
import secrets
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from kvhaven.catalog.tier_spec import StoreOn, WriteMode
from kvhaven.config import (
    NEXT_REQUEST,
    NOW,
    Settings,
    check_value,
    cross_check,
    setting_infos,
    setting_row,
)
from kvhaven.config.persist import write_settings
from kvhaven.config.sources import DEFAULT, RawValue
from kvhaven.errors import ConfigError, KVHavenError
from kvhaven.protocol import EngineSettings
from kvhaven.service.driver import Driver
from kvhaven.service.engines import AttachedEngines, AttachedProcess
from kvhaven.service.tier_runner import TierRunner
from kvhaven.service.verify import Verifier
from kvhaven.tenants import quotas_of
from kvhaven.tiers.local.tier import DiskTier

Scalar = str | int | float | bool | None
ORIGIN: Final = "HTTP API"
_PREFIXES: Final = ("lmcache.", "kvhaven.")
_OF_LMCACHE: Final = ("LMCACHE_", "LMCache's ")
"""Begins of origins that the settings file has precedence over, as over the default."""
_MOST_REFUSED: Final = 256
_PERSIST_S: Final = 5.0
"""Longest wait for the settings file; less than the API waits for the answer."""

logger = logging.getLogger(__name__)


class SettingValue(msgspec.Struct, frozen=True):
    """A setting of the service. Secrets are masked; `origin` is None if it is not known.

    `by_engine` has the values of attached engines that have taken a change, for settings that
    apply at the next request. `pending` is a value that waits for the next attach.
    """

    name: str
    value: Scalar
    text: str
    origin: str | None
    changes: str
    by_engine: dict[str, Scalar] = {}
    pending: Scalar | msgspec.UnsetType = msgspec.UNSET


class Config(msgspec.Struct, frozen=True):
    """All settings. `generation` grows by one with each change.

    `version` is another one after each change and each start of the service.
    """

    version: str
    generation: int
    settings: list[SettingValue]


class Changed(msgspec.Struct, frozen=True):
    """One setting of a change; `was` is its value before."""

    name: str
    value: Scalar
    was: Scalar
    changes: str


class Changes(msgspec.Struct, frozen=True):
    """A change of settings: what is `applied`, and what waits (`pending`) for the next attach.

    With `dry_run`, what would be. `applied` settings with `changes` of `next_request` reach each
    engine with its next request; `/config` shows by which they were taken. `file` is the settings
    file that has the change, too.
    """

    generation: int
    dry_run: bool
    applied: list[Changed]
    pending: list[Changed]
    file: str | None = None


class ConflictError(KVHavenError):
    """A change that is refused; `status` is that of HTTP."""

    def __init__(self, reason: str, status: int = 409) -> None:
        super().__init__(reason)
        self.status = status


class RuntimeSettings:
    """The settings in force. A change is applied as a whole or refused as a whole."""

    def __init__(
        self,
        settings: Settings,
        origins: Mapping[str, str],
        file: Path | None,
        driver: Driver,
        runner: TierRunner,
        verifier: Verifier,
        engines: AttachedEngines,
    ) -> None:
        self.settings = settings
        self.generation = 1
        self._instance = secrets.token_hex(4)
        self._origins = dict(origins)
        self._at_start = dict(origins)
        self._file = file
        self._persisting = False
        self._driver = driver
        self._runner = runner
        self._verifier = verifier
        self._engines = engines
        self._pending: dict[str, Scalar] = {}
        self._for_engines: dict[str, Scalar] = {}
        self._sent = 0  # generation of the last change for engines
        self._appliers: dict[str, Callable[[], None]] = {
            "verify_memory": lambda: verifier.switch(self.settings.verify_memory),
            "fill_faster_tiers": self._fill_faster,
            "write_queue_size": self._limit_queues,
            "remote_lookup_ttl_s": self._believe,
            "promote_deadline_ms": lambda: runner.look_up_within(
                self.settings.promote_deadline_ms / 1000
            ),
            "max_local_disk_size": self._resize_disk,
            "disk_write": self._switch_writes,
            "remote_write": self._switch_writes,
            "disk_store_on": self._switch_writes,
            "remote_store_on": self._switch_writes,
            "tenant_memory": lambda: self._set_quotas(memory=True),
            "tenant_disk": lambda: self._set_quotas(memory=False),
            "log_level": lambda: logging.getLogger().setLevel(self.settings.log_level),
            "pin_share": lambda: None,  # read when chunks are pinned
        }

    def rows(self) -> list[SettingValue]:
        """Return every setting, in alphabetical order, secrets masked."""
        infos = sorted(setting_infos(), key=lambda info: info.name)
        rows = (setting_row(info, self.settings, self._origins) for info in infos)
        return [
            SettingValue(
                row.name,
                row.value,
                row.text,
                row.origin or None,
                row.changes,
                self._by_engine(row.name),
                self._pending.get(row.name, msgspec.UNSET),
            )
            for row in rows
        ]

    def config(self) -> Config:
        """Return all settings with their generation."""
        return Config(self.version, self.generation, self.rows())

    @property
    def version(self) -> str:
        """Name of the settings as they are now; no other service has the same."""
        return f"{self._instance}-{self.generation}"

    def change(
        self, values: Mapping[str, object], *, dry_run: bool, version: str | None
    ) -> Changes:
        """Change settings; all of them, or none.

        `version`, if given, must be the present one. Raises `ConflictError` if it is not, or if
        any setting is unknown, not valid, or cannot be changed while the service runs.
        """
        if version not in {None, self.version}:
            raise ConflictError(
                "If-Match: the settings have changed since; read /config again", status=412
            )
        if self._persisting:
            raise ConflictError("another change is being written to the settings file; try again")
        parsed = _parsed(values)
        infos = {info.name: info for info in setting_infos()}
        rows = {name: setting_row(infos[name], self.settings, {}) for name in parsed}
        for name, row in rows.items():
            if row.changes == "restart":
                raise ConflictError(
                    f"setting {name} is read only when the service starts; set it in the "
                    "configuration, and restart the service"
                )
        now = {n: v for n, v in parsed.items() if rows[n].changes != "next_attach"}
        later = {n: v for n, v in parsed.items() if n not in now}
        settings = msgspec.structs.replace(self.settings, **now)
        try:
            raws = {name: RawValue(value, ORIGIN) for name, value in parsed.items()}
            cross_check(settings, raws, infos)
        except ConfigError as error:
            raise ConflictError(str(error)) from error
        was = {name: getattr(self.settings, name) for name in parsed}
        if not dry_run:
            self._apply(settings, now, later)
        return Changes(
            self.generation,
            dry_run,
            [Changed(n, v, was[n], rows[n].changes) for n, v in now.items()],
            [Changed(n, v, was[n], rows[n].changes) for n, v in later.items()],
        )

    async def persist(
        self, values: Mapping[str, object], *, dry_run: bool, version: str | None
    ) -> Changes:
        """Change settings, and write them to the settings file, so that a restart keeps them.

        If they cannot be written, nothing changes. Raises `ConflictError` as `change` does, and if
        the file has no effect on a setting: it is one of engines, or a source with precedence has
        it.
        """
        planned = self.change(values, dry_run=True, version=version)
        file = self._require_file([one.name for one in (*planned.applied, *planned.pending)])
        raws = _by_name(values)
        origins = await self._write(file, raws, dry_run=dry_run)
        done = planned
        if not dry_run:
            done = self.change(values, dry_run=False, version=None)
            moved = {n for n, origin in self._origins.items() if origin.startswith(f"{file}:")}
            self._origins.update({n: o for n, o in origins.items() if n in moved or n in raws})
        return msgspec.structs.replace(done, file=str(file))

    async def _write(
        self, file: Path, values: Mapping[str, object], *, dry_run: bool
    ) -> dict[str, str]:
        """Write settings to the file; return the origins of all in it. Raises `ConflictError`.

        No other change comes before the end, also of a thread that was given up. A thread of its
        own: a file system may hang, and the service must be able to end.
        """
        loop = asyncio.get_running_loop()
        written: asyncio.Future[dict[str, str]] = loop.create_future()

        def work() -> None:
            origins: dict[str, str] = {}
            problem: Exception | None = None
            try:
                origins = write_settings(
                    file, values, dry_run=dry_run, wanted=lambda: not written.done()
                )
            except ConfigError as error:
                problem = ConflictError(str(error))
            except Exception as error:  # noqa: BLE001  the caller answers it
                problem = error
            with contextlib.suppress(RuntimeError):  # the service has ended
                loop.call_soon_threadsafe(ended, origins, problem)

        def ended(origins: dict[str, str], problem: Exception | None) -> None:
            self._persisting = False
            if written.done():
                return
            if problem is None:
                written.set_result(origins)
            else:
                written.set_exception(problem)

        self._persisting = True
        threading.Thread(target=work, name="kvhaven-settings", daemon=True).start()
        try:
            async with asyncio.timeout(_PERSIST_S):
                return await written
        except TimeoutError:
            raise ConflictError(
                f"settings file {file} was not written within {_PERSIST_S:g} s: its file system "
                "does not answer; nothing has changed"
            ) from None

    def _require_file(self, names: list[str]) -> Path:
        """Return the settings file. Raises `ConflictError` if it does not decide these settings."""
        if self._file is None:
            raise ConflictError(
                "persist: the service has no settings file; start it by `kvhaven serve --file`"
            )
        for name in names:
            if name not in NOW:
                raise ConflictError(
                    f"persist: {name} is a setting of engines, which read their own configuration; "
                    "set it there"
                )
            origin = self._at_start.get(name, DEFAULT)
            if origin != DEFAULT and not origin.startswith((f"{self._file}:", *_OF_LMCACHE)):
                raise ConflictError(
                    f"persist: {name} is set by {origin}, which has precedence over the settings "
                    "file; change it there"
                )
        return self._file

    def attached(self, scheduler: AttachedProcess) -> None:
        """Send the changed settings to a scheduler that has just attached."""
        if self._for_engines and scheduler.connection is not None:
            scheduler.connection.send(self._message())

    def taken(self, scheduler: AttachedProcess, generation: int) -> None:
        """Record that a scheduler applies the settings of a generation."""
        scheduler.settings_taken = min(generation, self._sent)

    def _apply(
        self, settings: Settings, now: Mapping[str, Scalar], later: Mapping[str, Scalar]
    ) -> None:
        self.generation += 1
        self.settings = settings
        self._pending.update(later)
        self._origins.update(dict.fromkeys(now, ORIGIN))
        for name in now:
            apply = self._appliers.get(name)
            if apply is not None:
                apply()
        engines = {name: value for name, value in now.items() if name in NEXT_REQUEST}
        if engines:
            self._for_engines.update(engines)
            self._sent = self.generation
            for engine in self._engines:
                if engine.scheduler is not None and engine.scheduler.connection is not None:
                    engine.scheduler.connection.send(self._message())
        logger.info("settings were changed (generation %d): %s", self.generation, [*now, *later])

    def _message(self) -> EngineSettings:
        return EngineSettings(self._sent, msgspec.json.encode(self._for_engines))

    def _by_engine(self, name: str) -> dict[str, Scalar]:
        if name not in self._for_engines:
            return {}
        return {
            str(engine.session.id): self._for_engines[name]
            for engine in self._engines
            if engine.scheduler is not None and engine.scheduler.settings_taken >= self._sent
        }

    # --- one setting ------------------------------------------------------------------------

    def _fill_faster(self) -> None:
        with self._driver.event() as catalog:
            catalog.fill_faster(self.settings.fill_faster_tiers)

    def _limit_queues(self) -> None:
        with self._driver.event() as catalog:
            catalog.limit_queues(self.settings.write_queue_bytes)

    def _believe(self) -> None:
        with self._driver.event() as catalog:
            catalog.believe(self.settings.remote_lookup_ttl_s)

    def _resize_disk(self) -> None:
        for tier in self._runner.tiers.values():
            if isinstance(tier, DiskTier):
                tier.resize(self.settings.max_local_disk_size)
        self._runner.check_health()

    def _switch_writes(self) -> None:
        settings = self.settings
        with self._driver.event() as catalog:
            for name, tier in self._runner.tiers.items():
                mode = settings.remote_write if tier.shared else settings.disk_write
                store_on = settings.remote_store_on if tier.shared else settings.disk_store_on
                catalog.switch_tier(
                    name, self._runner.mode_of(name, WriteMode(mode)), StoreOn(store_on)
                )

    def _set_quotas(self, *, memory: bool) -> None:
        settings = self.settings
        with self._driver.event() as catalog:
            if memory:
                catalog.set_quotas(memory=quotas_of(settings.tenant_memory))
            else:
                catalog.set_quotas(disk=quotas_of(settings.tenant_disk))


def _parsed(values: Mapping[str, object]) -> dict[str, Scalar]:
    """Return the parsed values by name. Raises `ConflictError`."""
    parsed: dict[str, Scalar] = {}
    for name, value in _by_name(values).items():
        try:
            parsed[name] = check_value(name, RawValue(value, ORIGIN))
        except ConfigError as error:
            raise ConflictError(str(error)[: 4 * _MOST_REFUSED]) from error
    if not parsed:
        raise ConflictError("no setting is named; expected an object of names and values", 400)
    return parsed


def _by_name(values: Mapping[str, object]) -> dict[str, object]:
    """Return the values with names that have no prefix. Raises `ConflictError`."""
    known = {info.name for info in setting_infos()}
    found: dict[str, object] = {}
    for key, value in values.items():
        name = key
        for prefix in _PREFIXES:
            name = name.removeprefix(prefix)
        if name not in known:
            raise ConflictError(f"unknown setting {key[:_MOST_REFUSED]!r}; /config lists all")
        if name in found:
            raise ConflictError(f"setting {name} is named twice")
        found[name] = value
    return found
