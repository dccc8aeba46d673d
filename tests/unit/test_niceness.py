# SPDX-License-Identifier: Apache-2.0
"""Priority of helper processes, in the kernel's own words."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

AUTOGROUP = Path("/proc/self/autogroup")
PROGRAM = """
import os, pathlib
from kvhaven.niceness import lower_priority
lower_priority({niceness})
file = pathlib.Path("/proc/self/autogroup")
print(os.nice(0), file.read_text().split()[-1] if file.exists() else "none")
"""


def lowered(niceness: int, *, first: int = 0, leads: bool) -> list[str]:
    """Return niceness and that of the autogroup of a process that lowered its priority."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(niceness=niceness)],
        capture_output=True,
        text=True,
        check=True,
        start_new_session=leads,
        preexec_fn=lambda: os.nice(first),
    )
    return done.stdout.split()


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="this kernel has no autogroups")
def test_the_leader_of_a_session_also_lowers_its_group() -> None:
    assert lowered(10, leads=True) == ["10", "10"]


def test_others_leave_their_session_as_it_is() -> None:
    before = AUTOGROUP.read_text().split()[-1] if AUTOGROUP.exists() else "none"
    assert lowered(10, leads=False) == ["10", before]


def test_a_process_that_is_nicer_stays_so() -> None:
    assert lowered(10, first=15, leads=True)[0] == "15"
