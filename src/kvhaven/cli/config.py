# SPDX-License-Identifier: Apache-2.0
"""`kvhaven config`: display of all settings, and import of LMCache's settings."""

import json
import os
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvhaven.cli.importing import import_lmcache
from kvhaven.config import Resolved, load_settings
from kvhaven.errors import ConfigError

commands = typer.Typer(no_args_is_help=True, help="Show the settings, or import LMCache's.")


def register(app: typer.Typer) -> None:
    """Add `config` to the command line."""
    app.add_typer(commands, name="config")


@commands.command()
def show(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    file: Annotated[
        Path | None,
        typer.Option(
            help="YAML file; default: KVHAVEN_CONFIG_FILE.",
            dir_okay=False,
        ),
    ] = None,
) -> None:
    """Print every setting, its value and its origin, as in this shell's environment.

    Settings in an engine's kv_connector_extra_config appear in the engine's log at start.
    """
    resolved = load_settings(yaml_file=file)
    typer.echo(_json(resolved) if as_json else _text(resolved))


@commands.command("import")
def import_(
    file: Annotated[
        Path, typer.Argument(help="YAML file of LMCache (LMCACHE_CONFIG_FILE).", dir_okay=False)
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="New file to write; default: print."),
    ] = None,
) -> None:
    """Convert a settings file of LMCache to KVHaven's, with comments on the differences."""
    text = import_lmcache(file)
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        # Only the owner may read it: it may contain a password.
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as new:
            new.write(text)
    except OSError as error:
        raise ConfigError(
            f"--output {output} cannot be written: {error.strerror}; specify a new, writable file"
        ) from error


def _json(resolved: Resolved) -> str:
    rows = [msgspec.to_builtins(row) for row in resolved.rows()]
    return json.dumps({"settings": rows, "notes": resolved.notes}, indent=2)


def _text(resolved: Resolved) -> str:
    rows = resolved.rows()
    width = max(len(f"{row.name} = {row.text}") for row in rows if row.origin == "default")
    lines = []
    for row in rows:
        value = f"{typer.style(row.name, bold=True)} = {row.text}"
        pad = " " * max(0, width - len(f"{row.name} = {row.text}"))
        lines.append(f"{value}{pad}  ({row.origin})")
        lines.append(f"    {row.doc}")
        lines.append(f"    Allowed: {row.allowed}.")
    lines.extend(f"note: {note}" for note in resolved.notes)
    return "\n".join(lines)
