# SPDX-License-Identifier: Apache-2.0
"""Waiting for copies off the worker's thread."""

import logging
import queue
import threading
from collections.abc import Callable

from kvhaven.devices.base import CopyJob, Device

logger = logging.getLogger(__name__)

COPY_DEADLINE_S = 60.0
"""A copy that runs longer is worth a warning; nothing of it is given back before it ended."""


class CopyWatch:
    """Calls back when copies end. Nothing steps when the engine is idle, so a thread waits.

    Copies are waited for in the order of `watch`. On a synchronous device no thread is
    needed: `watch` then calls back itself.
    """

    def __init__(self, *, synchronous: bool) -> None:
        self._copies: queue.SimpleQueue[tuple[CopyJob, Callable[[], None]] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None
        if not synchronous:
            self._thread = threading.Thread(target=self._run, name="kvhaven-copies", daemon=True)
            self._thread.start()

    def watch(self, copy: CopyJob, ended: Callable[[], None]) -> None:
        """Have `ended` called, once, when the copy is done, well or not. It must not raise."""
        if self._thread is None:
            copy.wait(COPY_DEADLINE_S)
            ended()
        else:
            self._copies.put((copy, ended))

    def close(self) -> None:
        """End the thread when it has called back for all copies that it watches."""
        if self._thread is not None:
            self._copies.put(None)
            self._thread.join(timeout=COPY_DEADLINE_S)

    def _run(self) -> None:
        while (watched := self._copies.get()) is not None:
            copy, ended = watched
            while not copy.wait(COPY_DEADLINE_S):
                logger.warning("a copy has run for over %d s", COPY_DEADLINE_S)
            try:
                ended()
            except Exception:  # the thread has to live for the copies after this one
                logger.exception("what follows a copy failed")


def settled(device: Device) -> bool:
    """Wait until the device has nothing under way, and say whether that is so.

    Asked when a copy could not be started for a reason outside of the contract: nothing is
    known of what was begun, and host memory is only given back when it has ended.
    """
    try:
        device.synchronize()
    except Exception:  # a driver may raise anything; the answer is no
        logger.exception("the device cannot be waited for; memory of a copy stays held")
        return False
    return True
