# SPDX-License-Identifier: Apache-2.0
"""`kvhaven tenant`, and the `--tenant` option. A cache salt is never shown or printed."""

import sys
from typing import Annotated

import typer

from kvhaven.errors import ConfigError
from kvhaven.tenants import parse_tenant, tenant_name
from kvhaven.types import TenantId

Tenant = Annotated[
    str,
    typer.Option(
        help="A tenant: tenant: and 16 hex digits, as `status` shows it, or its cache salt; - "
        "asks for the salt, or reads it from standard input, so that no history or process list "
        "has it."
    ),
]


def register(app: typer.Typer) -> None:
    """Add `tenant` to the command line."""
    app.command()(tenant)


def tenant() -> None:
    """Print the tenant name of a cache salt, which is read from a prompt or standard input.

    The name can stand for the salt in settings and options; the salt cannot be derived from it.
    """
    typer.echo(tenant_name(tenant_of("-")))


def tenant_of(given: str) -> TenantId:
    """Return the tenant that was given. Raises `ConfigError`, which repeats nothing of it."""
    try:
        return parse_tenant(_read_salt() if given == "-" else given)
    except ValueError as error:
        raise ConfigError(
            f"--tenant is refused ({error}); allowed: tenant:0123456789abcdef, a cache salt, or - "
            "to be asked for the salt"
        ) from None


def _read_salt() -> str:
    if sys.stdin.isatty():
        return str(typer.prompt("Cache salt", hide_input=True))
    return sys.stdin.readline().rstrip("\r\n")
