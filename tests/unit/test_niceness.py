# SPDX-License-Identifier: Apache-2.0
"""Priority of helper processes, in the kernel's own words."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

AUTOGROUP = Path("/proc/self/autogroup")
PROGRAM = """
import os
from kvhaven.niceness import lower_priority
from tests.unit.test_niceness import group_niceness
lower_priority({niceness})
print(os.nice(0), group_niceness())
"""


def group_niceness() -> str:
    """Return the niceness of this process's autogroup; the first session has none."""
    words = AUTOGROUP.read_text().split() if AUTOGROUP.exists() else []
    return words[-1] if words else "none"


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
    assert lowered(10, leads=False) == ["10", group_niceness()]


def test_a_process_that_is_nicer_stays_so() -> None:
    assert lowered(10, first=15, leads=True)[0] == "15"
