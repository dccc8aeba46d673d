# SPDX-License-Identifier: Apache-2.0
"""What fails is the job's error, and a job that has ended touches no memory any more.

On simulated accelerators every call of the driver that a copy makes fails once, in turn; what was
already put on a stream then runs as late as it can. Memory counts as somebody else's as soon as
the job has ended.
"""

import ctypes
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

import pytest
import xxhash

from kvhaven.devices import cuda, staging, streams
from kvhaven.devices.base import CopyJob
from kvhaven.devices.cpu import CpuDevice
from kvhaven.devices.plan import Chunks, bytes_at, checksum_at
from kvhaven.devices.streams import StreamDevice
from kvhaven.devices.threads import HostThreads
from kvhaven.errors import DeviceCopyError, LayoutError
from tests.conformance.device_program import BLOCKS, kv_layout
from tests.devices import SIMULATED, Opened, opened
from tests.simulators.native import CALLS

WAIT_S = 30.0
CHUNKS: Final = [[0, 5, 1, 2], [7, 3], [6, 8]]
"""The blocks of the copies that fail; 4, 9, 10 and 11 are others."""
OTHERS: Final = [[4, 9], [10, 11]]
MOST: Final = 100
"""Calls of a kind that no copy makes."""


class Bench:
    """A device with KV and host memory: the first half is of the copies that fail."""

    def __init__(self, found: Opened) -> None:
        assert isinstance(found.device, StreamDevice)
        self.device = found.device
        self.simulation = found.simulation
        self.layout = kv_layout(found)
        self.block = self.layout.payload_bytes(1)
        self._memory = ctypes.create_string_buffer(2 * BLOCKS * self.block + 4096)
        self.base = -(-ctypes.addressof(self._memory) // 4096) * 4096
        self.bytes = bytes_at(self.base, 2 * BLOCKS * self.block)
        self.device.register_host(self.base, len(self.bytes))

    def places(self, chunks: list[list[int]], half: int) -> list[int]:
        """Return an address for each chunk, one after the other."""
        counts = itertools.accumulate((len(chunk) for chunk in chunks[:-1]), initial=0)
        start = self.base + half * len(self.bytes) // 2
        return [start + count * self.block for count in counts]

    def fill_blocks(self, chunks: list[list[int]], value: int) -> None:
        """Put compute on the current stream that writes blocks, and wait for nothing."""
        for tensor in self.layout.tensors:
            tensor[sorted(itertools.chain(*chunks))] = value

    def holds(self, chunks: list[list[int]], value: int) -> bool:
        """Return whether all of some blocks have a value, when all work has run."""
        self.simulation.drain()
        blocks = sorted(itertools.chain(*chunks))
        return all(bool((tensor.cpu()[blocks] == value).all()) for tensor in self.layout.tensors)

    def copies_work(self, value: int) -> bool:
        """Store other blocks, load them again, and return whether all was right."""
        self.fill_blocks(OTHERS, value)
        places = self.places(OTHERS, half=1)
        stored = self.device.store(self.layout, OTHERS, places)
        assert stored.wait(WAIT_S)
        assert stored.error == ""
        assert list(stored.checksums) == [checksum_at(place, 2 * self.block) for place in places]
        self.fill_blocks(OTHERS, 0)
        loaded = self.device.load(self.layout, OTHERS, places)
        assert loaded.wait(WAIT_S)
        assert loaded.error == ""
        return self.holds(OTHERS, value)

    def all_staging_memory_is_free(self) -> bool:
        """Take all buffers, and give them back."""
        pool = self.device._staging
        buffers = [pool.take(1) for _ in range(staging._PIECES)]
        for buffer in buffers:
            pool.give_back(buffer)
        return True


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every copy have several parts, and nobody wait for long."""
    monkeypatch.setattr(staging, "PIECE_BYTES", 800)
    monkeypatch.setattr(staging, "TAKE_S", 5.0)
    monkeypatch.setattr(cuda, "BATCH", 3)
    monkeypatch.setattr(cuda, "PLANNED", 8)
    monkeypatch.setattr(streams, "PART_BYTES", 500)


@pytest.fixture(params=SIMULATED)
def bench(request: pytest.FixtureRequest, small_pieces: None) -> Iterator[Bench]:
    del small_pieces
    with opened(request.param, seed=len(request.node.name)) as found:
        made = Bench(found)
        yield made
        made.device.unregister_host(made.base, len(made.bytes))


@pytest.mark.parametrize("call", CALLS)
def test_a_store_that_fails_writes_nothing_after_its_end(bench: Bench, call: str) -> None:
    half = bench.bytes[: len(bench.bytes) // 2]
    for nth in range(1, MOST):
        bench.fill_blocks(CHUNKS, 3)
        with bench.simulation.failing(call, nth) as failed:
            job = bench.device.store(bench.layout, CHUNKS, bench.places(CHUNKS, half=0))
            assert job.wait(WAIT_S)
            fired = failed()
        half[:] = 0x5A  # somebody else's now
        bench.simulation.drain()
        assert bench.copies_work(nth), "of both directions, behind all that was under way"
        assert (half == 0x5A).all()
        if not fired:
            assert job.error == ""
            break
        assert job.error != ""
        assert list(job.checksums) == []
    assert nth < MOST - 1
    assert bench.all_staging_memory_is_free()


@pytest.mark.parametrize("call", CALLS)
def test_a_load_that_fails_writes_nothing_after_its_end(bench: Bench, call: str) -> None:
    bench.bytes[:] = 9
    for nth in range(1, MOST):
        with bench.simulation.failing(call, nth) as failed:
            job = bench.device.load(bench.layout, CHUNKS, bench.places(CHUNKS, half=0))
            assert job.wait(WAIT_S)
            fired = failed()
        bench.fill_blocks(CHUNKS, 7)
        assert bench.holds(CHUNKS, 7)
        assert bench.copies_work(nth)
        assert bench.holds(CHUNKS, 7)
        if not fired:
            assert job.error == ""
            break
        assert job.error != ""
    assert nth < MOST - 1
    assert bench.all_staging_memory_is_free()


@pytest.mark.parametrize("call", CALLS)
def test_the_forward_waits_for_a_load_that_fails(bench: Bench, call: str) -> None:
    """It recomputes the blocks, and the part of the load that was begun must not come later."""
    bench.bytes[:] = 9
    for nth in range(1, MOST):
        with bench.simulation.failing(call, nth) as failed:
            job = bench.device.load(bench.layout, CHUNKS, bench.places(CHUNKS, half=0))
            bench.device.forward_waits(job)
            fired = failed()
        bench.fill_blocks(CHUNKS, 7)
        assert bench.holds(CHUNKS, 7)
        assert job.wait(WAIT_S)
        assert bench.holds(CHUNKS, 7)
        if not fired:
            break
    assert nth < MOST - 1


def test_a_store_ends_after_its_checksums_although_a_later_part_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They read the memory, which the service may give to another chunk once the job has ended."""
    reading, ended = threading.Event(), threading.Event()
    overtaken: list[bool] = []

    def read_slowly(*place: int) -> Any:
        reading.set()
        overtaken.append(ended.wait(0.2))
        return checksum_at(*place)

    monkeypatch.setattr(streams, "checksum_at", read_slowly)
    with opened("cuda-12.8") as found:
        bench = Bench(found)
        copy, parts = bench.device._make.copy, itertools.count()

        def copy_or_fail(*given: Any, **how: Any) -> None:
            if next(parts):
                assert reading.wait(WAIT_S)
                raise MemoryError("the test lets this fail")
            copy(*given, **how)

        monkeypatch.setattr(bench.device._make, "copy", copy_or_fail)
        job = bench.device.store(bench.layout, CHUNKS, bench.places(CHUNKS, half=0))
        assert job.wait(WAIT_S)
        ended.set()
        assert job.error == "MemoryError: the test lets this fail"
        assert list(job.checksums) == []
    assert overtaken == [False]


def test_a_copy_ends_although_the_device_refuses_to_be_waited_for_at_first(bench: Bench) -> None:
    """As ROCm does while the engine captures a graph."""
    bench.fill_blocks(CHUNKS, 3)
    with bench.simulation.failing("synchronize", times=7) as failed:
        job = bench.device.store(bench.layout, CHUNKS, bench.places(CHUNKS, half=0))
        assert job.wait(WAIT_S)
        assert failed() == 7
    assert job.error != ""
    assert bench.copies_work(4)


def test_a_copy_on_a_lost_device_has_no_end(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory stays in use: nothing shows that the device has stopped writing."""
    monkeypatch.setattr(streams, "LOST_S", 0.2)
    monkeypatch.setattr(streams, "STORE_S", 0.5)
    with bench.simulation.failing("synchronize", times=10**9):
        job = bench.device.store(bench.layout, CHUNKS, bench.places(CHUNKS, half=0))
        assert isinstance(job, streams.StreamCopy)
        assert job.lost.wait(WAIT_S)
        assert job.error != ""
        with pytest.raises(DeviceCopyError, match="a copy cannot be waited for"):
            bench.device.synchronize()
    assert not job.wait(0.2)
    assert bench.copies_work(4), "it is back"
    assert not job.done()


def test_a_store_that_the_engine_cannot_wait_for_any_longer_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gaudi's engine goes on, and may overwrite its blocks."""
    monkeypatch.setattr(streams, "STORE_S", 0.1)
    with opened("hpu-lazy") as found:
        bench = Bench(found)
        with bench.simulation.failing("synchronize", times=4):
            job = bench.device.store(bench.layout, CHUNKS, bench.places(CHUNKS, half=0))
            assert "within 0 s" in job.error or "lets this fail" in job.error
        assert job.wait(WAIT_S)
        assert job.error != ""


def test_bad_arguments_are_refused_before_anything_is_begun(bench: Bench) -> None:
    for copy in (bench.device.store, bench.device.load):
        with pytest.raises(LayoutError):
            copy(bench.layout, [*CHUNKS, [BLOCKS]], [*bench.places(CHUNKS, half=0), bench.base])
    assert bench.device._jobs == {}


def test_closing_waits_for_copies_and_later_ones_fail(bench: Bench) -> None:
    bench.fill_blocks(CHUNKS, 3)
    half = len(bench.bytes) // 2
    jobs = [
        bench.device.store(bench.layout, CHUNKS, bench.places(CHUNKS, half=0)),
        bench.device.load(bench.layout, OTHERS, bench.places(OTHERS, half=1)),
        bench.device.store(bench.layout, CHUNKS, bench.places(CHUNKS, half=0)),
    ]
    bench.device.close()
    assert [job.done() for job in jobs] == [True] * 3
    assert [job.error for job in jobs] == [""] * 3
    bench.bytes[:half] = 0x5A
    bench.simulation.drain()
    assert (bench.bytes[:half] == 0x5A).all()
    for copy in (bench.device.store, bench.device.load):
        late = copy(bench.layout, CHUNKS, bench.places(CHUNKS, half=0))
        assert late.wait(WAIT_S)
        assert late.error == f"DeviceCopyError: {bench.device.name}: the device is closed"
        bench.device.forward_waits(late)


def test_synchronizing_waits_for_the_hosts_part(bench: Bench) -> None:
    """Also while the thread that does it is held up."""
    free = threading.Event()
    bench.fill_blocks(CHUNKS, 3)
    jobs: list[CopyJob] = []

    def hold_up() -> None:
        free.wait(WAIT_S)

    def store_and_synchronize() -> None:
        with bench.simulation.module.device(0):
            jobs.append(bench.device.store(bench.layout, CHUNKS, bench.places(CHUNKS, half=0)))
            bench.device.synchronize()
            assert jobs[0].done()
            jobs.append(jobs[0])

    bench.device._stores.finishes.put(hold_up)
    engine = threading.Thread(target=store_and_synchronize)
    engine.start()
    engine.join(0.05)
    assert len(jobs) < 2
    free.set()
    engine.join(WAIT_S)
    assert len(jobs) == 2


# --- the CPU -------------------------------------------------------------------------------------


class Failing:
    """A function of somebody else's that fails at its nth call."""

    def __init__(self, function: Callable[..., Any], nth: int) -> None:
        self._function = function
        self._left = nth

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self._left -= 1
        if self._left == 0:
            raise MemoryError("the test lets this fail")
        return self._function(*arguments, **options)

    @property
    def fired(self) -> bool:
        return self._left <= 0


@pytest.mark.parametrize("word", ["cpu", "cpu-3-threads"])
@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_copy_of_the_cpus_that_fails_says_so_in_its_job(
    word: str, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(word) as found:
        layout = kv_layout(found)
        block = layout.payload_bytes(1)
        memory = ctypes.create_string_buffer(8 * block)
        start = ctypes.addressof(memory)
        places = [start, start + 4 * block, start + 6 * block]
        copy = getattr(found.device, direction)
        for nth in range(1, MOST):
            failing = Failing(ctypes.memmove, nth)
            with monkeypatch.context() as patch:
                patch.setattr(ctypes, "memmove", failing)
                job = copy(layout, CHUNKS, places)
            assert job.done()
            if not failing.fired:
                assert job.error == ""
                break
            assert job.error == "MemoryError: the test lets this fail"
            assert list(job.checksums) == []
            assert copy(layout, CHUNKS, places).error == ""
        assert 1 < nth < MOST - 1


def test_no_thread_copies_any_more_when_another_one_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One thread fails while another is in the midst of a chunk."""
    device = CpuDevice(copy_threads=2)
    layout = kv_layout(Opened(device))
    block = layout.payload_bytes(1)
    memory = ctypes.create_string_buffer(4 * block)
    start = ctypes.addressof(memory)
    both, returned = threading.Barrier(2), threading.Event()
    overtaken: list[bool] = []
    real = xxhash.xxh3_128
    turn = itertools.count()

    def slow_or_failing() -> Any:
        both.wait(WAIT_S)
        if next(turn) == 0:
            raise MemoryError("the test lets this fail")
        overtaken.append(returned.wait(0.2))
        return real()

    monkeypatch.setattr(xxhash, "xxh3_128", slow_or_failing)
    job = device.store(layout, [[0, 1], [2, 3]], [start, start + 2 * block])
    returned.set()
    assert job.error == "MemoryError: the test lets this fail"
    assert overtaken == [False]
    device.close()


def test_a_job_does_not_wait_for_another_jobs_threads() -> None:
    """All helpers are busy: the caller does all pieces itself."""
    pool = HostThreads(2, frozenset({0}))
    busy, free = threading.Barrier(3), threading.Event()

    def block(_: int) -> None:
        busy.wait(WAIT_S)
        free.wait(WAIT_S)

    finish = pool.begin(block, 2)
    busy.wait(WAIT_S)
    done: list[int] = []
    other = threading.Thread(target=pool.run, args=(done.append, 5), daemon=True)
    other.start()
    other.join(WAIT_S)
    assert not other.is_alive()
    assert done == [0, 1, 2, 3, 4]
    free.set()
    finish()
    pool.close()


@pytest.mark.parametrize("count", [1, 3])
def test_pieces_are_done_while_the_caller_does_something_else(count: int) -> None:
    threads = HostThreads(count, frozenset({0}))
    begun, done = threading.Event(), list[int]()

    def note(index: int) -> None:
        begun.set()
        done.append(index)

    finish = threads.begin(note, 5)
    assert begun.wait(WAIT_S)
    finish()
    assert sorted(done) == [0, 1, 2, 3, 4]
    threads.close()


def test_copies_are_made_without_threads_where_none_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    done: list[int] = []
    threads = HostThreads(4, frozenset({0}))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        threads.run(done.append, 5)
    assert done == [0, 1, 2, 3, 4]
    threads.close()


@pytest.mark.parametrize("how", ["run", "begin"])
def test_a_job_waits_for_a_helper_whose_own_thread_could_not_be_started(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`submit` raised, but had queued its call, which another job's thread makes."""
    threads = HostThreads(2, frozenset({0}))
    free, helping, returned = threading.Event(), threading.Event(), threading.Event()
    overtaken: list[bool] = []

    def hold(_: int) -> None:
        free.wait(WAIT_S)

    def work(_: int) -> None:
        if threading.current_thread().name.startswith("kvhaven-copy"):
            helping.set()
            overtaken.append(returned.wait(0.2))
        else:
            free.set()
            helping.wait(WAIT_S)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    other = threads.begin(hold, 1)  # on the only thread that starts
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        if how == "run":
            threads.run(work, 2)
        else:
            threads.begin(work, 2)()
    returned.set()
    other()
    threads.close()
    assert overtaken == [False]


def test_a_piece_that_cannot_be_described_gives_its_buffer_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = kv_layout(Opened(CpuDevice()))
    pool = staging.StagingPool(pinned=False)
    monkeypatch.setattr(staging, "TAKE_S", 0.1)
    for _ in range(staging._PIECES + 1):
        with monkeypatch.context() as patch:
            patch.setattr(staging, "replace", Failing(replace, 1))
            with pytest.raises(MemoryError):
                staging.Piece(layout, Chunks.of([[0, 1]], [0]), pool)
    assert pool.take(1).numel() >= 1


def test_staging_memory_is_waited_for_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "TAKE_S", 0.1)
    pool = staging.StagingPool(pinned=False)
    buffers = [pool.take(1) for _ in range(staging._PIECES)]
    with pytest.raises(DeviceCopyError, match="all 4 buffers have been in use for 0 s"):
        pool.take(1)
    pool.give_back(buffers[0])
    assert pool.take(1) is buffers[0]
