# SPDX-License-Identifier: Apache-2.0
"""Addresses of nodes, and the token that they share, as the settings give them."""

import ipaddress
import socket
from pathlib import Path
from typing import Final, NamedTuple

from kvhaven.errors import ConfigError

PORT: Final = 7420
"""Port where none is given."""
_LEAST_TOKEN: Final = 16
_DNS: Final = "dns://"
_REGISTRIES: Final = ("redis://", "rediss://")
_MOST_PORT: Final = 65535


class Address(NamedTuple):
    """A host and a port. `dynamic`: a name that stands for several nodes, resolved repeatedly."""

    host: str
    port: int
    dynamic: bool = False

    def __str__(self) -> str:
        """Return the address as it is written in settings."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{_DNS if self.dynamic else ''}{host}:{self.port}"


def parse_address(text: str, setting: str, default_port: int = PORT) -> Address:
    """Return the address of `host:port`, `host` or `[v6]:port`; raises `ConfigError`."""
    dynamic = text.startswith(_DNS)
    rest = text.removeprefix(_DNS)
    if rest.startswith("["):
        host, bracket, tail = rest[1:].partition("]")
        port = tail.removeprefix(":") if bracket else "?"
    elif rest.count(":") > 1:  # an IPv6 address alone
        host, port = rest, ""
    else:
        host, _, port = rest.partition(":")
    # Python refuses to read thousands of digits, with an error of its own.
    digits = port.isascii() and port.isdigit() and len(port) <= len(str(_MOST_PORT))
    number = int(port) if digits else default_port
    if not host or "/" in rest or (port and not digits) or number > _MOST_PORT:
        raise ConfigError(
            f"{setting}: invalid address (got {text!r}); expected host:port, [IPv6]:port, or "
            f"dns://name:port for all nodes behind a name"
        )
    return Address(host, number, dynamic)


def parse_peers(text: str) -> tuple[list[Address], list[str]]:
    """Return the addresses and the URLs of registries in the setting `peers`.

    They are separated by spaces or commas. Raises `ConfigError`.
    """
    words = text.replace(",", " ").split()
    registries = [word for word in words if word.startswith(_REGISTRIES)]
    addresses = [parse_address(word, "peers") for word in words if word not in registries]
    return addresses, registries


def resolve(address: Address) -> list[Address]:
    """Return the addresses behind one: itself, unless it is dynamic. Blocks. Raises `OSError`."""
    if not address.dynamic:
        return [address]
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # a name that no DNS name can be
        raise OSError(f"invalid name: {error}") from error
    return sorted({Address(str(where[0]), int(where[1])) for *_, where in found})


def is_loopback(address: Address) -> bool:
    """Whether only this machine can connect to a listener at this address."""
    try:
        return ipaddress.ip_address(address.host).is_loopback
    except ValueError:
        return address.host == "localhost"


def read_token(path: str | None, setting: str = "peer_token_file") -> bytes:
    """Return the token in a file; none for None. Raises `ConfigError`, which does not show it."""
    if path is None:
        return b""
    try:
        token = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"{setting}: cannot read {path} ({error.strerror})") from error
    if len(token) < _LEAST_TOKEN:
        raise ConfigError(
            f"{setting}: {path} holds {len(token)} bytes; expected {_LEAST_TOKEN} or more. "
            "Make one with: openssl rand -hex 32"
        )
    return token


def require_secret(listen: Address, *, secret: bool) -> None:
    """Raise `ConfigError` for a listener that other machines reach and that asks for no proof.

    `secret`: there is a token, or a certificate.
    """
    if not secret and not is_loopback(listen):
        raise ConfigError(
            f"peer_listen: {listen} can be reached by other machines, and no token is set; set "
            "peer_token_file to the same file on all nodes, or peer_cert, peer_key and peer_ca, or "
            "listen at 127.0.0.1"
        )
