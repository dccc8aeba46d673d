# SPDX-License-Identifier: Apache-2.0
"""The HTTP API as a child process of the service: started, respawned, and ended with it."""

import contextlib
import logging
import os
import secrets
import select
import socket
import stat
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Final

from msgspec.structs import replace

from kvhaven.client.unix import prepare_directory
from kvhaven.config import Settings
from kvhaven.config.sources import ENV_PREFIX
from kvhaven.errors import ConfigError, KVHavenError
from kvhaven.gateway.access import DEFAULT, OFF, access_of
from kvhaven.peers.addresses import is_loopback, parse_address

_FIRST_PAUSE_S: Final = 0.1
_LAST_PAUSE_S: Final = 60.0
_BUSY_PAUSE_S: Final = 1.0
_START_S: Final = 60.0
"""Time for the first heartbeat: the child imports for a second of CPU, at low priority."""
_SILENCE_S: Final = 10.0
_END_S: Final = 3.0
_FILE: Final = "api-token"
_PASSED_ON: Final = (
    "api_listen",
    "api_token_file",
    "api_read_token_file",
    "api_metrics_token_file",
    "api_tls_certificate",
    "api_tls_key",
    "api_hosts",
    "plugins",
    "runtime_plugin_locations",
    "plugin_engine_url",
    "plugin_may_change",
    "plugin_memory",
    "log_level",
)

_SIZES: Final = frozenset({"plugin_memory"})
"""Settings of these in bytes: a plain number would be GiB."""

logger = logging.getLogger(__name__)


def api_for(settings: Settings, address: str, *, by_default: bool) -> "ApiProcess | None":
    """Return the API of the service at `address`, not started; None if it is off.

    Without `api_listen`, `by_default` starts it at the default address, as soon as that is free;
    whatever else prevents it is a line in the log. On this machine alone, a token file is created
    if none is set. Raises `ConfigError` as `ApiProcess` does if `api_listen` is set.
    """
    if settings.api_listen == OFF or (settings.api_listen is None and not by_default):
        return None
    wait_for = ""
    try:
        if settings.api_listen is None:
            wait_for = DEFAULT
            settings = replace(settings, api_listen=DEFAULT)
        if settings.api_token_file is None and not is_remote(settings):
            settings = replace(settings, api_token_file=own_token(settings.runtime_path))
        return ApiProcess(settings, address, wait_for=wait_for)
    except KVHavenError as error:
        if settings.api_listen not in {None, DEFAULT} or not by_default:
            raise
        logger.warning("no HTTP API: %s. Set api_listen to another address, or to off", error)
        return None


def _is_free(listen: str) -> bool:
    """Return whether no other process listens at an address; False if that is not known."""
    address = parse_address(listen, "api_listen")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address.host, address.port))
    except OSError:
        return False
    return True


def is_remote(settings: Settings) -> bool:
    """Return whether other machines can reach the API."""
    listen = settings.api_listen or DEFAULT
    if listen.startswith("unix:"):
        return False
    return not is_loopback(parse_address(listen, "api_listen", 1))


def own_token(directory: Path) -> str:
    """Return the file with this user's token, which is created at first. Raises `KVHavenError`."""
    file = directory / _FILE
    prepare_directory(str(file))
    try:
        if not os.path.lexists(file):
            _publish(file, f"{secrets.token_hex(32)}\n".encode())
        status = file.lstat()
    except OSError as error:
        raise ConfigError(f"api_token_file: cannot create {file} ({error.strerror})") from error
    private = status.st_uid == os.geteuid() and not status.st_mode & 0o077
    if not (private and stat.S_ISREG(status.st_mode)):
        raise ConfigError(
            f"api_token_file: other users may read or own {file}, or it is no file; remove it"
        )
    return str(file)


def _publish(file: Path, content: bytes) -> None:
    """Create a private file as a whole, unless another process was first. Raises `OSError`."""
    draft = file.with_name(f"{file.name}.{secrets.token_hex(8)}")
    # Exclusive: it follows no link that somebody else has placed.
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
        with contextlib.suppress(FileExistsError):
            file.hardlink_to(draft)
    finally:
        draft.unlink()


class ApiProcess:
    """`kvhaven api` for the service at `address`, kept running by a thread.

    The event loop of the service never waits for the child. The child writes a byte to a pipe every
    second; it is killed if it is silent for `silence_s`, and respawned whenever it ended, after a
    pause of 0.1 s that doubles up to a minute while it ends before its first byte. When the service
    is killed, the pipe breaks, and the child ends. With `wait_for`, an address, the first child is
    started when no other process listens there.

    Raises `ConfigError` if the settings of the API are not valid or not safe, or if aiohttp is not
    installed.
    """

    def __init__(
        self,
        settings: Settings,
        address: str,
        *,
        silence_s: float = _SILENCE_S,
        wait_for: str = "",
    ) -> None:
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
        self._wait_for = wait_for
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
        if self._wait_for and not _is_free(self._wait_for):
            logger.warning(
                "no HTTP API: %s is not free; it starts when it is. Set api_listen to another "
                "address, or to off",
                self._wait_for,
            )
            while not (self._stopping.wait(_BUSY_PAUSE_S) or _is_free(self._wait_for)):
                pass
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
    kept = {n: v for n, v in os.environ.items() if not n.startswith((ENV_PREFIX, "LMCACHE_"))}
    own = {name: getattr(settings, name) for name in _PASSED_ON}
    own["service_address"] = address
    return kept | {
        f"{ENV_PREFIX}{name.upper()}": f"{value}B" if name in _SIZES else str(value)
        for name, value in own.items()
        if value is not None
    }
