# SPDX-License-Identifier: Apache-2.0
"""Processes with threads of obstore end without taking Python down."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import atexit, sys
from kvhaven.ending import ended_at_once
{imported}
atexit.register(print, "taken down", flush=True)
with ended_at_once():
    print("done")
    {end}
"""


def run(imported: str, end: str) -> tuple[int, str, str]:
    """Return the exit status of a program, its output and its errors."""
    program = PROGRAM.format(imported=imported, end=end)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(("end", "status"), [("", 0), ("sys.exit()", 0), ("sys.exit(3)", 3)])
def test_python_is_taken_down_unless_obstore_was_loaded(end: str, status: int) -> None:
    pytest.importorskip("obstore", reason="kvhaven[s3] is not installed")
    assert run("import obstore", end) == (status, "done\n", "")
    assert run("", end) == (status, "done\ntaken down\n", "")


def test_errors_are_shown_as_ever() -> None:
    pytest.importorskip("obstore", reason="kvhaven[s3] is not installed")
    status, output, errors = run("import obstore", "raise ValueError('wrong')")
    assert (status, output) == (1, "done\ntaken down\n")
    assert errors.endswith("ValueError: wrong\n")
    status, _, errors = run("import obstore", "sys.exit('refused')")
    assert (status, errors) == (1, "refused\n")


@pytest.mark.parametrize("closed", ["1", "2", "1 2"])
def test_a_process_without_output_or_errors_ends_like_any_other(closed: str) -> None:
    pytest.importorskip("obstore", reason="kvhaven[s3] is not installed")
    program = PROGRAM.format(imported="import obstore", end="sys.exit(3)")
    redirections = " ".join(f"{descriptor}>&-" for descriptor in closed.split())
    command = f'exec "$0" -c "$1" {redirections}'
    done = subprocess.run(
        ["/bin/sh", "-c", command, sys.executable, program],
        capture_output=True,
        text=True,
        check=False,
    )
    output = "" if "1" in closed else "done\n"
    assert (done.returncode, done.stdout, done.stderr) == (3, output, "")


def test_a_refused_setting_has_its_status_even_if_nobody_can_read_why() -> None:
    command = 'exec "$0" -m kvhaven.cli config show 2>&-'
    done = subprocess.run(
        ["/bin/sh", "-c", command, sys.executable],
        env=os.environ | {"KVHAVEN_CHUNK_SIZE": "nonsense"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")


def test_output_that_cannot_be_written_is_an_error() -> None:
    pytest.importorskip("obstore", reason="kvhaven[s3] is not installed")
    program = PROGRAM.format(imported="import obstore", end="")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 120
    assert "not complete" in done.stderr
