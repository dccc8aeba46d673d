# SPDX-License-Identifier: Apache-2.0
"""A node service as a process of its own, that can be killed, stopped and started again."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from kvhaven.client.control import connect
from kvhaven.config import Settings
from kvhaven.service.status import ServiceStatus

_SERVE = """
import sys, msgspec
from kvhaven.config import Settings
from kvhaven.service.main import serve
serve(msgspec.json.decode(sys.argv[2], type=Settings), sys.argv[1], embedded=False)
"""


class Node:
    """A node service as a process of its own; it can be killed, stopped and started again."""

    def __init__(
        self, folder: Path, arena_bytes: int = 1 << 20, *, disk: bool = False, **settings: Any
    ) -> None:
        self.address = str(folder / "node.sock")
        self._settings = Settings(
            max_local_cpu_size=arena_bytes,
            local_disk=str(folder / "disk") if disk else None,
            log_level="ERROR",
            embedded_linger_s=600.0,
            verify_memory="sample",
            **settings,
        )
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers."""
        # Not `python -m kvhaven.service`: that forks, and what is killed must be the service.
        settings = msgspec.json.encode(self._settings)
        self._process = subprocess.Popen([sys.executable, "-c", _SERVE, self.address, settings])
        end = time.monotonic() + 20
        while time.monotonic() < end:
            try:
                self.status()
            except Exception:  # noqa: BLE001 - it is not there yet
                time.sleep(0.02)
            else:
                return
        raise AssertionError("the service did not start")

    def stop(self) -> None:
        """Stop the process, and return when it stands still."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)
        state = Path(f"/proc/{self._process.pid}/stat")
        while state.read_text().rsplit(")", 1)[1].split()[0] != "T":
            time.sleep(0.001)

    def resume(self) -> None:
        """Let a stopped process go on."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill it without warning."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def status(self) -> ServiceStatus:
        """Return what it says about itself."""
        with connect(self.address) as control:
            return msgspec.json.decode(control.status(), type=ServiceStatus)

    def clear(self) -> None:
        """Drop everything it has."""
        with connect(self.address) as control:
            control.clear()


@contextmanager
def running_node(
    folder: Path, arena_bytes: int = 1 << 20, *, disk: bool = False, **settings: Any
) -> Iterator[Node]:
    """Run a node service for the duration of a `with`."""
    node = Node(folder, arena_bytes, disk=disk, **settings)
    node.start()
    try:
        yield node
    finally:
        node.kill()
