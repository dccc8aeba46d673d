# SPDX-License-Identifier: Apache-2.0
"""`kvhaven config`: every setting, its value and where it came from; LMCache's turned into ours."""

import json
import os
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvhaven.cli.importing import import_lmcache
from kvhaven.config import Resolved, load_settings
from kvhaven.errors import ConfigError

commands = typer.Typer(no_args_is_help=True, help="Look at the settings, or import LMCache's.")


def register(app: typer.Typer) -> None:
    """Add `config` to the command line."""
    app.add_typer(commands, name="config")


@commands.command()
def show(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    file: Annotated[
        Path | None,
        typer.Option(
            help="A YAML file, instead of the one that KVHAVEN_CONFIG_FILE names.",
            dir_okay=False,
        ),
    ] = None,
) -> None:
    """Print every setting, its value and where it came from, as this shell would set it.

    What an engine adds by kv_connector_extra_config is seen in its log at start.
    """
    resolved = load_settings(yaml_file=file)
    typer.echo(_json(resolved) if as_json else _text(resolved))


@commands.command("import")
def import_(
    file: Annotated[
        Path, typer.Argument(help="LMCache's YAML file (LMCACHE_CONFIG_FILE).", dir_okay=False)
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="A new file to write to, instead of printing."),
    ] = None,
) -> None:
    """Turn a settings file of LMCache into one of KVHaven, with comments on what is different."""
    text = import_lmcache(file)
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        # It may hold a password: the owner's alone.
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as new:
            new.write(text)
    except OSError as error:
        raise ConfigError(
            f"--output {output} cannot be written: {error.strerror}; name a file that can be made"
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
