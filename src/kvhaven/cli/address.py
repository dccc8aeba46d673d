# SPDX-License-Identifier: Apache-2.0
"""Which service a command means."""

from pathlib import Path

from kvhaven.client.unix import listens
from kvhaven.config import Settings


def service_socket(settings: Settings, given: Path | None) -> str:
    """Return the socket: the one given, else service_address, else the runtime directory's."""
    if given is not None:
        return str(given.absolute())
    return settings.service_address or str(settings.runtime_path / "service.sock")


def find_socket(settings: Settings, given: Path | None) -> str:
    """Like `service_socket`, but an embedded service will do when it is the only one running."""
    address = service_socket(settings, given)
    if given is None and not listens(address):
        embedded = sorted(settings.runtime_path.glob("engine-*.sock"))
        if len(embedded) == 1:
            return str(embedded[0])
    return address
