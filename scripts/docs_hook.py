# SPDX-License-Identifier: Apache-2.0
"""Pages of the documentation site that are generated: quick start, command line, `llms.txt`."""

import re
from pathlib import Path
from typing import Any

import click
import typer
from mkdocs.structure.files import File, Files

from kvhaven.cli import app

ROOT = Path(__file__).resolve().parent.parent


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that have no file in `docs`."""
    files.append(File.generated(config, "index.md", content=_quick_start()))
    files.append(File.generated(config, "reference/cli.md", content=_command_line()))
    files.append(File.generated(config, "llms.txt", content=_llms(files, config)))
    return files


def _quick_start() -> str:
    """Return the README with its links as the site has them."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/", "](")
    text = re.sub(r"\[([^\]]*)\]\((?:CHANGELOG|CONTRIBUTING)\.md\)", r"\1", text)
    return re.sub(r"\[LICENSE\]\(LICENSE\)", "LICENSE", text)


def _command_line() -> str:
    """Return every command's help."""
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group) or hasattr(group, "commands")
    lines = ["# Command line", "", "Generated from the code. Sizes are `20GiB`, `512MiB`.", ""]
    for name, command in group.commands.items():
        lines += _described(f"kvhaven {name}", command)
    return "\n".join(lines)


def _described(name: str, command: Any) -> list[str]:
    lines = [f"## {name}", "", (command.help or "").strip(), ""]
    rows = []
    for parameter in command.params:
        names = ", ".join(f"`{option}`" for option in parameter.opts)
        text = " ".join((getattr(parameter, "help", "") or "").split()).replace("|", "\\|")
        if names != "`--help`":
            rows.append(f"| {names} | {text} |")
    if rows:
        lines += ["| option | meaning |", "| --- | --- |", *rows, ""]
    for sub, nested in getattr(command, "commands", {}).items():
        lines += _described(f"{name} {sub}", nested)
    return lines


def _llms(files: Files, config: Any) -> str:
    """Return the index of pages for machines (llmstxt.org)."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    for section in config.nav:
        for title, entries in section.items():
            pages = entries if isinstance(entries, list) else [{title: entries}]
            lines += [f"## {title}", ""]
            for page in pages:
                for name, path in page.items():
                    found = files.get_file_from_path(path)
                    if found is not None:
                        lines.append(f"- [{name}]({found.url})")
            lines.append("")
    return "\n".join(lines)
