# SPDX-License-Identifier: Apache-2.0
"""`make bench`, or `python -m benchmarks [SUBJECT...]`: all subjects but tiers, or those named.

Every subject measures its limit in the same run, alternating with what it measures, and takes
medians. A machine that does something else meanwhile gives other figures.
"""

import argparse
import importlib
import signal
import sys
import time

from rich.console import Console

from benchmarks.results import BENCH, Result, print_table, write_json
from examples.demo.processes import ProcessError

_SUBJECTS = {
    "hash": "hashing",
    "policies": "policies",
    "plan": "plans",
    "copy": "copies",
    "disk": "disks",
    "compression": "compressions",
    "acquire": "acquires",
    "stall": "stalls",
    "ttft": "first_token",
    "nohit": "no_hits",
    "outage": "outages",
    "gpu": "gpus",
    "identity": "identities",
    "tiers": "tiers",
}
"""Each subject's module, which has `measure(say)` and returns results; quick ones first."""

_OF_THEIR_OWN = {"tiers": "bench-tiers.json", "identity": "bench.json"}
"""Subjects that are measured when they are named only, and the files of their results."""


def main() -> int:
    """Measure, print and write; return the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("subject", nargs="*", choices=[[], *_SUBJECTS], help=", ".join(_SUBJECTS))
    named = parser.parse_args().subject
    wanted = named or [subject for subject in _SUBJECTS if subject not in _OF_THEIR_OWN]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    wide = None if sys.stdout.isatty() else 120  # in a file, no column has to be cut
    console, began = Console(highlight=False, width=wide), time.monotonic()

    def say(text: str) -> None:
        console.print(f"[dim]{time.monotonic() - began:4.0f} s[/]  {text}", soft_wrap=True)

    BENCH.mkdir(parents=True, exist_ok=True)
    results: dict[str, list[Result]] = {}
    failed = False
    try:
        for subject in wanted:
            say(f"[bold]{subject}[/]")
            module = importlib.import_module(f"benchmarks.{_SUBJECTS[subject]}")
            try:
                file = _OF_THEIR_OWN.get(subject, "bench.json")
                results.setdefault(file, []).extend(module.measure(lambda text: say(f"  {text}")))
            except ProcessError as error:
                failed = True
                console.print(f"{subject} could not be measured: {error}", markup=False)
    except KeyboardInterrupt:
        console.print("interrupted; all processes are ended")
        return 130
    for file, found in results.items():
        print_table(console, found)
        console.print(f"All figures are in {write_json(found, file)}.", soft_wrap=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
