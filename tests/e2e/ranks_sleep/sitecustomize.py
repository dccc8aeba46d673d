# SPDX-License-Identifier: Apache-2.0
"""Makes the processes of an engine with several ranks sleep where they would yield.

Python imports this by itself, as the folder is in these processes' `PYTHONPATH`. vLLM's ranks wait
for their next step by yielding the core in a loop. If all cores are taken by that, Linux 6.18 lets
other processes wait for 10 s and longer: the node service answered a lookup too late.
"""

import os
import time


def _sleep() -> None:
    time.sleep(0.0002)


os.sched_yield = _sleep
