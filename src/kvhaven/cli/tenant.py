# SPDX-License-Identifier: Apache-2.0
"""`kvhaven tenant`: what a cache salt's tenant is called."""

import typer

from kvhaven.cli.tenants import tenant_of
from kvhaven.tenants import tenant_name


def register(app: typer.Typer) -> None:
    """Add `tenant` to the command line."""
    app.command()(tenant)


def tenant() -> None:
    """Ask for a cache salt, or read it from standard input, and print its tenant's name.

    The name can stand for the salt in settings and options, and the salt cannot be told from it.
    """
    typer.echo(tenant_name(tenant_of("-")))
