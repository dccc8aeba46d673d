# SPDX-License-Identifier: Apache-2.0
"""Loop of `kvhaven top`: an observer of the service, the keys, and a frame a second."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections import deque
from typing import Final

import msgspec

from kvhaven.cli.terminal import Screen, has_colors, is_screen, size_of, text_of
from kvhaven.cli.top_screen import TABLES, Moment, Row, View, frame, line_of, sort_columns
from kvhaven.errors import KVHavenError, ServiceUnavailableError
from kvhaven.gateway.observer import Observer, Seen
from kvhaven.gateway.views import health_of
from kvhaven.protocol import MOST_ROWS, ListKind
from kvhaven.service.accounts import RequestRow
from kvhaven.service.snapshot import EngineRow, TenantRow

_WINDOW: Final = 11
"""Snapshots that rates are taken over."""
_ONCE_S: Final = 5.0
_ONCE_POLL_S: Final = 0.1
_ROWS: Final = {"engines": EngineRow, "requests": RequestRow, "tenants": TenantRow}
_MOST_PAGES: Final = 10
"""Pages of a table that are read to sort it."""
_STOPS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


async def run(address: str, *, interval_s: float, once: bool, as_json: bool) -> None:
    """Show the service at `address` until the user quits.

    Raises `ServiceUnavailableError` if `once` is set and the service does not answer in time.
    """
    logging.getLogger("kvhaven").addHandler(logging.NullHandler())
    logging.getLogger("kvhaven").propagate = False  # lines of a log would spoil the screen
    observer = Observer(address, min(interval_s, 1.0))
    top = _Top(observer, interval_s)
    observing = asyncio.create_task(observer.run())
    try:
        if once:
            await top.show_once(as_json=as_json)
        elif as_json or not is_screen(sys.stdout):
            await top.show_lines(as_json=as_json)
        else:
            await top.show_screen()
    finally:
        observing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await observing


class _Top:
    """State of the display."""

    def __init__(self, observer: Observer, interval_s: float) -> None:
        self._observer = observer
        self._interval_s = interval_s
        self._moments: deque[Moment] = deque(maxlen=_WINDOW)
        self._last = ""
        self._table = 0
        self._sort = ""
        self._rows: list[Row] = []
        self._paused = False
        self._stop = asyncio.Event()
        self._changed = asyncio.Event()

    # --- ways to show it --------------------------------------------------------------------

    async def show_once(self, *, as_json: bool) -> None:
        """Print one frame, or one snapshot."""
        seen = await self._first()
        if as_json:
            print(seen.raw.decode())
            return
        self._note(seen)
        width, _ = size_of(sys.stdout)
        view, colors = self._view(), has_colors(sys.stdout)
        for line in frame(view, width, None):
            print(text_of(line, width, colors=colors).rstrip())

    async def _first(self) -> Seen:
        """Return the first snapshot. Raises `ServiceUnavailableError` if there is none in time."""
        end, nothing_yet = time.monotonic() + _ONCE_S, self._observer.error
        while time.monotonic() < end and self._observer.error == nothing_yet:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ONCE_POLL_S):
                    return await self._observer.newer("")
        raise ServiceUnavailableError(self._observer.error)

    async def show_lines(self, *, as_json: bool) -> None:
        """Print a line for each interval until a signal ends it."""
        self._stop_by_signals()
        while not self._stop.is_set():
            await self._pause()
            seen = self._observer.seen
            if seen is not None:
                self._note(seen)
            if not as_json:
                print(line_of(self._view()), flush=True)
            elif seen is not None and not self._silence:
                print(seen.raw.decode(), flush=True)

    async def show_screen(self) -> None:
        """Show frames in the terminal until the user quits, or a signal ends it."""
        self._stop_by_signals()
        loop = asyncio.get_running_loop()
        with Screen(self._on_key) as screen:
            loop.add_signal_handler(signal.SIGWINCH, self._changed.set)
            loop.add_signal_handler(signal.SIGTSTP, self._suspend, screen)
            drawn = 0.0
            while not self._stop.is_set():
                if not self._paused and time.monotonic() - drawn >= self._interval_s / 2:
                    await self._look(screen.size[1])
                    drawn = time.monotonic()
                screen.draw(frame(self._view(), *screen.size))
                await self._pause()

    # --- one frame --------------------------------------------------------------------------

    async def _look(self, most: int) -> None:
        """Take the newest snapshot, and at most so many rows of the table that is shown."""
        seen = self._observer.seen
        if seen is not None:
            self._note(seen)
        self._rows = []
        kind = TABLES[self._table]
        if kind != "tiers" and not self._silence:
            with contextlib.suppress(KVHavenError):  # the next frame says why
                await self._read(kind, most)

    async def _read(self, kind: ListKind, most: int) -> None:
        """Read the rows that fit on the screen; to sort them, those of `_MOST_PAGES` pages."""
        cursor, pages = "", _MOST_PAGES if self._sort else 1
        limit = MOST_ROWS if self._sort else min(max(1, most), MOST_ROWS)
        while pages and (cursor or not self._rows):
            raw, cursor = await self._observer.rows(kind, cursor, limit)
            self._rows += msgspec.json.decode(raw, type=list[_ROWS[kind]])  # type: ignore[valid-type]
            pages = pages - 1 if cursor else 0

    def _note(self, seen: Seen) -> None:
        if seen.id == self._last:
            return
        self._last = seen.id
        if self._moments and self._moments[-1].snapshot.service != seen.snapshot.service:
            self._moments.clear()  # it has started again, and its counters with it
        self._moments.append(Moment(seen.at, seen.snapshot))

    @property
    def _silence(self) -> str:
        """Why there is no answer; empty if there is one."""
        health, answers = health_of(self._observer)
        return "" if answers else f"{health.checks[0].name}: {health.checks[0].detail}"

    def _view(self) -> View:
        return View(
            self._observer.address,
            list(self._moments),
            TABLES[self._table],
            self._rows,
            self._silence,
            self._paused,
            time.time(),
            self._sort,
        )

    async def _pause(self) -> None:
        """Wait for the next frame, a key, another size, or the end."""
        self._changed.clear()
        waits = [asyncio.create_task(event.wait()) for event in (self._changed, self._stop)]
        await asyncio.wait(waits, timeout=self._interval_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    def _stop_by_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in _STOPS:
            loop.add_signal_handler(number, self._stop.set)

    # --- the user ---------------------------------------------------------------------------

    def _on_key(self, key: str) -> None:
        if key in "qQ\x03":
            self._stop.set()
        elif key in "tT":
            self._table, self._sort = (self._table + 1) % len(TABLES), ""
        elif key in "sS":
            columns = ["", *sort_columns(TABLES[self._table])]
            self._sort = columns[(columns.index(self._sort) + 1) % len(columns)]
        elif key in "pP ":
            self._paused = not self._paused
        self._changed.set()

    def _suspend(self, screen: Screen) -> None:
        """Give the terminal back for Ctrl-Z, and take it again when the process continues."""
        screen.leave()
        os.kill(os.getpid(), signal.SIGSTOP)
        screen.enter()
        self._changed.set()
