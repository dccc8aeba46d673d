# SPDX-License-Identifier: Apache-2.0
"""Waiting for copies off the worker's thread."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from kvhaven.devices.base import CopyJob

logger = logging.getLogger(__name__)

COPY_DEADLINE_S = 60.0
"""A copy that runs longer is worth a warning; nothing of it is given back before it ended."""

LOST_S = 2 * COPY_DEADLINE_S
"""A copy that failed and has not ended by then never will: the device is lost."""

_LOOK_AGAIN_S = 1.0


def all_ended(copies: Iterable[CopyJob], deadline: float) -> bool:
    """Wait for copies, all together until `deadline` (`time.monotonic`); return if all ended."""
    return all(copy.wait(max(0.0, deadline - time.monotonic())) for copy in copies)


class _Watched(NamedTuple):
    """A copy, what to call when it ends, and since when it is watched (`time.monotonic`)."""

    copy: CopyJob
    ended: Callable[[], None]
    since: float

    @property
    def waited_s(self) -> float:
        """How long it has been watched."""
        return time.monotonic() - self.since


class CopyWatch:
    """Calls back when copies end. Nothing steps when the engine is idle, so a thread waits.

    Copies are waited for in the order of `watch`, but those that have failed or take too long
    hold nobody up: they are put aside, and looked at now and then. A copy that is lost is never
    called back: what it holds stays in use. On a synchronous device no thread is needed: `watch`
    then calls back itself.
    """

    def __init__(self, *, synchronous: bool) -> None:
        self._copies: queue.SimpleQueue[_Watched | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if not synchronous:
            self._thread = threading.Thread(target=self._run, name="kvhaven-copies", daemon=True)
            self._thread.start()

    def watch(self, copy: CopyJob, ended: Callable[[], None]) -> None:
        """Have `ended` called, once, when the copy is done, well or not."""
        watched = _Watched(copy, ended, time.monotonic())
        if self._thread is None:
            _call_back(watched)
        else:
            self._copies.put(watched)

    def close(self) -> None:
        """End the thread when it has called back for all copies that have ended."""
        if self._thread is not None:
            self._copies.put(None)
            self._thread.join(timeout=COPY_DEADLINE_S)

    def _run(self) -> None:
        aside: list[_Watched] = []
        closed = False
        while not closed:
            try:
                watched = self._copies.get(timeout=_LOOK_AGAIN_S if aside else None)
            except queue.Empty:
                pass
            else:
                closed = watched is None
                if watched is not None and not _followed_up(watched):
                    aside.append(watched)
            aside = [late for late in aside if not _is_over(late)]


def _followed_up(watched: _Watched) -> bool:
    """Wait for a copy and call back; return False if it is to be put aside."""
    while not watched.copy.wait(_LOOK_AGAIN_S):
        if watched.waited_s > COPY_DEADLINE_S:
            logger.warning("a copy has run for over %d s", COPY_DEADLINE_S)
            return False
        if watched.copy.error:
            return False
    _call_back(watched)
    return True


def _is_over(late: _Watched) -> bool:
    """Call back if a copy that was put aside has ended; return whether to look no more."""
    if late.copy.done():
        _call_back(late)
        return True
    return bool(late.copy.error) and late.waited_s > LOST_S


def _call_back(watched: _Watched) -> None:
    try:
        watched.ended()
    except Exception:  # the copies after this one have to be followed up all the same
        logger.exception("a copy ended, but could not be followed up")
