# SPDX-License-Identifier: Apache-2.0
"""The HTTP API as a child process of the service: started, respawned, and ended with it."""

import contextlib
import logging
import os
import select
import subprocess
import sys
import threading
from importlib.util import find_spec
from typing import IO, Final

from kvhaven.config import Settings
from kvhaven.config.sources import CONFIG_FILE, ENV_PREFIX
from kvhaven.errors import ConfigError
from kvhaven.gateway.access import access_of

_FIRST_PAUSE_S: Final = 0.1
_LAST_PAUSE_S: Final = 60.0
_START_S: Final = 60.0
"""Time for the first heartbeat: the child imports for a second of CPU, at low priority."""
_SILENCE_S: Final = 10.0
_END_S: Final = 3.0
_PASSED_ON: Final = (
    "api_listen",
    "api_token_file",
    "api_tls_certificate",
    "api_tls_key",
    "api_hosts",
    "log_level",
)

logger = logging.getLogger(__name__)


class ApiProcess:
    """`kvhaven api` for the service at `address`, kept running by a thread.

    The event loop of the service never waits for the child. The child writes a byte to a pipe every
    second; it is killed if it is silent for `silence_s`, and respawned whenever it ended, after a
    pause of 0.1 s that doubles up to a minute while it ends before its first byte. When the service
    is killed, the pipe breaks, and the child ends.

    Raises `ConfigError` if the settings of the API are not valid or not safe, or if aiohttp is not
    installed.
    """

    def __init__(self, settings: Settings, address: str, *, silence_s: float = _SILENCE_S) -> None:
        access_of(settings)
        if find_spec("aiohttp") is None:
            raise ConfigError(
                "api_listen: the HTTP API needs the package aiohttp; install it with: "
                "pip install 'kvhaven[api]'"
            )
        self.started = 0
        """Number of processes started so far."""
        self.process: subprocess.Popen[bytes] | None = None
        self._silence_s = silence_s
        self._environment = _environment(settings, address)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="api", daemon=True)

    def start(self) -> None:
        """Start the child in the background."""
        self._thread.start()

    def close(self) -> None:
        """End the child; kill it if it takes longer than 3 s."""
        self._stopping.set()
        if self.process is not None:
            self.process.terminate()
        self._thread.join(_END_S)
        if self.process is not None and self._thread.is_alive():
            self.process.kill()
            self._thread.join(_END_S)

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._stopping.is_set():
            try:
                worked = self._run_once()
            except OSError as error:
                worked = False
                logger.warning("api: cannot start its process: %s", error)
            if self._stopping.is_set():
                return
            pause_s = _FIRST_PAUSE_S if worked else min(2 * pause_s, _LAST_PAUSE_S)
            logger.warning("api: its process ended; it is started again in %.1f s", pause_s)
            self._stopping.wait(pause_s)

    def _run_once(self) -> bool:
        """Run the child until it ends; return whether it ever worked. Raises `OSError`."""
        command = [sys.executable, "-m", "kvhaven.cli", "api", "--child"]
        with subprocess.Popen(  # noqa: S603  our own command
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env=self._environment,
            start_new_session=True,  # Ctrl-C ends the service, which ends the child
        ) as process:
            self.process = process
            self.started += 1
            if self._stopping.is_set():  # `close` may have come too early to see the process
                process.terminate()
            assert process.stdout is not None
            worked = self._listen(process.stdout)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        return worked

    def _listen(self, pipe: IO[bytes]) -> bool:
        """Read heartbeats until the pipe ends or is silent; return whether there were any."""
        worked = False
        readable = select.poll()  # `select` takes no descriptor above 1023
        readable.register(pipe, select.POLLIN)
        while True:
            limit_s = self._silence_s if worked else _START_S
            if not readable.poll(limit_s * 1000):
                logger.warning("api: its process was silent for %.0f s: killed", limit_s)
                return worked
            if not os.read(pipe.fileno(), 4096):
                return worked
            worked = True


def _environment(settings: Settings, address: str) -> dict[str, str]:
    """Return the child's environment: the settings of the API, and none of the others."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name != CONFIG_FILE and name.removeprefix(ENV_PREFIX).lower() not in _PASSED_ON
    }
    own = {name: getattr(settings, name) for name in _PASSED_ON}
    own["service_address"] = address
    return kept | {
        f"{ENV_PREFIX}{name.upper()}": str(value)
        for name, value in own.items()
        if value is not None
    }
