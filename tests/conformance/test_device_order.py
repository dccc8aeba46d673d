# SPDX-License-Identifier: Apache-2.0
"""Any order that a device allows gives right bytes, and each wait of ours is needed for it.

`KVHAVEN_SEED` replays a program.
"""

import contextlib
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvhaven.devices import cuda
from kvhaven.devices.staging import StagingPool
from kvhaven.devices.streams import StreamCopy, StreamDevice
from tests.conformance.device_program import Program
from tests.devices import REAL, WORDS, opened

STEPS = 60
SEEDS = 60
MOST_SEEDS = 120
"""The rarest breakage shows in one program of a few dozen."""

Patch = pytest.MonkeyPatch


@pytest.mark.parametrize("word", WORDS)
def test_random_programs_end_as_promised(word: str) -> None:
    replay = os.environ.get("KVHAVEN_SEED")
    for seed in [int(replay)] if replay else range(SEEDS):
        with opened(word, seed) as found:
            try:
                Program(found, seed).run(STEPS)
            except BaseException:
                print(f"replay with KVHAVEN_SEED={seed}")  # noqa: T201 - for who repairs it
                raise


# --- each wait, taken out -------------------------------------------------------------------


def copies_do_not_wait_for_compute(patch: Patch) -> None:
    patch.setattr(StreamDevice, "_wait_for", lambda *_: None)


def the_forward_does_not_wait_for_loads(patch: Patch) -> None:
    patch.setattr(StreamDevice, "forward_waits", lambda *_: None)


def a_fence_holds_nothing(patch: Patch) -> None:
    patch.setattr(StreamDevice, "fence", lambda *_: None)


def the_host_does_not_wait_for_copies(patch: Patch) -> None:
    patch.setattr(StreamDevice, "_passed", lambda *_: True)


def a_job_ends_when_it_is_submitted(patch: Patch) -> None:
    submit = StreamDevice._submit

    def submit_and_end(device: StreamDevice, lane: Any, job: StreamCopy, *rest: Any) -> None:
        submit(device, lane, job, *rest)
        job.end()

    patch.setattr(StreamDevice, "_submit", submit_and_end)


def compute_is_not_flushed_before_a_copy(patch: Patch) -> None:
    def mark(device: StreamDevice) -> Any:
        event = device._make.event()
        event.record(device._api.current_stream())
        return event

    patch.setattr(StreamDevice, "_mark", mark)


def copies_are_not_flushed(patch: Patch) -> None:
    def record(device: StreamDevice, lane: Any, job: StreamCopy) -> Any:
        del job
        with device._on_stream(lane):
            event = device._make.event()
            event.record(device._streams[lane.name])
            return event

    patch.setattr(StreamDevice, "_record", record)


def copies_run_on_the_stream_of_compute(patch: Patch) -> None:
    @contextlib.contextmanager
    def on_stream(device: StreamDevice, lane: Any) -> Any:
        del device, lane
        yield

    patch.setattr(StreamDevice, "_on_stream", on_stream)


def staging_memory_is_used_again_too_early(patch: Patch) -> None:
    submit = StreamDevice._submit_part

    def submit_and_give_back(
        device: StreamDevice, lane: Any, job: Any, layout: Any, part: Any, piece: Any
    ) -> None:
        submit(device, lane, job, layout, part, piece)
        if not lane.to_host:
            piece.give_back()

    patch.setattr(StreamDevice, "_submit_part", submit_and_give_back)


def the_forward_does_not_wait_for_the_submission(patch: Patch) -> None:
    def forward_waits(device: StreamDevice, job: Any) -> None:
        if job.event is not None:
            device._api.current_stream().wait_event(job.event)

    patch.setattr(StreamDevice, "forward_waits", forward_waits)


def the_forward_waits_for_the_first_part_only(patch: Patch) -> None:
    submit = StreamDevice._submit_part

    def submit_part(device: StreamDevice, lane: Any, job: StreamCopy, *rest: Any) -> None:
        first = job.event
        submit(device, lane, job, *rest)
        if first is not None:
            job.event = first

    patch.setattr(StreamDevice, "_submit_part", submit_part)


def copies_do_not_say_in_which_order_they_read(patch: Patch) -> None:
    patch.setattr(cuda, "_ACCESS_IN_STREAM_ORDER", 0)


def copies_go_to_the_default_stream(patch: Patch) -> None:
    for driver in (cuda._CudaDriver, cuda._HipDriver):
        copy: Any = driver.copy

        def copy_there(
            driver: Any, moves: Any, stream: int, *, to_host: bool, copy: Any = copy
        ) -> None:
            del stream
            copy(driver, moves, 0, to_host=to_host)

        patch.setattr(driver, "copy", copy_there)


LAZY = ("hpu-lazy",)
BATCHES = ("cuda-12.8", "cuda-13.0")
GPUS = ("cuda-12.4", *BATCHES, "rocm-7", *REAL)
IN_THREADS = ("xpu", *GPUS)
ALL = ("hpu-eager", "hpu-lazy", *IN_THREADS)
PARTS = ("cuda-12.8-small-batches",)
STAGED = ("hpu-eager", "hpu-lazy", "xpu", "cuda-12.8-unregistered")
MUTATIONS: dict[Callable[[Patch], None], tuple[str, ...]] = {
    copies_do_not_wait_for_compute: (*ALL, "cuda-12.8-unregistered"),
    the_forward_does_not_wait_for_loads: ALL,
    a_fence_holds_nothing: IN_THREADS,
    the_host_does_not_wait_for_copies: (*ALL, "cuda-12.8-unregistered"),
    a_job_ends_when_it_is_submitted: ALL,
    compute_is_not_flushed_before_a_copy: LAZY,
    copies_are_not_flushed: LAZY,
    copies_run_on_the_stream_of_compute: ALL,
    staging_memory_is_used_again_too_early: STAGED,
    the_forward_does_not_wait_for_the_submission: IN_THREADS,
    the_forward_waits_for_the_first_part_only: PARTS,
    copies_do_not_say_in_which_order_they_read: BATCHES,
    copies_go_to_the_default_stream: GPUS,
}
"""Each breakage, and the devices on which it must show."""


def nothing_is_freed(patch: Patch, alive: list[object]) -> None:
    """Keep all host memory: what is copied too late must not crash the tests themselves."""
    take, end = StagingPool.take, StreamCopy.end

    def kept(pool: StagingPool, size: int) -> torch.Tensor:
        alive.append(take(pool, size))
        return alive[-1]  # type: ignore[return-value]

    def ended(job: StreamCopy) -> None:
        alive.extend(job.keep)
        end(job)

    patch.setattr(StagingPool, "take", kept)
    patch.setattr(StreamCopy, "end", ended)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutation", "word"),
    [(mutation, word) for mutation, words in MUTATIONS.items() for word in words],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_breakage_is_seen(mutation: Callable[[Patch], None], word: str) -> None:
    for seed in range(MOST_SEEDS):
        alive: list[object] = []
        with pytest.MonkeyPatch.context() as patch:
            nothing_is_freed(patch, alive)
            mutation(patch)
            try:
                with opened(word, seed) as found:
                    alive.append(Program(found, seed))
                    alive[-1].run(STEPS)  # type: ignore[attr-defined]
            except (AssertionError, RuntimeError):
                return
    pytest.fail(f"{MOST_SEEDS} programs did not show it")
