# SPDX-License-Identifier: Apache-2.0
"""Command line: `app` holds the commands, `run` is the entry point of `kvhaven`.

Each command is a module of this package with `register(app)`, listed in `_COMMANDS` in the order
of `kvhaven --help`. Its function imports slow or large modules (the service, rich, torch) itself,
which keeps `kvhaven --help` and all other commands fast.
"""

import importlib
import os
import sys
from typing import Annotated

import typer

from kvhaven import __version__
from kvhaven.ending import ended_at_once
from kvhaven.errors import ConfigError, KVHavenError

__all__ = ["app", "main", "run"]

_COMMANDS = (
    "serve",
    "status",
    "top",
    "clear",
    "limit",
    "tenant",
    "tier",
    "peers",
    "route",
    "api",
    "config",
)

app = typer.Typer(
    name="kvhaven",
    help="A KV-cache layer for vLLM on every accelerator.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def run() -> None:
    """Run the command line as a process of its own: see `main`, and `ended_at_once`."""
    with ended_at_once():
        main()


def main() -> None:
    """Run the command line.

    A `KVHavenError` is one line on stderr. The exit status is 2 for invalid settings and options,
    and 1 for all other errors.
    """
    try:
        app()
    except KVHavenError as error:
        typer.echo(f"kvhaven: {error}", err=True)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvhaven {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


for _command in _COMMANDS:
    importlib.import_module(f"kvhaven.cli.{_command}").register(app)
