# SPDX-License-Identifier: Apache-2.0
"""`kvhaven limit`: change of a tenant's quotas in a running service."""

from pathlib import Path
from typing import Annotated

import typer

from kvhaven.cli.tenant import Tenant, tenant_of
from kvhaven.config.sizes import parse_size
from kvhaven.errors import ConfigError
from kvhaven.tenants import tenant_name


def register(app: typer.Typer) -> None:
    """Add `limit` to the command line."""
    app.command()(limit)


def limit(
    tenant: Tenant,
    memory: Annotated[str, typer.Option(help="Memory quota, such as 2GiB; none: no quota.")] = "",
    disk: Annotated[str, typer.Option(help="Disk quota, such as 20GiB; none: no quota.")] = "",
    socket: Annotated[Path | None, typer.Option(help="Socket of the service.")] = None,
) -> None:
    """Set a tenant's quotas until the service exits; show its quotas and its usage.

    A quota that is not given stays unchanged. Chunks above the quota are dropped immediately, or
    when they are released. To set a quota permanently, use tenant_memory or tenant_disk.
    """
    from kvhaven.cli.address import find_socket  # noqa: PLC0415 - keeps other commands quick
    from kvhaven.client.control import connect  # noqa: PLC0415
    from kvhaven.config import load_settings  # noqa: PLC0415

    who = tenant_of(tenant)
    quotas = _quota("--memory", memory), _quota("--disk", disk)
    with connect(find_socket(load_settings().settings, socket)) as control:
        now = control.limit(who, *quotas)
    for place, bytes_, quota in (
        ("memory", now.memory_bytes, now.memory),
        ("disk", now.disk_bytes, now.disk),
    ):
        of = "no quota" if quota is None else f"a quota of {quota}"
        typer.echo(f"{tenant_name(who)}: {bytes_} bytes in {place}, {of}")


def _quota(option: str, given: str) -> int | None:
    """Return the quota of an option as the service expects it; None if it is not given."""
    from kvhaven.protocol import MOST_QUOTA, NO_LIMIT  # noqa: PLC0415

    if not given:
        return None
    if given.strip().lower() == "none":
        return NO_LIMIT
    try:
        quota = parse_size(given)
    except ValueError:
        quota = -1
    if not 0 <= quota <= MOST_QUOTA:
        raise ConfigError(
            f"{option} {given!r} is not a quota; allowed: a size up to 1PiB, such as 2GiB, or none"
        )
    return quota
