# SPDX-License-Identifier: Apache-2.0
"""The command line, run as a person runs it."""

import os
import subprocess
import sys


def kvhaven(*arguments: str, status: int = 0, whole: bool = False, **environment: str) -> str:
    """Run the command line; return its output, its errors if it fails, or both (`whole`)."""
    done = subprocess.run(
        [sys.executable, "-m", "kvhaven.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=os.environ | {"COLUMNS": "200"} | environment,
    )
    assert done.returncode == status, f"{done.returncode}: {done.stdout}{done.stderr}"
    if whole:
        return done.stdout + done.stderr
    return done.stdout if status == 0 else done.stderr
