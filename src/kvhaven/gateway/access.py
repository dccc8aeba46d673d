# SPDX-License-Identifier: Apache-2.0
"""Access to the HTTP API: its address, token and certificate, and the names it answers to.

The service checks these settings before it starts the API, so this module does not import aiohttp.
"""

import hmac
import ipaddress
import ssl
from pathlib import Path
from typing import Final, NamedTuple

from kvhaven.config import Settings
from kvhaven.errors import ConfigError
from kvhaven.peers.addresses import Address, is_loopback, parse_address, read_token

DEFAULT: Final = "127.0.0.1:8888"
"""Address of `kvhaven serve` and `kvhaven api` if `api_listen` is not set."""
OFF: Final = "off"
"""Value of `api_listen` without an API."""
_PORT: Final = 8888
_UNIX: Final = "unix:"
_BEARER: Final = "bearer "


class Access(NamedTuple):
    """Where the API listens, and what it requires of clients.

    Exactly one of `address` (TCP) and `path` (a unix socket) is set. `names` are the host names,
    in lower case, that a request may name besides IP addresses. `token` admits to everything,
    `read_token` to reading, `metrics_token` to the metrics alone; each is empty if it is not set.
    """

    address: Address | None
    path: str
    token: bytes
    certificate: str | None
    key: str | None
    names: frozenset[str]
    read_token: bytes = b""
    metrics_token: bytes = b""

    @property
    def remote(self) -> bool:
        """Whether other machines can connect. Then every request needs the token."""
        return self.address is not None and not is_loopback(self.address)

    def __str__(self) -> str:
        """Return the address as it is written in settings."""
        return f"{_UNIX}{self.path}" if self.address is None else str(self.address)

    def tls(self) -> ssl.SSLContext | None:
        """Return the TLS context; None without a certificate. Raises `ConfigError`."""
        if self.certificate is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self.certificate, self.key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"api_tls_certificate: cannot use {self.certificate} ({error.strerror or error}); "
                "expected a PEM file with a certificate, and its key there or in api_tls_key"
            ) from error
        return context

    def knows_host(self, header: str) -> bool:
        """Return whether the value of a `Host` header names this API.

        A page of another site can make a browser connect to this address, but only under that
        site's name (DNS rebinding). An IP address is therefore safe.
        """
        host = _host_of(header)
        if host in self.names:
            return True
        try:
            found = ipaddress.ip_address(host)
        except ValueError:
            return False
        return self.remote or found.is_loopback

    @property
    def allows_changes(self) -> bool:
        """Whether any client may change something."""
        return bool(self.token) or self.address is None

    def may_read(self, authorization: str) -> bool:
        """Return whether a client with this `Authorization` header may read everything."""
        return not self.remote or _has(authorization, self.token, self.read_token)

    def may_read_metrics(self, authorization: str) -> bool:
        """Return whether a client with this `Authorization` header may read the metrics."""
        return self.may_read(authorization) or _has(authorization, self.metrics_token)

    def may_change(self, authorization: str) -> bool:
        """Return whether a client with this `Authorization` header may change something.

        A unix socket accepts only this user's processes, which could use the service directly.
        """
        return self.address is None or _has(authorization, self.token)


def access_of(settings: Settings) -> Access:
    """Return the access that the settings describe.

    Raises `ConfigError` if an address or file is invalid, or if other machines can connect and the
    token or the certificate is missing.
    """
    listen = settings.api_listen if settings.api_listen not in {None, OFF} else DEFAULT
    assert listen is not None, "checked"
    token = read_token(settings.api_token_file, "api_token_file")
    names = {"localhost", *(settings.api_hosts or "").lower().split()}
    address, path = None, ""
    if listen.startswith(_UNIX):
        path = listen.removeprefix(_UNIX).removeprefix("//")
        if not Path(path).is_absolute():
            raise ConfigError(f"api_listen: invalid path (got {listen!r}); expected unix:/path")
    else:
        address = parse_address(listen, "api_listen", _PORT)
        if address.dynamic:
            raise ConfigError(f"api_listen: a name for several nodes (got {listen!r})")
        names.add(address.host.lower())
    access = Access(
        address,
        path,
        token,
        settings.api_tls_certificate,
        settings.api_tls_key,
        frozenset(names),
        read_token(settings.api_read_token_file, "api_read_token_file"),
        read_token(settings.api_metrics_token_file, "api_metrics_token_file"),
    )
    if token and token in {access.read_token, access.metrics_token}:
        raise ConfigError(
            "api_token_file: the same token as one that must not change anything; expected "
            "different contents of api_token_file, api_read_token_file and api_metrics_token_file"
        )
    missing = [
        name
        for name, value in (
            ("api_token_file", token),
            ("api_tls_certificate", access.certificate),
        )
        if not value
    ]
    if access.remote and missing:
        raise ConfigError(
            f"api_listen: {access} can be reached by other machines, and {' and '.join(missing)} "
            f"{'are' if len(missing) > 1 else 'is'} not set; set api_token_file and "
            "api_tls_certificate, or listen at 127.0.0.1"
        )
    access.tls()
    return access


def _has(authorization: str, *tokens: bytes) -> bool:
    """Return whether the value of an `Authorization` header has one of the tokens that are set."""
    given = authorization.strip()
    if not given.lower().startswith(_BEARER):
        return False
    text = given[len(_BEARER) :].strip().encode(errors="surrogateescape")
    return any(token and hmac.compare_digest(text, token) for token in tokens)


def _host_of(header: str) -> str:
    """Return the host of a `Host` header, in lower case, without its port."""
    text = header.strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0]
