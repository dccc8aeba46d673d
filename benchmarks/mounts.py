# SPDX-License-Identifier: Apache-2.0
"""A directory that one end of a link serves and the other has mounted: SFTP, not encrypted."""

import contextlib
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from benchmarks.networks import Link

_SERVER: Final = Path("/usr/lib/openssh/sftp-server")
_PATIENCE_S: Final = 30.0
_OPTIONS: Final = "max_conns=4,cache_timeout=0,attr_timeout=0,entry_timeout=0,negative_timeout=0"
"""Options of sshfs: several connections, and nothing of the server's answers is kept."""


class NoMountError(Exception):
    """The directory cannot be mounted; the text says why."""


@contextlib.contextmanager
def mounted(folder: Path, at: Path, ends: Link) -> Iterator[Path]:
    """Mount `folder` of the near end at the far end, as a new folder. Raises `NoMountError`."""
    if shutil.which("sshfs") is None or not _SERVER.exists():
        raise NoMountError("sshfs: not found; apt-get install sshfs openssh-sftp-server")
    at.mkdir()
    with contextlib.ExitStack() as stack:
        with ends.near.inside():
            listener = stack.enter_context(socket.create_server((ends.near.address, 0)))
        threading.Thread(target=_serve, args=(listener,), daemon=True).start()
        port = listener.getsockname()[1]
        line = ["sshfs", f"{ends.near.address}:{folder}", str(at), "-f"]
        line += ["-o", f"directport={port},{_OPTIONS}"]
        with ends.far.inside():
            process = stack.enter_context(subprocess.Popen(line))
        stack.callback(process.terminate)
        end = time.monotonic() + _PATIENCE_S
        while not at.is_mount():
            if process.poll() is not None or time.monotonic() > end:
                raise NoMountError(f"sshfs did not mount {folder} (exit status {process.poll()})")
            time.sleep(0.05)
        yield at


def _serve(listener: socket.socket) -> None:
    """Start a server for each connection, until the listener is closed."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            subprocess.Popen([str(_SERVER)], stdin=connection.fileno(), stdout=connection.fileno())
