# SPDX-License-Identifier: Apache-2.0
"""A proxy between clients and the service that delays, swallows, or drops what they say."""

import contextlib
import socket
import threading
import time
from pathlib import Path
from typing import Final, Self

_MOST: Final = 1 << 16


class Proxy:
    """Forwards both ways, descriptors too. Change its attributes at any time.

    `delay_s` is added to each piece of an answer; with `swallow` nothing passes in either
    direction; `drop` closes every connection, towards the client and the service.
    """

    def __init__(self, path: Path, service: str) -> None:
        self.address = str(path)
        self.delay_s = 0.0
        self.swallow = False
        self._service = service
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._lock = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.address)
        self._listener.listen(64)
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        self.drop()

    @property
    def connections(self) -> int:
        """How many there are since the last `drop`, broken ones included."""
        return len(self._pairs)

    def drop(self) -> None:
        """Close every connection."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            _shut(*pair)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            service = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                service.connect(self._service)
            except OSError:
                client.close()
                service.close()
                continue
            with self._lock:
                self._pairs.append((client, service))
            for source, target, delayed in ((client, service, False), (service, client, True)):
                threading.Thread(
                    target=self._forward, args=(source, target, delayed), daemon=True
                ).start()

    def _forward(self, source: socket.socket, target: socket.socket, delayed: bool) -> None:
        with contextlib.suppress(OSError):
            while True:
                data, descriptors, _, _ = socket.recv_fds(source, _MOST, 16)
                if not data:
                    break
                if delayed and self.delay_s:
                    time.sleep(self.delay_s)
                while self.swallow:
                    time.sleep(0.01)
                try:
                    if descriptors:
                        sent = socket.send_fds(target, [data], descriptors)
                        data = data[sent:]
                    target.sendall(data)
                finally:
                    for descriptor in descriptors:
                        socket.close(descriptor)
        _shut(source, target)


def _shut(*sockets: socket.socket) -> None:
    for sock in sockets:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()
