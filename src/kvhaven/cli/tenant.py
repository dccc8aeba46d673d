# SPDX-License-Identifier: Apache-2.0
"""`kvhaven tenant`, and the `--tenant` option. Cache salts are never printed."""

import sys
from typing import Annotated

import typer

from kvhaven.errors import ConfigError
from kvhaven.tenants import parse_tenant, tenant_name
from kvhaven.types import TenantId

Tenant = Annotated[
    str,
    typer.Option(
        help="Name of a tenant (tenant: and 16 hex digits, as shown by `status`), its cache salt, "
        "or - to read the salt from a prompt or standard input, which keeps it out of the shell "
        "history and the process list."
    ),
]


def register(app: typer.Typer) -> None:
    """Add `tenant` to the command line."""
    app.command()(tenant)


def tenant() -> None:
    """Read a cache salt from a prompt or standard input and print its tenant's name.

    The name can replace the salt in settings and options. The salt cannot be derived from it.
    """
    typer.echo(tenant_name(tenant_of("-")))


def tenant_of(given: str) -> TenantId:
    """Return a tenant by its name or salt.

    Raises `ConfigError` if it is malformed; the message does not repeat it.
    """
    try:
        return parse_tenant(_read_salt() if given == "-" else given)
    except ValueError as error:
        raise ConfigError(
            f"--tenant is refused ({error}); allowed: tenant:0123456789abcdef, a cache salt, or - "
            "to read the salt from a prompt or standard input"
        ) from None


def _read_salt() -> str:
    if sys.stdin.isatty():
        return str(typer.prompt("Cache salt", hide_input=True))
    return sys.stdin.readline().rstrip("\r\n")
