# SPDX-License-Identifier: Apache-2.0
"""The device contract: ordered copies of blocks between device memory and the arena."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvhaven.layouts import Layout
from kvhaven.types import Checksum

SKIP = -1
"""Block id in a load: this block is not copied (the engine already has it, or must keep its
content)."""


class MemoryFigures(NamedTuple):
    """Memory of the current device in bytes."""

    free: int
    total: int


class CopyJob(Protocol):
    """A submitted copy. Its methods may be called from any thread."""

    @property
    def error(self) -> str:
        """Reason of the failure; empty if the copy succeeded.

        After a failure, the bytes that the copy should have written are undefined. A failed copy
        may still be running: its memory is in use until `done`.
        """

    @property
    def checksums(self) -> Sequence[Checksum]:
        """The xxh3-128 of each shard's payload, for a store that has ended without error.

        Chunk by chunk, and the shards of a chunk in order (the paged format has one). Computed over
        the bytes that landed in host memory. Empty for loads, and before `done`.
        """

    def done(self) -> bool:
        """Return whether the copy has ended, with or without error, and its results are available.

        From then on neither the device nor a thread accesses host or device memory for this copy.
        Only then may the memory of either side be read, reused or freed. If the device is lost and
        the end of the copy cannot be determined, the job has an `error` and is never done.
        """

    def wait(self, timeout_s: float) -> bool:
        """Block this thread until `done`, for at most `timeout_s` seconds; return `done`."""


class Device(Protocol):
    """One accelerator, or the host's CPU, as used by one rank of the engine.

    Ordering guarantees of every implementation:

    - A `store` reads its blocks after all work that was submitted to the caller's current stream
      before the call (the compute that wrote them). A `load` writes its blocks after all such work
      (the compute that last used them).
    - After `forward_waits(job)`, work submitted to the caller's current stream runs after the copy.
    - After `fence(jobs)`, the same holds for work on the current stream *and* for every later
      `load`: neither overwrites blocks that a store still reads.
    - Copies in the same direction end in the order of their calls.

    Failures: `store` and `load` raise `LayoutError` for invalid arguments, before anything is
    copied, and no other exception. A later failure is reported as the job's `error`; the guarantees
    above hold for failed jobs, too.

    Not guaranteed: any order between a `store` and a `load` without a fence, nor that a copy has
    begun when the call returns, nor (where `synchronous` is false) that it has ended. No call waits
    for the device unless its docstring says so. A copy never aborts another copy.

    `store`, `load`, `forward_waits` and `fence` are called from the engine's worker thread only,
    because the "current stream" belongs to the calling thread.
    """

    @property
    def name(self) -> str:
        """Name of the device in settings and status: `cpu`, `cuda`."""

    @property
    def collective_backend(self) -> str:
        """The torch.distributed backend for this device: `gloo`, `nccl`."""

    @property
    def synchronous(self) -> bool:
        """Whether copies have ended when `store` and `load` return."""

    @property
    def kernel_tag(self) -> str:
        """Tag that distinguishes page layouts of equal shape; part of the layout's fingerprint."""

    def count(self) -> int:
        """Return the number of devices of this kind that this process may use."""

    def current(self) -> int:
        """Return the index of the device that this object copies to and from."""

    def set_current(self, index: int) -> None:
        """Copy to and from another device of this kind from now on, and make it current.

        Raises `IncompatibleEngineError` if there is no such device.
        """

    def memory(self) -> MemoryFigures:
        """Return the memory of the current device."""

    def synchronize(self) -> None:
        """Block until all work of the current device, on every stream, and all copies have ended.

        This includes the host's part of copies. Raises `DeviceCopyError` if the end of a copy
        cannot be determined.
        """

    def register_host(self, address: int, size: int) -> None:
        """Prepare `size` bytes of mapped host memory at `address` for fast copies.

        Any thread may call it, while copies run and while the engine captures graphs. It may take
        0.1 s per GB. Correctness does not depend on it: if registration fails, the failure is
        logged and copies are only slower. The memory stays mapped until `unregister_host`.
        """

    def unregister_host(self, address: int, size: int) -> None:
        """Undo `register_host` with the same arguments, once no copy uses the memory."""

    def store(
        self, layout: Layout, blocks: Sequence[Sequence[int]], targets: Sequence[int]
    ) -> CopyJob:
        """Copy chunks from device memory to host memory, and compute their checksums.

        `blocks[i]` are the block ids of chunk `i`, `targets[i]` the host address of its first
        shard; further shards follow every `layout.shard_stride(len(blocks[i]))` bytes, so that a
        chunk takes `layout.payload_bytes(len(blocks[i]))` bytes. Gaps between shards are not
        written. The layout's class defines the payload of a shard. Targets must not overlap. Raises
        `LayoutError` before anything is copied if the lengths differ or a block id is outside of
        the layout.
        """

    def load(
        self, layout: Layout, blocks: Sequence[Sequence[int]], sources: Sequence[int]
    ) -> CopyJob:
        """Copy chunks from host memory to device memory: the inverse of `store`.

        Blocks with the id `SKIP` are left out; the others keep their place in the payload. No other
        byte of device memory is written. A block must not occur twice in a call. Raises
        `LayoutError` as `store` does.
        """

    def forward_waits(self, job: CopyJob) -> None:
        """Let later work of the current stream wait for a job.

        Blocks this thread until the copy is submitted, or until it has ended if a failure left no
        event to wait for. Raises `DeviceCopyError` if the end of the copy cannot be determined.
        """

    def fence(self, jobs: Sequence[CopyJob]) -> None:
        """Let later work of the current stream and later loads wait for jobs.

        Blocks and raises as `forward_waits` does.
        """

    def close(self) -> None:
        """Wait for running copies, then end the threads and undo the registrations.

        Copies that are submitted later may fail.
        """


class FinishedCopy:
    """The job of a copy that ended within the call, with or without an `error`."""

    def __init__(self, checksums: Sequence[Checksum] = (), error: str = "") -> None:
        self.error = error
        self.checksums = checksums

    def done(self) -> bool:
        """Return True."""
        return True

    def wait(self, timeout_s: float) -> bool:  # noqa: ARG002 - the contract's
        """Return True immediately."""
        return True
