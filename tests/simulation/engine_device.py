# SPDX-License-Identifier: Apache-2.0
"""A device whose copies really are late: three streams in order, and nothing else in order.

It keeps exactly the promises of `kvhaven.devices.base.Device` and breaks everything that is
not promised there: work runs only when `tick` picks it, which may be long after the call.
"""

import functools
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from kvhaven.devices.base import CopyJob, MemoryFigures
from kvhaven.devices.cpu_copies import copier_of
from kvhaven.devices.plan import check_copy, checksum_at, shard_places
from kvhaven.layouts import Layout
from kvhaven.types import Checksum


class Op:
    """A piece of work. It may run when all before it on its stream and all of `after` ended."""

    def __init__(self, run: Callable[[], None], after: Sequence["Op"]) -> None:
        self.run = run
        self.done = False
        self.after = [op for op in after if not op.done]


class LateCopy:
    """The job of a copy; its last operation sets it done."""

    def __init__(self, device: "LateDevice") -> None:
        self._device = device
        device.jobs.append(self)
        self._ended = threading.Event()
        self.last: Op | None = None
        self.error = ""
        self.checksums: list[Checksum] = []

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout_s: float) -> bool:
        if threading.get_ident() != self._device.thread:
            return self._ended.wait(timeout_s)
        self._device.run_until(self.done)
        return True

    def end(self) -> None:
        self._ended.set()


class LateDevice:
    """A `Device` over CPU tensors. All work runs in the thread that made it, in `tick`.

    `stores` and `loads` are weights to choose from for these streams: how likely one of them
    goes on where compute could, too. `fail_loads` makes so many of the next loads fail after
    half of their chunks were written; the first `spare_loads` of them are spared.
    """

    name = "late"
    collective_backend = "gloo"
    synchronous = False
    kernel_tag = "late"

    def __init__(
        self,
        choice: random.Random,
        stores: Sequence[float] = (1.0,),
        loads: Sequence[float] = (1.0,),
    ) -> None:
        self.thread = threading.get_ident()
        self.jobs: list[LateCopy] = []
        self.fail_loads = 0
        self.spare_loads = 0
        self.fences = 0
        self._choice = choice
        self._compute: deque[Op] = deque()
        self._stores: deque[Op] = deque()
        self._loads: deque[Op] = deque()
        self._eager = {
            id(self._compute): 1.0,
            id(self._stores): choice.choice(stores),
            id(self._loads): choice.choice(loads),
        }

    # --- the contract -----------------------------------------------------------------------

    def store(
        self, layout: Layout, blocks: Sequence[Sequence[int]], targets: Sequence[int]
    ) -> LateCopy:
        check_copy(layout, blocks, targets, may_skip=False)
        job = LateCopy(self)

        def copy(ids: Sequence[int], target: int) -> None:
            _move(layout, ids, target, to_host=True)
            job.checksums.extend(
                checksum_at(*place) for place in shard_places(layout, [ids], [target])
            )

        for ids, target in zip(blocks, targets, strict=True):
            self._put(self._stores, functools.partial(copy, ids, target))
        job.last = self._put(self._stores, job.end)
        return job

    def load(
        self, layout: Layout, blocks: Sequence[Sequence[int]], sources: Sequence[int]
    ) -> LateCopy:
        check_copy(layout, blocks, sources, may_skip=True)
        job = LateCopy(self)
        pairs = list(zip(blocks, sources, strict=True))
        if self.fail_loads and self.spare_loads:
            self.spare_loads -= 1
            job_error = ""
        elif self.fail_loads:
            self.fail_loads -= 1
            job_error = "the simulated copy engine failed"
            pairs = pairs[: len(pairs) // 2]
        else:
            job_error = ""

        def end() -> None:
            job.error = job_error
            job.end()

        for ids, source in pairs:
            copy = functools.partial(_move, layout, ids, source, to_host=False)
            self._put(self._loads, copy)
        job.last = self._put(self._loads, end)
        return job

    def forward_waits(self, job: CopyJob) -> None:
        assert isinstance(job, LateCopy)
        assert job.last is not None
        self.compute(lambda: None, [job.last])

    def fence(self, jobs: Sequence[CopyJob]) -> None:
        self.fences += len(jobs)
        for job in jobs:
            self.forward_waits(job)

    def count(self) -> int:
        return 1

    def current(self) -> int:
        return 0

    def set_current(self, index: int) -> None:
        assert index == 0

    def memory(self) -> MemoryFigures:
        return MemoryFigures(1 << 30, 1 << 30)

    def synchronize(self) -> None:
        self.run_until(lambda: not (self._compute or self._stores or self._loads))

    def register_host(self, address: int, size: int) -> None:
        pass

    def unregister_host(self, address: int, size: int) -> None:
        pass

    def close(self) -> None:
        self.synchronize()

    # --- the simulation's side --------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether everything that was submitted has run."""
        return not (self._compute or self._stores or self._loads)

    def compute(self, run: Callable[[], None], after: Sequence[Op] = ()) -> Op:
        """Put work on the compute stream."""
        op = Op(run, after)
        self._compute.append(op)
        return op

    def tick(self) -> bool:
        """Run one operation that may run now, chosen at random; False if there is none."""
        streams = [s for s in (self._compute, self._stores, self._loads) if s]
        ready = [s for s in streams if all(op.done for op in s[0].after)]
        if not ready:
            assert not streams, "work waits for work in a circle"
            return False
        (stream,) = self._choice.choices(ready, [self._eager[id(stream)] for stream in ready])
        op = stream[0]
        op.run()
        stream.popleft()
        op.done = True
        return True

    def abandon(self) -> None:
        """Stop working for good: whatever has not ended fails now."""
        for stream in (self._compute, self._stores, self._loads):
            stream.clear()
        for job in self.jobs:
            if not job.done():
                job.error = "abandoned"
                job.end()

    def run_until(self, reached: Callable[[], bool]) -> None:
        """Run work until `reached`, as a host that waits for the device does."""
        end = time.monotonic() + 30
        while not reached():
            if not self.tick():
                assert time.monotonic() < end, "waited for what was never submitted"
                time.sleep(0.0002)

    def _put(self, stream: deque[Op], run: Callable[[], None]) -> Op:
        """Put a copy on its stream, behind all compute that was submitted before."""
        op = Op(run, [self._compute[-1]] if self._compute else [])
        stream.append(op)
        return op


def _move(layout: Layout, ids: Sequence[int], host: int, *, to_host: bool) -> None:
    copier = copier_of(layout)
    if to_host:
        copier.store(ids, host)
    else:
        copier.load(ids, host)
