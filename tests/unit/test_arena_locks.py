# SPDX-License-Identifier: Apache-2.0
"""The lock lives exactly as long as the mapping: shown with real processes.

The kernel unmaps on its own time after a process ended, so "free" is waited for, briefly.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from kvhaven.arena.segment import MappedSegment, Segment
from kvhaven.errors import ArenaError

SIZE = 1 << 20
MINE, BEYOND = 5, 1 << 40

WORKER = """
import os, sys
from kvhaven.arena.segment import MappedSegment
fd, size, byte = map(int, sys.argv[1:4])
mapped = MappedSegment.map(0, fd, size, byte)
def close_every_descriptor():
    closed = 0
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        if os.path.islink(path) and os.readlink(path).startswith("/memfd:"):
            os.close(int(name))
            closed += 1
    return closed
print("mapped", flush=True)
for line in sys.stdin:
    answer = eval(line)
    print(answer, flush=True)
"""


class Worker:
    """A process that has mapped the segment and does what it is told, an expression a line."""

    def __init__(self, segment: Segment, byte: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(segment.fd), str(SIZE), str(byte)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[segment.fd],
        )
        assert self.hear() == "mapped"

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, expression: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(expression + "\n")
        self.process.stdin.flush()
        return self.hear()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = Segment.create(0, SIZE)
    yield made
    made.close()


@pytest.fixture
def worker(segment: Segment) -> Iterator[Worker]:
    made = Worker(segment, MINE)
    yield made
    made.end()


def becomes_free(segment: Segment, byte: int) -> bool:
    deadline = time.monotonic() + 5
    while segment.mapped_by_others(byte):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def test_the_service_sees_who_maps_and_only_them(segment: Segment) -> None:
    assert not segment.mapped_by_others(MINE)
    mapped = MappedSegment.map(0, os.dup(segment.fd), SIZE, MINE)
    assert segment.mapped_by_others(MINE)
    assert not segment.mapped_by_others(MINE - 1)
    assert not segment.mapped_by_others(MINE + 1)
    mapped.close()
    assert not segment.mapped_by_others(MINE)


def test_a_byte_beyond_the_end_serves_as_well(segment: Segment) -> None:
    mapped = MappedSegment.map(0, os.dup(segment.fd), SIZE, BEYOND)
    assert segment.mapped_by_others(BEYOND)
    assert not segment.mapped_by_others(BEYOND - 1)
    mapped.close()
    assert not segment.mapped_by_others(BEYOND)


def test_two_may_map_with_a_byte_each_but_not_with_one(segment: Segment) -> None:
    first = MappedSegment.map(0, os.dup(segment.fd), SIZE, 0)
    second = MappedSegment.map(0, os.dup(segment.fd), SIZE, 1)
    with pytest.raises(ArenaError, match="holds the lock on byte 1"):
        MappedSegment.map(0, os.dup(segment.fd), SIZE, 1)
    first.close()
    assert not segment.mapped_by_others(0)
    assert segment.mapped_by_others(1)
    second.close()


def test_the_mapping_alone_holds_the_lock(segment: Segment, worker: Worker) -> None:
    assert worker.tell("close_every_descriptor()") == "1"  # what Python's mmap keeps
    assert segment.mapped_by_others(MINE)
    worker.tell("mapped.memory.__setitem__(slice(0, 5), b'alive')")
    assert bytes(segment.memory[:5]) == b"alive"


def test_unmapping_frees_the_lock_of_a_process_that_lives_on(
    segment: Segment, worker: Worker
) -> None:
    worker.tell("mapped.close()")
    assert not segment.mapped_by_others(MINE)
    assert worker.process.poll() is None


def test_a_killed_process_holds_nothing(segment: Segment, worker: Worker) -> None:
    assert segment.mapped_by_others(MINE)
    worker.process.kill()
    worker.process.wait()
    assert becomes_free(segment, MINE)


def test_a_stopped_process_keeps_its_lock_until_it_is_gone(
    segment: Segment, worker: Worker
) -> None:
    worker.process.send_signal(signal.SIGSTOP)
    time.sleep(0.1)
    assert segment.mapped_by_others(MINE)
    worker.process.send_signal(signal.SIGCONT)
    assert worker.tell("bytes(mapped.memory[:1])") == "b'\\x00'"
    assert segment.mapped_by_others(MINE)
    worker.process.send_signal(signal.SIGSTOP)
    worker.process.kill()
    worker.process.wait()
    assert becomes_free(segment, MINE)


def test_a_forked_child_keeps_the_lock_after_its_parent(segment: Segment, worker: Worker) -> None:
    child = int(
        worker.tell("os.fork() or (close_every_descriptor(), __import__('time').sleep(60))")
    )
    try:
        worker.tell("mapped.close()")
        assert segment.mapped_by_others(MINE)
        worker.end()
        time.sleep(0.1)
        assert segment.mapped_by_others(MINE)
    finally:
        os.kill(child, signal.SIGKILL)
    assert becomes_free(segment, MINE)


def test_a_program_started_by_the_worker_inherits_neither(segment: Segment, worker: Worker) -> None:
    child = int(worker.tell("__import__('subprocess').Popen(['sleep', '60']).pid"))
    try:
        worker.process.kill()
        worker.process.wait()
        assert becomes_free(segment, MINE)
    finally:
        os.kill(child, signal.SIGKILL)


def test_locks_and_bytes_outlive_the_service(worker: Worker, segment: Segment) -> None:
    segment.memory[:4] = b"kept"
    segment.close()
    assert worker.tell("bytes(mapped.memory[:4])") == "b'kept'"
