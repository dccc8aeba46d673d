# SPDX-License-Identifier: Apache-2.0
"""The command line. `app` holds the commands; `main` is what `kvhaven` starts.

Each command is a module of this package with `register(app)`, named in `_COMMANDS` in the order
of `kvhaven --help`. It imports what is slow or large (the service, rich, torch) inside the
command's function, so that `kvhaven --help` and every other command stay quick.
"""

import importlib
import os
import sys
from typing import Annotated

import typer

from kvhaven import __version__
from kvhaven.errors import ConfigError, KVHavenError

__all__ = ["app", "main"]

_COMMANDS = ("serve", "status", "clear", "limit", "tenant", "tier", "config")

app = typer.Typer(
    name="kvhaven",
    help="A KV-cache layer for vLLM on every accelerator.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command line; an error of ours is one line on stderr and exit status 1 or 2.

    Status 2 is a wrong setting, as it is for a wrong option; 1 is everything else.
    """
    try:
        app()
    except KVHavenError as error:
        sys.stderr.write(f"kvhaven: {error}\n")
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except BrokenPipeError:  # the reader, `head` for one, has gone; nothing is left to say
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
