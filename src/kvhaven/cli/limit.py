# SPDX-License-Identifier: Apache-2.0
"""`kvhaven limit`: change a tenant's quotas while a service runs."""

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
    memory: Annotated[
        str, typer.Option(help="Quota of memory, such as 2GiB; none: no quota.")
    ] = "",
    disk: Annotated[
        str, typer.Option(help="Quota of the disk tier, such as 20GiB; none: no quota.")
    ] = "",
    socket: Annotated[Path | None, typer.Option(help="The service's socket.")] = None,
) -> None:
    """Set a tenant's quotas until the service ends, and show them and what the tenant has.

    A quota that is not given stays as it is. What is too much goes at once, or as soon as nobody
    uses it. To keep a quota, set tenant_memory or tenant_disk.
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
    """Return what an option says, as the service wants it."""
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
            f"{option} {given!r} is no quota; allowed: a size up to 1PiB, such as 2GiB, or none"
        )
    return quota
