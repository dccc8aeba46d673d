# SPDX-License-Identifier: Apache-2.0
"""TLS between nodes, where every node has a certificate of the cluster's authority."""

import contextlib
import socket
import ssl
import threading
import time
from pathlib import Path
from typing import Final

from kvhaven.config import Settings
from kvhaven.errors import ConfigError
from kvhaven.peers.wire import PeerError

_SETTINGS: Final = ("peer_cert", "peer_key", "peer_ca")
_TLS_HANDSHAKE: Final = 0x16
"""First byte of a TLS connection."""
_START_BYTES: Final = 4
"""Bytes that tell a TLS connection from frames, whose length has zeros in bytes 2 and 3."""


class Certificates:
    """A node's certificate and key, and the authority whose certificates it accepts: PEM files.

    Any certificate of the authority is that of a node, so host names do not matter. The files are
    read again when they change, so certificates can be renewed while the service runs. Without
    `encrypt_data`, chunks are sent over connections of their own that are not encrypted.
    """

    def __init__(self, cert: str, key: str, ca: str, *, encrypt_data: bool = False) -> None:
        """Read the files. Raises `ConfigError` if they are not what they should be."""
        self.encrypt_data = encrypt_data
        self._cert, self._key, self._ca = cert, key, ca
        self._lock = threading.Lock()
        self._seen: object = None
        self._contexts = self._load()

    def listen(self, sock: socket.socket, deadline: float) -> socket.socket:
        """Encrypt a connection that another node has opened, unless it begins without TLS.

        Raises `PeerError` if TLS fails, or if nothing comes.
        """
        if not _begins_tls(sock, deadline):
            return sock
        return self._wrap(self._current()[0], sock, deadline, listens=True)

    def connect(self, sock: socket.socket, deadline: float) -> ssl.SSLSocket:
        """Encrypt a connection that this node has opened. Raises `PeerError`."""
        return self._wrap(self._current()[1], sock, deadline, listens=False)

    def _wrap(
        self, context: ssl.SSLContext, sock: socket.socket, deadline: float, *, listens: bool
    ) -> ssl.SSLSocket:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            wrapped = context.wrap_socket(sock, server_side=listens)
        except OSError as error:  # ssl.SSLError is one
            sock.close()
            reason = getattr(error, "verify_message", None) or error.strerror or str(error)
            raise PeerError(
                f"no TLS connection ({reason}): both nodes need peer_cert, peer_key and peer_ca, "
                "with certificates of one authority"
            ) from error
        if wrapped.version() is None:  # the other side was gone, so there was no handshake
            wrapped.close()
            raise PeerError("the connection was closed before TLS")
        return wrapped

    def _current(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        """Return the contexts of the present files, or of the last ones that could be read."""
        with self._lock:
            if self._versions() != self._seen:
                with contextlib.suppress(ConfigError):  # a file is being replaced
                    self._contexts = self._load()
            return self._contexts

    def _load(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        seen = self._versions()
        contexts = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        contexts[0].num_tickets = 0  # a session that is resumed would outlive the certificate
        for context in contexts:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_REQUIRED
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            try:
                # Without a password OpenSSL would ask the terminal for one, and wait.
                context.load_cert_chain(self._cert, self._key, password=lambda: "")
            except (OSError, ValueError) as error:
                raise ConfigError(
                    f"peer_cert, peer_key: cannot use {self._cert!r} with {self._key!r} "
                    f"({error}); expected PEM files of a certificate and its key"
                ) from error
            try:
                context.load_verify_locations(self._ca)
            except (OSError, ValueError) as error:
                raise ConfigError(
                    f"peer_ca: cannot use {self._ca!r} ({error}); expected a PEM "
                    "file with the certificate of the authority"
                ) from error
        self._seen = seen
        return contexts

    def _versions(self) -> object:
        try:
            found = [Path(path).stat() for path in (self._cert, self._key, self._ca)]
        except (OSError, ValueError):
            return None
        return [(one.st_dev, one.st_ino, one.st_mtime_ns, one.st_size) for one in found]


def read_certificates(settings: Settings) -> Certificates | None:
    """Return the certificates that the settings name; None if they name none.

    Raises `ConfigError` if only some are set, or a file cannot be used.
    """
    paths = {name: getattr(settings, name) for name in _SETTINGS}
    missing = [name for name, path in paths.items() if path is None]
    if len(missing) == len(paths):
        if settings.peer_encrypt_data:
            raise ConfigError(
                "peer_encrypt_data: on, but there are no certificates; set peer_cert, peer_key and "
                "peer_ca"
            )
        return None
    if missing:
        raise ConfigError(
            f"{', '.join(missing)}: not set, but {next(n for n in paths if n not in missing)} is; "
            "set peer_cert, peer_key and peer_ca, or none of them"
        )
    cert, key, ca = paths.values()
    return Certificates(cert, key, ca, encrypt_data=settings.peer_encrypt_data)


def _begins_tls(sock: socket.socket, deadline: float) -> bool:
    """Return whether a new connection begins with TLS. Raises `PeerError` if nothing comes."""
    start = b""
    try:
        while len(start) < _START_BYTES:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            more = sock.recv(_START_BYTES, socket.MSG_PEEK)
            if len(more) == len(start):
                if not more or time.monotonic() >= deadline:
                    raise PeerError("the connection was closed")
                time.sleep(0.01)  # a part of four bytes came
            start = more
    except OSError as error:
        raise PeerError(f"nothing was received: {error.strerror or error}") from error
    return start[0] == _TLS_HANDSHAKE and start[2:] != b"\0\0"
