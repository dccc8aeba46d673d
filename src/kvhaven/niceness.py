# SPDX-License-Identifier: Apache-2.0
"""Priority of helper processes: engines and the service come first."""

import contextlib
import os
import time
from pathlib import Path
from typing import Final

_AUTOGROUP: Final = Path("/proc/self/autogroup")
_ATTEMPTS: Final = 5
_PAUSE_S: Final = 0.1


def lower_priority(niceness: int) -> None:
    """Set this process's niceness to `niceness` at least, also against other sessions.

    Linux with autogroups (the default of most distributions, outside of cgroups with a CPU
    controller) divides the CPU among sessions first: niceness alone counts only among the processes
    of one session. A process that leads its session also sets the niceness of its autogroup.
    """
    with contextlib.suppress(OSError):
        niceness = os.nice(max(0, niceness - os.nice(0)))
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
