# SPDX-License-Identifier: Apache-2.0
"""Priority of helpers and of the loop, in the kernel's own words."""

import os
import platform
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvhaven.niceness import lower_thread_priority, run_soon_after_waking

AUTOGROUP = Path("/proc/self/autogroup")
_SCHED = Path("/proc/thread-self/sched")
HAS_SLICES = (
    platform.machine() in {"x86_64", "aarch64"}
    and tuple(map(int, os.uname().release.split("-")[0].split(".")[:2])) >= (6, 12)
    and _SCHED.exists()
    and "se.slice" in _SCHED.read_text()
)
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


def slices() -> int:
    """Return the length of this thread's slices in nanoseconds."""
    lines = _SCHED.read_text().splitlines()
    return int(next(line for line in lines if line.startswith("se.slice")).split()[-1])


def in_a_thread(*steps: Callable[[], object]) -> int:
    """Do steps in a thread of their own; return the length of its slices then."""
    with ThreadPoolExecutor(1) as pool:
        for step in steps:
            pool.submit(step).result()
        return pool.submit(slices).result()


@pytest.mark.skipif(not HAS_SLICES, reason="this kernel has no slices of a thread (Linux 6.12)")
def test_the_loop_runs_soon_after_waking_and_its_helpers_as_others_do() -> None:
    usual = in_a_thread()
    assert in_a_thread(run_soon_after_waking) < usual
    assert in_a_thread(run_soon_after_waking, lower_thread_priority) == usual
    child = "from tests.unit.test_niceness import slices; from kvhaven import niceness; "
    started = [sys.executable, "-c", child + "niceness.lower_priority(10); print(slices())"]

    def start() -> int:
        return int(subprocess.run(started, capture_output=True, check=True).stdout)

    with ThreadPoolExecutor(1, initializer=run_soon_after_waking) as pool:
        assert pool.submit(start).result() == usual


def test_a_thread_that_runs_soon_has_no_other_priority() -> None:
    def priority() -> tuple[int, int]:
        return os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(lower_thread_priority, 7).result()
        before = pool.submit(priority).result()
        pool.submit(run_soon_after_waking).result()
        assert pool.submit(priority).result() == before == (os.SCHED_OTHER, max(7, os.nice(0)))
