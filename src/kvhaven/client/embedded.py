# SPDX-License-Identifier: Apache-2.0
"""Starting the private service of an engine, by whichever side comes first."""

import fcntl
import hashlib
import logging
import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec

from kvhaven.config import Settings
from kvhaven.errors import ServiceUnavailableError

logger = logging.getLogger(__name__)

_START_S = 60.0
_DATA_PARALLEL = re.compile(r"_dp\d+$")


def runtime_dir(settings: Settings) -> Path:
    """Return the directory of sockets: the setting's, $XDG_RUNTIME_DIR's, or one in /tmp."""
    if settings.runtime_dir is not None:
        return Path(settings.runtime_dir)
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and Path(base).is_dir():
        return Path(base) / "kvhaven"
    return Path(f"/tmp/kvhaven-{os.geteuid()}")  # noqa: S108 - made 0700, peers are checked


def embedded_address(settings: Settings, engine_id: str) -> str:
    """Return the socket of an engine's private service.

    All data-parallel replicas of an engine share one: their suffix is left out.
    """
    engine = _DATA_PARALLEL.sub("", engine_id)
    name = hashlib.sha256(engine.encode()).hexdigest()[:16]
    return str(runtime_dir(settings) / f"engine-{name}.sock")


class EmbeddedService:
    """Starts the service unless somebody did; several processes may try at once.

    A lock file lets one of them start it while the others wait.
    """

    def __init__(self, settings: Settings, address: str) -> None:
        self._settings = settings
        self._address = address

    def ensure(self) -> None:
        """Return once a service listens. Raises `ServiceUnavailableError`."""
        if _answers(self._address):
            return
        Path(self._address).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(f"{self._address}.start", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _answers(self._address):
                self._start()
        finally:
            os.close(lock)

    def _start(self) -> None:
        order = msgspec.json.encode({"socket": self._address, "settings": self._settings})
        process = subprocess.Popen(
            [sys.executable, "-m", "kvhaven.service"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        assert process.stdin is not None
        process.stdin.write(order)
        process.stdin.close()
        # Collects the exit status when the service ends before we do.
        threading.Thread(target=process.wait, name="kvhaven-wait", daemon=True).start()
        end = time.monotonic() + _START_S
        while time.monotonic() < end:
            if _answers(self._address):
                return
            if process.poll() is not None:
                raise ServiceUnavailableError(
                    f"the embedded node service ended at once with status {process.returncode}; "
                    "its reason stands in the log above"
                )
            time.sleep(0.02)
        raise ServiceUnavailableError(f"the embedded node service did not start in {_START_S:g} s")


def _answers(address: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(address)
        except OSError:
            return False
        return True
