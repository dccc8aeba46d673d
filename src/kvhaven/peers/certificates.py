# SPDX-License-Identifier: Apache-2.0
"""TLS between nodes, where every node has a certificate of the cluster's authority."""

import contextlib
import logging
import select
import socket
import ssl
import threading
import time
from pathlib import Path
from typing import Final

from kvhaven.config import Settings
from kvhaven.errors import ConfigError
from kvhaven.peers.wire import PeerError, tls_refusal

_log = logging.getLogger(__name__)

_SETTINGS: Final = ("peer_cert", "peer_key", "peer_ca")
_TLS_HANDSHAKE: Final = 0x16
"""First byte of a TLS connection."""
_LOOK_S: Final = 1.0
"""Interval in which the files are looked at because of open connections."""
_LINGER_S: Final = 0.5
_LINGER_BYTES: Final = 1 << 16
_START_BYTES: Final = 4
"""Bytes that tell a TLS connection from frames, whose length has zeros in bytes 2 and 3."""


class TlsCredential:
    """Certificates of both nodes of a connection: valid until one ends or the files change."""

    def __init__(self, certificates: "Certificates", context: ssl.SSLContext, ends: float) -> None:
        self._certificates = certificates
        self._context = context
        self._ends = ends

    @property
    def valid(self) -> bool:
        """Whether the files are still those of the handshake, and the other's has not ended."""
        return self._certificates.uses(self._context) and time.time() < self._ends


class Certificates:
    """A node's certificate and key, and the authority whose certificates it accepts: PEM files.

    Any certificate of the authority is that of a node, so host names do not matter. The files are
    read again when they change, so certificates can be renewed while the service runs; connections
    by the old ones are then made again. If they cannot be read, the last ones stay in use, which is
    logged. Without `encrypt_data`, chunks are sent over connections of their own that are not
    encrypted.
    """

    def __init__(self, cert: str, key: str, ca: str, *, encrypt_data: bool = False) -> None:
        """Read the files. Raises `ConfigError` if they are not what they should be."""
        self.encrypt_data = encrypt_data
        self.problem = ""
        """Why changed files are not in use."""
        self._cert, self._key, self._ca = cert, key, ca
        self._lock = threading.Lock()
        self._seen: object = None
        self._refused: object = None
        self._looked = 0.0
        self._contexts = self._load()

    def uses(self, context: ssl.SSLContext) -> bool:
        """Return whether a context is of the present files, which are looked at once a second.

        Called from any thread.
        """
        if time.monotonic() - self._looked >= _LOOK_S:
            self._current()
        return any(context is one for one in self._contexts)

    def listen(self, sock: socket.socket, deadline: float) -> socket.socket:
        """Begin to encrypt a connection that another node has opened, if it begins with TLS.

        `shake_hands` is next. Raises `PeerError` if nothing comes.
        """
        return self._wrap(sock, listens=True) if _begins_tls(sock, deadline) else sock

    def connect(self, sock: socket.socket) -> ssl.SSLSocket:
        """Begin to encrypt a connection that this node has opened. `shake_hands` is next."""
        return self._wrap(sock, listens=False)

    def shake_hands(self, sock: ssl.SSLSocket, deadline: float) -> TlsCredential:
        """Do the handshake; return by which certificates. Raises `PeerError`."""
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            sock.do_handshake()
            ends = (sock.getpeercert() or {}).get("notAfter")
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            if not isinstance(error, OSError):
                raise PeerError("the connection was closed before TLS") from error
            if sock.server_side:
                _let_read(sock)
            raise PeerError(tls_refusal(error)) from error
        return TlsCredential(self, sock.context, ssl.cert_time_to_seconds(str(ends)))

    def _wrap(self, sock: socket.socket, *, listens: bool) -> ssl.SSLSocket:
        context = self._current()[0 if listens else 1]
        try:
            return context.wrap_socket(sock, server_side=listens, do_handshake_on_connect=False)
        except OSError as error:
            sock.close()
            raise PeerError(f"the connection was closed before TLS: {error}") from error

    def _current(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        """Return the contexts of the present files, or of the last ones that could be read."""
        with self._lock:
            self._looked = time.monotonic()
            versions = self._versions()
            if versions not in (self._seen, self._refused):
                try:
                    self._contexts = self._load()
                except ConfigError as error:  # a file may be in the middle of being replaced
                    self.problem, self._refused = str(error), versions
                    _log.warning("%s; the certificates read before stay in use", error)
                else:
                    self.problem, self._refused = "", None
                    _log.info("certificates were renewed: peers connect again")
            elif versions == self._seen:
                self.problem = ""
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
                if not more or _is_over(sock) or time.monotonic() >= deadline:
                    raise PeerError("the connection was closed")
                time.sleep(0.01)  # a part of four bytes came
            start = more
    except OSError as error:
        raise PeerError(f"nothing was received: {error.strerror or error}") from error
    return start[0] == _TLS_HANDSHAKE and start[2:] != b"\0\0"


def _is_over(sock: socket.socket) -> bool:
    """Return whether a connection ended, on either side, although some bytes can still be read."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return bool(poll.poll(0))


def _let_read(sock: ssl.SSLSocket) -> None:
    """Let the other side read why it was refused: with unread bytes, a close would discard it."""
    end, left = time.monotonic() + _LINGER_S, _LINGER_BYTES
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_WR)
        while left > 0 and (wait_s := end - time.monotonic()) > 0:
            sock.settimeout(wait_s)
            got = len(socket.socket.recv(sock, left))
            if not got:
                return
            left -= got
