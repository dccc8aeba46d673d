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

from kvhaven.devices.staging import StagingPool
from kvhaven.devices.streams import StreamCopy, StreamDevice
from tests.conformance.device_program import Program
from tests.devices import WORDS, opened

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
    @contextlib.contextmanager
    def behind(device: StreamDevice, before: Any, stream: Any, event: Any) -> Any:
        del before
        with device._current(), device._api.stream(stream):
            yield
            device._make.flush()
            event.record(stream)

    patch.setattr(StreamDevice, "_behind", behind)


def the_forward_does_not_wait_for_loads(patch: Patch) -> None:
    patch.setattr(StreamDevice, "forward_waits", lambda *_: None)


def a_fence_holds_nothing(patch: Patch) -> None:
    patch.setattr(StreamDevice, "fence", lambda *_: None)


def the_host_does_not_wait_for_copies(patch: Patch) -> None:
    original = StreamDevice._finish

    def finish(
        device: StreamDevice, direction: str, job: StreamCopy, *rest: Any, **more: Any
    ) -> None:
        event, job.event = job.event, Passed()
        original(device, direction, job, *rest, **more)
        job.event = event

    patch.setattr(StreamDevice, "_finish", finish)


class Passed:
    """An event that has passed already."""

    def synchronize(self) -> None:
        """Return at once."""


def compute_is_not_flushed_before_a_copy(patch: Patch) -> None:
    def mark(device: StreamDevice) -> Any:
        event = device._make.event()
        event.record(device._api.current_stream())
        return event

    patch.setattr(StreamDevice, "_mark", mark)


def copies_are_not_flushed(patch: Patch) -> None:
    @contextlib.contextmanager
    def behind(device: StreamDevice, before: Any, stream: Any, event: Any) -> Any:
        stream.wait_event(before)
        with device._current(), device._api.stream(stream):
            yield
            event.record(stream)

    patch.setattr(StreamDevice, "_behind", behind)


def copies_run_on_the_stream_of_compute(patch: Patch) -> None:
    @contextlib.contextmanager
    def behind(device: StreamDevice, before: Any, stream: Any, event: Any) -> Any:
        stream.wait_event(before)
        yield
        device._make.flush()
        event.record(stream)

    patch.setattr(StreamDevice, "_behind", behind)


def staging_memory_is_used_again_too_early(patch: Patch) -> None:
    original = StreamDevice._finish

    def finish(
        device: StreamDevice, direction: str, job: Any, results: Any, piece: Any = None, **more: Any
    ) -> None:
        if piece is not None and direction == "load":
            piece.give_back()
            piece = None
        original(device, direction, job, results, piece, **more)

    patch.setattr(StreamDevice, "_finish", finish)


def loads_are_reported_before_they_were_submitted(patch: Patch) -> None:
    def forward_waits(device: StreamDevice, job: Any) -> None:
        device._api.current_stream().wait_event(job.event)

    patch.setattr(StreamDevice, "forward_waits", forward_waits)


LAZY = ("hpu-lazy",)
ALL = ("hpu-eager", "hpu-lazy", "xpu")
MUTATIONS: dict[Callable[[Patch], None], tuple[str, ...]] = {
    copies_do_not_wait_for_compute: ALL,
    the_forward_does_not_wait_for_loads: ALL,
    a_fence_holds_nothing: ("xpu",),
    the_host_does_not_wait_for_copies: ALL,
    compute_is_not_flushed_before_a_copy: LAZY,
    copies_are_not_flushed: LAZY,
    copies_run_on_the_stream_of_compute: ALL,
    staging_memory_is_used_again_too_early: ALL,
    loads_are_reported_before_they_were_submitted: ("xpu",),
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
