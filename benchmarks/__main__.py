# SPDX-License-Identifier: Apache-2.0
"""Benchmarks by subject: `make bench`, or `python -m benchmarks [SUBJECT...]`.

Without a subject, all are measured except `tiers` (`make bench-tiers`), `fleet`, `nixl`, `route`,
`affinity`, `tails`, `announce` and `apart` (`make bench-fleet`), `gpu-ttft`, `identity`, `operate`,
`recompute` and `state`. Each subject measures its limit in the same run, alternating with the
measured operation, and takes medians. Other load on the machine changes the results.
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
    "gpu-ttft": "gpu_first_token",
    "identity": "identities",
    "tiers": "tiers",
    "fleet": "fleet",
    "nixl": "nixl",
    "route": "route",
    "affinity": "affinity",
    "apart": "apart",
    "tails": "tails",
    "announce": "announces",
    "operate": "operate",
    "recompute": "recompute",
    "state": "states",
}
"""Module of each subject, whose `measure(say)` returns its results; quick ones first."""

_OF_THEIR_OWN = {
    "gpu-ttft": "bench.json",
    "tiers": "bench-tiers.json",
    "identity": "bench.json",
    "fleet": "bench-fleet.json",
    "nixl": "bench-fleet.json",
    "route": "bench-fleet.json",
    "affinity": "bench-fleet.json",
    "apart": "bench-fleet.json",
    "tails": "bench-fleet.json",
    "announce": "bench-fleet.json",
    "operate": "bench-operate.json",
    "recompute": "bench.json",
    "state": "bench.json",
}
"""Subjects that are measured only if they are named, and the files of their results."""


def main() -> int:
    """Measure, print the results and write them to files; return the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("subject", nargs="*", choices=[[], *_SUBJECTS], help=", ".join(_SUBJECTS))
    named = parser.parse_args().subject
    wanted = named or [subject for subject in _SUBJECTS if subject not in _OF_THEIR_OWN]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    wide = None if sys.stdout.isatty() else 120  # wide enough for all columns in a file
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
        console.print("interrupted; all processes were ended")
        return 130
    for file, found in results.items():
        print_table(console, found)
        console.print(f"All results are in {write_json(found, file)}.", soft_wrap=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
