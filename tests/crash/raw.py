# SPDX-License-Identifier: Apache-2.0
"""A client that says what it likes, frame by frame or byte by byte."""

import contextlib
import socket
from typing import Self

from kvhaven.protocol import (
    FrameReader,
    Message,
    ServiceMessage,
    decode_service,
    encode,
)
from tests.crash.node import NodeThread


class Raw:
    """A client that says what it likes."""

    def __init__(self, node: NodeThread) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(10)
        self.socket.connect(node.address)
        self._reader = FrameReader()
        self._messages: list[ServiceMessage] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def say(self, *messages: Message) -> "Raw":
        self.raw(b"".join(encode(message) for message in messages))
        return self

    def raw(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(data)

    def hear(self) -> ServiceMessage | None:
        """Return the next message; None when the connection is closed."""
        while not self._messages:
            try:
                data = self.socket.recv(65536)
            except ConnectionResetError:
                data = b""
            if not data:
                return None
            self._messages += [decode_service(body) for body in self._reader.feed(data)]
        return self._messages.pop(0)

    def is_closed(self) -> bool:
        while self.hear() is not None:
            pass
        return True
