# SPDX-License-Identifier: Apache-2.0
"""Results of benchmarks: printed as a table, and written as JSON to `build/`."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from examples.demo.report import current_commit

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
BENCH = BUILD / "bench"


class Result(msgspec.Struct, frozen=True):
    """One result. `ratio` is `value / limit`; `wanted` is the target for the ratio, as text."""

    name: str
    value: float
    unit: str
    limit: float | None
    repetitions: int
    limit_is: str = ""
    wanted: str = ""
    good: bool | None = None
    """Whether the target is met; None without a target."""

    @property
    def ratio(self) -> float | None:
        """The value as a multiple of the limit; None without one."""
        return self.value / self.limit if self.limit else None


def at_least(
    name: str, values: Sequence[float], unit: str, limits: Sequence[float], part: float, what: str
) -> Result:
    """Return the median of `values`; the target is `part` of the median of `limits`, or more."""
    value, limit = statistics.median(values), statistics.median(limits)
    return Result(
        name, value, unit, limit, len(values), what, f"at least {part:.2f}", value >= limit * part
    )


def at_most(
    name: str, value: float, unit: str, limit: float, repetitions: int, what: str
) -> Result:
    """Return a value whose target is to stay within its limit."""
    return Result(name, value, unit, limit, repetitions, what, "at most 1.00", value <= limit)


def plain(name: str, value: float, unit: str, repetitions: int) -> Result:
    """Return a value without a limit."""
    return Result(name, value, unit, None, repetitions)


def write_json(results: Sequence[Result], name: str) -> Path:
    """Write results to a file in `build/`, and keep its other results; return its path."""
    path = BUILD / name
    commit = current_commit()
    found = {
        result.name: {
            "name": result.name,
            "value": result.value,
            "unit": result.unit,
            "limit": result.limit,
            "ratio": result.ratio,
            "repetitions": result.repetitions,
            "commit": commit,
            "limit_is": result.limit_is,
            "wanted": result.wanted,
        }
        for result in results
    }
    before = json.loads(path.read_text()) if path.exists() else []
    kept = [entry for entry in before if entry["name"] not in found]
    path.write_text(json.dumps([*kept, *found.values()], indent=1) + "\n")
    return path


def print_table(console: Console, results: Sequence[Result]) -> None:
    """Print all results."""
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("", "value", "limit", "ratio", "wanted", ""):
        justify: Literal["left", "right"] = "left" if column in {"", "wanted"} else "right"
        table.add_column(column, justify=justify, no_wrap=True)
    for result in results:
        mark = {True: "[green]yes[/]", False: "[bold red]no[/]", None: ""}[result.good]
        ratio = "" if result.ratio is None else f"{result.ratio:.2f}"
        limit = "" if result.limit is None else f"{result.limit:.3f}"
        table.add_row(
            result.name, f"{result.value:.3f} {result.unit}", limit, ratio, result.wanted, mark
        )
    console.print(table)
    for result in results:
        if result.limit_is:
            console.print(
                f"  {result.name}: limit: {result.limit_is}; {result.repetitions} repetitions",
                soft_wrap=True,
            )
