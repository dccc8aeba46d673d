# SPDX-License-Identifier: Apache-2.0
"""The thread that clients of remote stores run in."""

import platform
import resource

import pytest

from kvhaven.tiers.executor import Lane
from kvhaven.tiers.shared.loop_thread import LoopThread

BODY = bytes(2 << 20)
ROUNDS = 20


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another libc is left alone")
async def test_bodies_take_the_memory_of_those_before_them() -> None:
    thread = LoopThread("test", {Lane.READ: 1})

    async def faults() -> int:
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        for _ in range(ROUNDS):
            bodies = [b"".join((b"header", BODY)) for _ in range(6)]
            pipelines = [b"".join(bodies[:3]), b"".join(bodies[3:])]
            del bodies, pipelines
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before

    async def nothing() -> None:
        pass

    try:
        populated = await thread.run(Lane.READ, faults, 30) * resource.getpagesize()
        assert populated < 2 * 12 * len(BODY)  # what is alive at once, and not that each round
    finally:
        await thread.close(5, nothing)
