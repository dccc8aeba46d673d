# SPDX-License-Identifier: Apache-2.0
"""Threads of a device when their process ends."""

import subprocess
import sys

import pytest

pytest.importorskip("torch")

PROGRAM = """
import atexit, sys, time
made = []
atexit.register(lambda: print(len(made), "calls"))  # runs last
import torch
from kvhaven.devices import threads
torch.set_num_threads(1)
"""


def run(program: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", PROGRAM + program],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


def test_a_process_that_ends_waits_for_calls_and_does_not_abort() -> None:
    ended = run("""
here, there = torch.ones(1 << 24), torch.ones(1 << 24)
for number in range(2):
    thread = threads.SerialThread(str(number), lambda: None)
    for _ in range(20):
        thread.put(lambda: made.append(here.copy_(there)))
""")
    assert (ended.returncode, ended.stdout) == (0, "40 calls\n"), ended.stderr


def test_a_process_that_ends_leaves_a_call_that_hangs() -> None:
    ended = run("""
threads._EXIT_S = 0.2
hanging = threads.SerialThread("hanging", lambda: None)
hanging.put(lambda: time.sleep(1000))
""")
    assert ended.returncode == 0
    assert ended.stderr == "hanging: copies have not ended, and are given up\n"


def test_a_closed_thread_is_not_waited_for() -> None:
    ended = run("""
thread = threads.SerialThread("closed", lambda: None)
thread.put(lambda: made.append(1))
thread.close()
assert not threads._open
""")
    assert (ended.returncode, ended.stdout) == (0, "1 calls\n"), ended.stderr
