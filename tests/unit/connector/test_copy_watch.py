# SPDX-License-Identifier: Apache-2.0
"""Copies are followed up when they end, also after one that has no end."""

import queue
from collections.abc import Iterator

import pytest

pytest.importorskip("vllm", reason="the connector is vLLM's")

from kvhaven.devices.streams import StreamCopy
from kvhaven.engine import copies
from kvhaven.engine.copies import CopyWatch

WAIT_S = 30.0


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[CopyWatch]:
    monkeypatch.setattr(copies, "_LOOK_AGAIN_S", 0.01)
    made = CopyWatch(synchronous=False)
    yield made
    made.close()
    assert made._thread is not None
    assert not made._thread.is_alive()


class Followed:
    """What was called back, in order."""

    def __init__(self, watch: CopyWatch) -> None:
        self._watch = watch
        self._names: queue.SimpleQueue[str] = queue.SimpleQueue()

    def copy(self, name: str) -> StreamCopy:
        """Begin a copy, and watch it."""
        copy = StreamCopy()
        self._watch.watch(copy, lambda: self._names.put(name))
        return copy

    def next(self) -> str:
        """Wait for the next one that is called back."""
        return self._names.get(timeout=WAIT_S)

    @property
    def none(self) -> bool:
        """Whether nothing else was called back."""
        return self._names.empty()


def test_copies_are_called_back_in_order(watch: CopyWatch) -> None:
    followed = Followed(watch)
    first, second = followed.copy("first"), followed.copy("second")
    second.end()
    first.end()
    assert [followed.next(), followed.next()] == ["first", "second"]


def test_a_lost_copy_is_never_called_back_and_holds_up_no_other(watch: CopyWatch) -> None:
    followed = Followed(watch)
    lost = followed.copy("lost")
    for name in ("one", "two"):
        followed.copy(name).end()
    lost.fail(RuntimeError("the device does not answer"))
    lost.lost.set()
    assert [followed.next(), followed.next()] == ["one", "two"]
    followed.copy("three").end()
    assert followed.next() == "three"
    watch.close()
    assert followed.none


def test_a_copy_that_failed_is_called_back_when_it_ends(watch: CopyWatch) -> None:
    """Until then its memory is in use."""
    followed = Followed(watch)
    failed = followed.copy("failed")
    failed.fail(RuntimeError("out of events"))
    followed.copy("other").end()
    assert followed.next() == "other"
    assert followed.none
    failed.end()
    assert followed.next() == "failed"


def test_a_copy_that_takes_too_long_holds_up_no_other(
    watch: CopyWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "COPY_DEADLINE_S", 0.05)
    followed = Followed(watch)
    slow = followed.copy("slow")
    followed.copy("other").end()
    assert followed.next() == "other"
    slow.end()
    assert followed.next() == "slow"
    monkeypatch.undo()


def test_a_lost_copy_is_not_looked_at_for_ever(
    watch: CopyWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "LOST_S", 0.0)
    followed = Followed(watch)
    lost = followed.copy("lost")
    lost.fail(RuntimeError("the device does not answer"))
    followed.copy("other").end()
    assert followed.next() == "other"
    lost.end()
    watch.close()
    assert followed.none
