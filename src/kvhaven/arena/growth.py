# SPDX-License-Identifier: Apache-2.0
"""Steps in which an arena becomes usable, the same for the service and for each rank.

The service allocates the arena step by step, at 2 to 4 GiB/s; a rank registers it with its device
step by step, at about 10 GiB/s. After each step the part that is done can be used. The length of a
step grows with that part, so that there are few steps: 35 for 2 TiB. Each step costs a message to
every rank, and a boundary that no device copy may cross.
"""

from typing import Final

FIRST_BYTES: Final = 256 << 20
"""Allocated before the service listens, within 0.1 s: a small arena is complete by then."""
STEP_BYTES: Final = 1 << 30
"""Minimum length of a step, and the unit of its length."""


def next_step(done: int, size: int, step: int = STEP_BYTES) -> int:
    """Return the end of the step that begins at `done`, of `size` bytes in total.

    The step is a quarter of `done`, in whole units of `step`, and at least one unit.
    """
    return min(size, done + max(1, done // 4 // step) * step)
