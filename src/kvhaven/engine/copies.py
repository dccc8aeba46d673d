# SPDX-License-Identifier: Apache-2.0
"""Thread that waits for copies in place of the worker's thread."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvhaven.devices.base import CopyJob
from kvhaven.types import Checksum

logger = logging.getLogger(__name__)

COPY_DEADLINE_S = 60.0
"""Duration after which a running copy is logged; its resources are held until it ends."""

LOST_S = 2 * COPY_DEADLINE_S
"""Duration after which a failed copy that has not ended counts as lost, with its device."""

_LOOK_AGAIN_S = 1.0


class JoinedCopy:
    """Several copies as one `CopyJob`: it ends with the last, with the first part's error."""

    def __init__(self, parts: Sequence[CopyJob]) -> None:
        self.parts = parts

    @property
    def error(self) -> str:
        """Reason of the first failure; empty if there was none."""
        return next((part.error for part in self.parts if part.error), "")

    @property
    def checksums(self) -> Sequence[Checksum]:
        """The checksums of all parts, in order."""
        return [checksum for part in self.parts for checksum in part.checksums]

    def done(self) -> bool:
        """Return whether all parts have ended."""
        return all(part.done() for part in self.parts)

    def wait(self, timeout_s: float) -> bool:
        """Block this thread until `done`, for at most `timeout_s` seconds; return `done`."""
        return all_ended(self.parts, time.monotonic() + timeout_s)


def parts_of(copy: CopyJob) -> Sequence[CopyJob]:
    """Return the copies of the device that a copy consists of: usually itself."""
    return copy.parts if isinstance(copy, JoinedCopy) else (copy,)


def all_ended(copies: Iterable[CopyJob], deadline: float) -> bool:
    """Wait for copies until `deadline` (`time.monotonic`); return whether all have ended."""
    return all(copy.wait(max(0.0, deadline - time.monotonic())) for copy in copies)


class _Watched(NamedTuple):
    """Watched copy, its callback, and the start of the watch (`time.monotonic`)."""

    copy: CopyJob
    ended: Callable[[], None]
    since: float

    @property
    def waited_s(self) -> float:
        """Seconds since the start of the watch."""
        return time.monotonic() - self.since


class CopyWatch:
    """Calls back when copies end. A thread waits, since an idle engine runs no steps.

    It waits for copies in the order of `watch`. Copies that have failed or take too long do not
    delay others: they are set aside and polled. A lost copy is never called back: its resources
    stay in use. A synchronous device needs no thread: `watch` calls back directly.
    """

    def __init__(self, *, synchronous: bool) -> None:
        self._copies: queue.SimpleQueue[_Watched | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if not synchronous:
            self._thread = threading.Thread(target=self._run, name="kvhaven-copies", daemon=True)
            self._thread.start()

    def watch(self, copy: CopyJob, ended: Callable[[], None]) -> None:
        """Register `ended`, to be called once when the copy has succeeded or failed."""
        watched = _Watched(copy, ended, time.monotonic())
        if self._thread is None:
            _call_back(watched)
        else:
            self._copies.put(watched)

    def close(self) -> None:
        """End the thread after it has called back for all ended copies."""
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
    """Wait for a copy and call back; return False if it must be set aside."""
    while not watched.copy.wait(_LOOK_AGAIN_S):
        if watched.waited_s > COPY_DEADLINE_S:
            logger.warning("a copy has run for over %d s", COPY_DEADLINE_S)
            return False
        if watched.copy.error:
            return False
    _call_back(watched)
    return True


def _is_over(late: _Watched) -> bool:
    """Call back if a copy that was set aside has ended; return whether to stop polling it."""
    if late.copy.done():
        _call_back(late)
        return True
    return bool(late.copy.error) and late.waited_s > LOST_S


def _call_back(watched: _Watched) -> None:
    try:
        watched.ended()
    except Exception:  # the callbacks of later copies must still run
        logger.exception("a copy ended, but its callback failed")
