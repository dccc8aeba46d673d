# SPDX-License-Identifier: Apache-2.0
"""Steps in which an arena becomes usable, the same for the service and for each rank.

The service allocates it step by step, at 2 to 4 GiB/s; a rank registers it with its device step
by step, at about 10 GiB/s. After each step what is there can be used. Steps grow with what is
there, so that there are few of them: 35 for 2 TiB. Each costs a message to every rank, and a
boundary that no device copy may cross.
"""

from typing import Final

FIRST_BYTES: Final = 256 << 20
"""Allocated before the service listens, a tenth of a second: a small arena is all there then."""
STEP_BYTES: Final = 1 << 30
"""Least length of a step, and the unit of its length."""


def next_step(done: int, size: int, step: int = STEP_BYTES) -> int:
    """Return where the step ends that begins at `done`, of `size` bytes altogether.

    It is a quarter of what is done, in whole units of `step`, and at least one.
    """
    return min(size, done + max(1, done // 4 // step) * step)
