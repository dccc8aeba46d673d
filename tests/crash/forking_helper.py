# SPDX-License-Identifier: Apache-2.0
"""A NIXL helper with a child that outlives it, has the arena mapped, and writes to it when told.

Run as a program. `KVHAVEN_TEST_CHILD` names the file for the child's pid. At SIGUSR1 the child
overwrites the whole arena.
"""

import os
import signal
import stat
import sys
from pathlib import Path
from typing import Any

from kvhaven.arena.segment import MappedSegment
from kvhaven.peers import nixl_helper

BYTE = 0xEE
CHILD = "KVHAVEN_TEST_CHILD"

_map = MappedSegment.map


def map_and_fork(*arguments: Any) -> MappedSegment:
    segment = _map(*arguments)
    if not os.fork():
        live_on(segment)
    return segment


def live_on(segment: MappedSegment) -> None:
    for number in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        try:
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                os.close(number)  # the service notices that the parent is gone
        except OSError:
            continue

    def overwrite(*_: object) -> None:
        segment.memory[:] = bytes([BYTE]) * segment.size

    signal.signal(signal.SIGUSR1, overwrite)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(120)
    file = Path(os.environ[CHILD])
    file.with_suffix(".new").write_text(str(os.getpid()))
    file.with_suffix(".new").rename(file)
    while True:
        signal.pause()


if __name__ == "__main__":
    if '"role":"receive"' in sys.argv[1]:
        MappedSegment.map = map_and_fork  # type: ignore[method-assign, assignment]
    os._exit(nixl_helper.main())
