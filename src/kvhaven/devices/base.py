# SPDX-License-Identifier: Apache-2.0
"""The contract of a device: it copies blocks between its memory and the arena, in order."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvhaven.layouts import Layout
from kvhaven.types import Checksum

SKIP = -1
"""In the block ids of a load: this block is not copied (the engine has it, or must not lose it)."""


class MemoryFigures(NamedTuple):
    """Memory of the current device in bytes."""

    free: int
    total: int


class CopyJob(Protocol):
    """A copy that was submitted. Its methods may be called from any thread."""

    @property
    def error(self) -> str:
        """Why the copy failed; empty when it succeeded.

        After a failure nothing is known of the bytes it should have written. A failed copy may
        still be under way: its memory is in use until `done`.
        """

    @property
    def checksums(self) -> Sequence[Checksum]:
        """Of a store that is done without error: xxh3-128 of each shard's payload.

        Chunk by chunk, and the shards of a chunk in order (the paged format has one). Computed
        over the bytes that landed in host memory. Empty for loads, and before `done`.
        """

    def done(self) -> bool:
        """Return whether the copy has ended, well or not, and its results are there.

        From then on neither the device nor any thread touches host or device memory for it.
        Only then may the memory of either side be read, reused or given back. A job whose end
        cannot be found out, because the device is lost, has an `error` and is never done.
        """

    def wait(self, timeout_s: float) -> bool:
        """Block this thread until `done`, at most `timeout_s` seconds; return `done`."""


class Device(Protocol):
    """One accelerator, or the host's CPU, as one rank of the engine uses it.

    Ordering, promised by every implementation:

    - A `store` reads its blocks after all work that was put on the caller's current stream
      before the call (the compute that wrote them). A `load` writes its blocks after all such
      work (the compute that last used them).
    - After `forward_waits(job)`, work put on the caller's current stream runs after the copy.
    - After `fence(jobs)`, the same holds for work on the current stream *and* for every later
      `load`: blocks that a store still reads are overwritten by neither.
    - Copies of one direction end in the order of their calls.

    Failures: `store` and `load` raise `LayoutError` for bad arguments, before anything has begun,
    and nothing else. Whatever fails later is the job's `error`, and the promises above hold for
    a job that failed, too.

    Not promised: any order between a `store` and a `load` without a fence, nor that a copy has
    begun when the call returns, nor (where `synchronous` is false) that it has ended. No call
    waits for the device except where it says so. A copy is never aborted half-way by another.

    `store`, `load`, `forward_waits` and `fence` are called from the engine's worker thread
    only, because "current stream" is a matter of the calling thread.
    """

    @property
    def name(self) -> str:
        """The word for it in settings and status: `cpu`, `cuda`."""

    @property
    def collective_backend(self) -> str:
        """The backend of torch.distributed that serves it: `gloo`, `nccl`."""

    @property
    def synchronous(self) -> bool:
        """Whether copies have ended when `store` and `load` return."""

    @property
    def kernel_tag(self) -> str:
        """What the inside of its pages depends on besides their shape; part of the layout."""

    def count(self) -> int:
        """Return how many devices of this kind this process may use."""

    def current(self) -> int:
        """Return the index of the device that this object copies to and from."""

    def set_current(self, index: int) -> None:
        """Copy to and from another device of this kind from now on, which becomes current.

        Raises `IncompatibleEngineError` if there is no such device.
        """

    def memory(self) -> MemoryFigures:
        """Return the current device's memory."""

    def synchronize(self) -> None:
        """Block until all work of the current device has ended, on every stream, and all copies.

        The host's part of copies included. Raises `DeviceCopyError` if a copy's end cannot be
        found out.
        """

    def register_host(self, address: int, size: int) -> None:
        """Prepare `size` bytes of mapped host memory at `address` for fast copies.

        Any thread may call it, while copies run and while the engine captures graphs. It may
        take 0.1 s a GB. Makes no difference to what is correct: if it cannot be done, that is
        logged, and copies are only slower. The memory stays mapped until `unregister_host`.
        """

    def unregister_host(self, address: int, size: int) -> None:
        """Undo `register_host` with the same arguments, once no copy uses the memory."""

    def store(
        self, layout: Layout, blocks: Sequence[Sequence[int]], targets: Sequence[int]
    ) -> CopyJob:
        """Copy chunks from device memory to host memory, and compute their checksums.

        `blocks[i]` are the block ids of chunk `i`, `targets[i]` the host address of its first
        shard; further shards follow every `layout.shard_stride(len(blocks[i]))` bytes, so that
        a chunk takes `layout.payload_bytes(len(blocks[i]))` bytes. What lies between shards is
        not written. What a shard's payload is, the layout's class says. Targets must not
        overlap. Raises `LayoutError` before anything is copied if the lengths differ or a block
        id is not one of the layout.
        """

    def load(
        self, layout: Layout, blocks: Sequence[Sequence[int]], sources: Sequence[int]
    ) -> CopyJob:
        """Copy chunks from host memory to device memory: the inverse of `store`.

        Blocks with the id `SKIP` are left out; the others keep their place in the payload. No
        other byte of device memory is written. A block must not occur twice in a call. Raises
        `LayoutError` as `store` does.
        """

    def forward_waits(self, job: CopyJob) -> None:
        """Let later work of the current stream wait for a job.

        Blocks this thread until the copy is submitted, and until it has ended where a failure
        left nothing else to wait for. Raises `DeviceCopyError` if its end cannot be found out.
        """

    def fence(self, jobs: Sequence[CopyJob]) -> None:
        """Let later work of the current stream and later loads wait for jobs.

        Blocks and raises as `forward_waits` does.
        """

    def close(self) -> None:
        """Wait for copies under way and give up threads and registrations.

        Copies that are asked for later may fail.
        """


class FinishedCopy:
    """The job of a copy that ended within the call, well or with an `error`."""

    def __init__(self, checksums: Sequence[Checksum] = (), error: str = "") -> None:
        self.error = error
        self.checksums = checksums

    def done(self) -> bool:
        """Return True."""
        return True

    def wait(self, timeout_s: float) -> bool:  # noqa: ARG002 - the contract's
        """Return True at once."""
        return True
