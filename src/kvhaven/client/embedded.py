# SPDX-License-Identifier: Apache-2.0
"""The start of an engine's private service, by the first of the engine's processes."""

import contextlib
import hashlib
import logging
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time

import msgspec

from kvhaven.client.handshake import RefusedError
from kvhaven.client.unix import listens, lock_file, prepare_directory
from kvhaven.config import Settings
from kvhaven.errors import ServiceUnavailableError

logger = logging.getLogger(__name__)

_START_S = 60.0
_DATA_PARALLEL = re.compile(r"_dp\d+$")


class _Reply(msgspec.Struct, frozen=True):
    """The service's report after its start: no error, or the reason why it cannot listen."""

    error: str = ""
    passing: bool = False


def embedded_address(settings: Settings, engine_id: str) -> str:
    """Return the socket of an engine's private service.

    All data-parallel replicas of an engine share one: the address ignores their suffix.
    """
    engine = _DATA_PARALLEL.sub("", engine_id)
    name = hashlib.sha256(engine.encode()).hexdigest()[:16]
    return str(settings.runtime_path / f"engine-{name}.sock")


class EmbeddedService:
    """Starts the service unless one is running; several processes may try concurrently.

    A lock file lets one of them start it while the others wait.
    """

    def __init__(self, settings: Settings, address: str) -> None:
        self._settings = settings
        self._address = address

    def ensure(self) -> None:
        """Return once a service listens, after at most `_START_S` seconds.

        Raises `RefusedError` if its settings do not allow it to start, and
        `ServiceUnavailableError` if a retry may help.
        """
        prepare_directory(self._address)
        if listens(self._address):
            return
        end = time.monotonic() + _START_S
        starting = f"{self._address}.start"
        with lock_file(starting, _START_S, in_vain=lambda: listens(self._address)) as held:
            if listens(self._address):
                return
            if not held:
                raise ServiceUnavailableError(
                    f"another process has been starting the node service for {_START_S:g} s"
                )
            self._start(end)

    def _start(self, end: float) -> None:
        order = msgspec.json.encode({"socket": self._address, "settings": self._settings})
        process = subprocess.Popen(
            [sys.executable, "-m", "kvhaven.service"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C ends the engine, and the service ends after it
            cwd="/",
        )
        # The process forks the service, in the same process group, and ends immediately.
        threading.Thread(target=process.wait, name="kvhaven-wait", daemon=True).start()
        assert process.stdin is not None
        assert process.stdout is not None
        with process.stdin, process.stdout:
            process.stdin.write(order)
            process.stdin.close()
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                raise ServiceUnavailableError(
                    f"the embedded node service did not start in {_START_S:g} s"
                )
            said = process.stdout.readline()
        if not said:
            raise ServiceUnavailableError(
                "the embedded node service ended before it listened; the log above has its reason"
            )
        reply = msgspec.json.decode(said, type=_Reply)
        if reply.passing:
            raise ServiceUnavailableError(reply.error)
        if reply.error:
            raise RefusedError(f"the embedded node service cannot start: {reply.error}")
        logger.info("started the node service at %s", self._address)
