# SPDX-License-Identifier: Apache-2.0
"""Choice of the service that a command talks to."""

from pathlib import Path

from kvhaven.client.unix import listens
from kvhaven.config import Settings


def service_socket(settings: Settings, given: Path | None) -> str:
    """Return the given socket, else service_address, else the one in the runtime directory."""
    if given is not None:
        return str(given.absolute())
    return settings.service_address or str(settings.runtime_path / "service.sock")


def find_socket(settings: Settings, given: Path | None, *, several: bool = False) -> str:
    """Return `service_socket`, or the socket of the only embedded service that is running.

    With `several`, return that of one of them.
    """
    address = service_socket(settings, given)
    if given is None and not listens(address):
        embedded = sorted(settings.runtime_path.glob("engine-*.sock"))
        if several:
            embedded = [file for file in embedded if listens(str(file))][:1]
        if len(embedded) == 1:
            return str(embedded[0])
    return address
