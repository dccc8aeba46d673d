# SPDX-License-Identifier: Apache-2.0
"""Which tenant a command means. A salt is read where it is not shown, and never printed."""

import sys
from typing import Annotated

import typer

from kvhaven.errors import ConfigError
from kvhaven.tenants import parse_tenant
from kvhaven.types import TenantId

Tenant = Annotated[
    str,
    typer.Option(
        help="A tenant: tenant: and 16 hex digits, as `status` shows it, or its cache salt; - "
        "asks for the salt, or reads it from standard input, so that no history or process list "
        "has it."
    ),
]


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
