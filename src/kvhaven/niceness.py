# SPDX-License-Identifier: Apache-2.0
"""Priority of processes and threads: engines and the service's loop come before helpers."""

import contextlib
import ctypes
import os
import platform
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

BACKGROUND: Final = 10
"""Niceness of helpers: at normal priority, the tiers' threads, with reads from the page cache and
hashing, delayed a quarter of acquires beyond 2 ms."""

_SLICE_NS: Final = 100_000
"""The shortest slice that Linux accepts, 0.1 ms; its own is 1.4 ms on two cores."""

_SCHED_SETATTR: Final[Mapping[str, int]] = {"x86_64": 314, "aarch64": 274}
"""Number of the system call. Python 3.11 to 3.14 and older versions of glibc have no function."""

_AUTOGROUP: Final = Path("/proc/self/autogroup")
_ATTEMPTS: Final = 5
_PAUSE_S: Final = 0.1


def lower_priority(niceness: int) -> None:
    """Set this process's niceness to `niceness` at least, also against other sessions.

    Slices of this thread get their usual length (see `run_soon_after_waking`).

    Linux with autogroups (the default of most distributions, outside of cgroups with a CPU
    controller) divides the CPU among sessions first: niceness alone counts only among the processes
    of one session. A process that leads its session also sets the niceness of its autogroup.
    """
    with contextlib.suppress(OSError):
        niceness = os.nice(max(0, niceness - os.nice(0)))
    _set_slice(0)
    if os.getsid(0) != os.getpid():
        return
    for _ in range(_ATTEMPTS):
        try:
            _AUTOGROUP.write_text(str(niceness))
        except BlockingIOError:  # the kernel accepts one such change in 0.1 s
            time.sleep(_PAUSE_S)
        except OSError:  # there are no autogroups
            return
        else:
            return


def lower_thread_priority(niceness: int = BACKGROUND) -> None:
    """Set this thread's niceness to `niceness` at least, and its slices to their usual length."""
    before = os.getpriority(os.PRIO_PROCESS, 0)  # Linux: of the thread
    os.setpriority(os.PRIO_PROCESS, 0, max(niceness, before))
    _set_slice(0)


def run_when_idle() -> None:
    """Let this process run only while a core has nothing else to do, or little.

    Threads of other processes that wake do not wait for it at all, also where niceness does not
    count because it is in another session (see `lower_priority`). On a busy machine it waits long.
    """
    with contextlib.suppress(OSError):
        os.nice(19)
    with contextlib.suppress(AttributeError, OSError):  # not Linux; refused in some sandboxes
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def run_soon_after_waking() -> None:
    """Ask Linux to let this thread run soon after it wakes, in exchange for short slices.

    The scheduler prefers threads with short slices on a busy core, without giving them more time.
    An effect needs Linux 6.12; earlier versions ignore the request. Threads that this thread starts
    inherit it.
    """
    _set_slice(_SLICE_NS)


def _set_slice(nanoseconds: int) -> None:
    """Set this thread's slice; 0: the usual length. Threads with a policy of their own keep it."""
    call = _SCHED_SETATTR.get(platform.machine())
    try:
        policy, niceness = os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)
    except OSError:  # some sandboxes and C libraries refuse the question
        return
    if call is None or policy != os.SCHED_OTHER:
        return
    # struct sched_attr: size, policy, flags, nice, priority, runtime (the slice), deadline, period
    attributes = struct.pack("=IIQiIQQQ", 48, os.SCHED_OTHER, 0, niceness, 0, nanoseconds, 0, 0)
    ctypes.CDLL(None).syscall(call, 0, ctypes.c_char_p(attributes), 0)  # refused: as it was
