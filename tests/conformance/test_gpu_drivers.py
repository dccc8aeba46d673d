# SPDX-License-Identifier: Apache-2.0
"""What the drivers of CUDA and ROCm ask for besides order, on simulated ones and on a GPU.

Every requirement comes with a breakage of `devices/cuda.py`, or of the device around it, that must
show: a test that nothing can fail would prove nothing.
"""

import contextlib
import ctypes
import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import pytest
import torch

from kvhaven.devices import cuda, streams
from kvhaven.devices.base import CopyJob
from kvhaven.devices.cuda import Registered, loaded_library
from kvhaven.devices.plan import Chunks, bytes_at, checksum_at
from kvhaven.devices.streams import StreamDevice
from kvhaven.errors import DeviceCopyError
from kvhaven.layouts import PagedLayout, describe_kv_caches
from tests.devices import DRIVERS, REAL, Opened, opened

WORDS: Final = ("cuda-12.4", "cuda-12.8", "cuda-13.0", "rocm-7")
BATCHES: Final = ("cuda-12.8", "cuda-13.0")
HARDWARE: Final = tuple(word for word in REAL if word == "cuda")
"""A real NVIDIA GPU. What breaks there is as seen on an H100 with driver 580 and CUDA 13."""
EVERYWHERE: Final = (*WORDS, *HARDWARE)
WAIT_S = 30.0
LAYERS, PAGE = 2, 64

Patch = pytest.MonkeyPatch
Check = Callable[[str], None]
Breakage = Callable[[Patch], None]


class Machine:
    """A device, KV of so many small blocks, and host memory for all of them, registered."""

    def __init__(self, found: Opened, blocks: int = 16, *, registered: bool = True) -> None:
        assert isinstance(found.device, StreamDevice)
        self.device = found.device
        self.simulation = found.simulation
        self.layout = layout_of(found, blocks)
        size = self.layout.payload_bytes(blocks)
        self._memory = ctypes.create_string_buffer(size + 2 * 4096)
        self.base = -(-ctypes.addressof(self._memory) // 4096) * 4096
        self.bytes = bytes_at(self.base, size)
        if registered:
            self.device.register_host(self.base, size)

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Let this thread capture a graph, in torch's default mode. Raises if it becomes void."""
        if self.simulation is not None:
            with self.simulation.capturing():
                yield
            return
        values = torch.ones(4, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            values.add_(1)
            yield
        graph.replay()
        assert bool((values == 2).all())

    def round_trip(self, chunks: list[list[int]] | None = None) -> None:
        """Store chunks and load them again; all must be right."""
        chunks = chunks or [[0, 5, 1], [7, 9, 3]]
        block = self.layout.payload_bytes(1)
        ends = itertools.accumulate((len(chunk) * block for chunk in chunks[:-1]), initial=0)
        places = [self.base + end for end in ends]
        blocks = sorted(itertools.chain(*chunks))
        for tensor in self.layout.tensors:
            tensor[blocks] = 3
        ended(self.device.store(self.layout, chunks, places))
        assert (self.bytes[: len(blocks) * block] == 3).all()
        for tensor in self.layout.tensors:
            tensor[blocks] = 0
        ended(self.device.load(self.layout, chunks, places))
        for tensor in self.layout.tensors:
            assert bool((tensor[blocks].cpu() == 3).all())


def layout_of(found: Opened, blocks: int) -> PagedLayout:
    """KV of pages of bytes, an allocation a layer; no two blocks in a chunk touch."""
    tensors = {
        f"l{index}": found.tensor(torch.zeros(blocks, 1, 4, PAGE // 4, dtype=torch.uint8))
        for index in range(LAYERS)
    }
    return describe_kv_caches(
        tensors,
        layer_specs=dict.fromkeys(tensors, (PAGE, 4)),
        num_blocks=blocks,
        kernel_tag=found.device.kernel_tag,
    )


def ended(job: CopyJob) -> None:
    assert job.wait(WAIT_S)
    assert job.error == ""


def in_thread(call: Callable[[], object]) -> None:
    """Make a call in a thread that never did anything on a device."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised again where the test sees it
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    if errors:
        raise errors[0]


# --- what must hold ------------------------------------------------------------------------------


def no_thread_makes_a_context_on_another_device(word: str) -> None:
    """A rank has one GPU; a context on GPU 0 for each rank would take its memory."""
    with opened(word, devices=2, index=1) as found:
        machine = Machine(found, registered=False)
        size = len(machine.bytes)
        in_thread(lambda: machine.device.register_host(machine.base, size))
        assert torch.from_numpy(machine.bytes).is_pinned()
        machine.round_trip()
        in_thread(lambda: machine.device.unregister_host(machine.base, size))
        machine.device.synchronize()
        assert machine.simulation.contexts == {1}


def threads_work_on_device_0_too(word: str) -> None:
    """The runtime says 0 in a new thread, where the driver has no context."""
    with opened(word, seed=3) as found:
        machine = Machine(found, registered=False)
        in_thread(lambda: machine.device.register_host(machine.base, len(machine.bytes)))
        assert torch.from_numpy(machine.bytes).is_pinned()
        machine.round_trip()


def memory_that_cannot_be_registered_disturbs_nobody(word: str) -> None:
    """A runtime's failed call leaves an error behind, which torch tells of the next kernel."""
    with opened(word, registered_bytes=0) as found, contextlib.ExitStack() as stack:
        machine = Machine(found, registered=False)
        size = len(machine.bytes)
        if word in REAL:  # whose driver refuses what is registered
            host = machine.device._make._driver.host  # type: ignore[attr-defined]
            host.register(machine.base, size)
            stack.callback(host.unregister, machine.base)
        machine.device.register_host(machine.base, size)
        assert not machine.device._make._registered.pieces  # type: ignore[attr-defined]
        torch.ones(4, device="cuda").add_(1)
        machine.round_trip()


def large_copies_are_cut_into_batches(word: str) -> None:
    with opened(word) as found:
        machine = Machine(found, blocks=6000)
        machine.round_trip([list(range(0, 6000, 2)), list(range(1, 6000, 2))])


def copies_span_no_two_registrations(word: str) -> None:
    with opened(word) as found:
        machine = Machine(found, registered=False)
        half = len(machine.bytes) // 16 + 13
        machine.device.register_host(machine.base, half)
        machine.device.register_host(machine.base + half, len(machine.bytes) - half)
        machine.round_trip()


def unregistered_memory_never_blocks(word: str) -> None:
    """It goes through staging memory, so no copy waits for the stream in its call."""
    with opened(word) as found:
        machine = Machine(found, registered=False)
        machine.simulation.synchronizations.clear()
        machine.round_trip()
        waits = machine.simulation.synchronizations
        assert [wait for wait in waits if wait.thread.endswith("-submit")] == []


def torchs_own_runtime_is_used(word: str) -> None:
    """Another file of the same library would know nothing of torch's streams."""
    with opened(word) as found:
        Machine(found).round_trip()


def captures_are_left_alone(word: str) -> None:
    """The engine captures while the arena is registered, and while copies end."""
    with opened(word, seed=1) as found:
        machine = Machine(found)
        more = ctypes.create_string_buffer(2 * 4096)
        address = -(-ctypes.addressof(more) // 4096) * 4096
        staged = Machine(found, registered=False)
        jobs: list[CopyJob] = []
        chunks = [[0, 5]]
        for one in (machine, staged):
            jobs.append(one.device.store(one.layout, chunks, [one.base]))
            jobs.append(one.device.load(one.layout, [[2, 3]], [one.base + 4 * PAGE * LAYERS]))

        def load(one: Machine) -> None:
            jobs.append(one.device.load(one.layout, chunks, [one.base]))

        with machine.capturing():
            in_thread(lambda: machine.device.register_host(address, 4096))
            for one in (machine, staged):
                in_thread(functools.partial(load, one))
            for job in jobs:
                ended(job)
            in_thread(lambda: machine.device.unregister_host(address, 4096))


def the_engines_threads_keep_their_capture_mode(word: str) -> None:
    """Relaxing it there would hide mistakes of the engine's own."""
    with opened(word) as found:
        machine = Machine(found)
        machine.round_trip()
        machine.device.unregister_host(machine.base, len(machine.bytes))
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        with (
            pytest.raises(RuntimeError, match="previous error during capture"),
            machine.capturing(),
            contextlib.suppress(RuntimeError),
        ):
            event.synchronize()


# --- what breaks it -----------------------------------------------------------------------------


def the_device_is_not_set(patch: Patch) -> None:
    patch.setattr(StreamDevice, "_select", lambda _: None)


def registering_leaves_the_device_as_it_is(patch: Patch) -> None:
    def register_host(device: StreamDevice, address: int, size: int) -> None:
        device._make.register(address, size)

    patch.setattr(StreamDevice, "register_host", register_host)


def threads_that_wait_leave_the_device_as_it_is(patch: Patch) -> None:
    select = StreamDevice._select

    def select_elsewhere(device: StreamDevice) -> None:
        if not threading.current_thread().name.endswith(("-store", "-load")):
            select(device)

    patch.setattr(StreamDevice, "_select", select_elsewhere)


def torch_alone_sets_the_device(patch: Patch) -> None:
    patch.setattr(cuda._CudaDriver, "select", lambda *_: None)


def errors_stay_pending(patch: Patch) -> None:
    raising = cuda._raising

    def raising_only(*given: Any, failed: object = None) -> Any:
        del failed
        return raising(*given)

    patch.setattr(cuda, "_raising", raising_only)


def the_runtime_registers(patch: Patch) -> None:
    def register(calls: Any, address: int, size: int) -> None:
        del calls
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if error := runtime.cudaHostRegister(address, size, 1):
            raise DeviceCopyError(f"error {error}")

    patch.setattr(cuda._HostCalls, "register", register)


def batches_have_any_size(patch: Patch) -> None:
    patch.setattr(cuda, "BATCH", 10**6)


def moves_are_not_split(patch: Patch) -> None:
    patch.setattr(cuda, "split_at", lambda moves, _: moves)


def all_memory_counts_as_registered(patch: Patch) -> None:
    patch.setattr(Registered, "holds", lambda *_: True)


def a_second_runtime_is_loaded(patch: Patch) -> None:
    patch.setattr(cuda, "loaded_library", lambda name, *_: ctypes.CDLL(name))


def threads_of_others_are_not_relaxed(patch: Patch) -> None:
    patch.setattr(cuda._Gpu, "_relaxed", lambda _: contextlib.nullcontext())


def our_threads_are_not_relaxed(patch: Patch) -> None:
    patch.setattr(cuda._Gpu, "prepare_thread", lambda _: None)


def every_thread_is_relaxed(patch: Patch) -> None:
    select = cuda._Gpu.select

    def select_and_relax(gpu: Any, index: int) -> None:
        select(gpu, index)
        gpu.prepare_thread()

    patch.setattr(cuda._Gpu, "select", select_and_relax)


NVIDIA: Final = (*WORDS[:3], *HARDWARE)
REQUIREMENTS: Final[dict[Check, dict[Breakage, tuple[str, ...]]]] = {
    no_thread_makes_a_context_on_another_device: {
        the_device_is_not_set: WORDS,
        registering_leaves_the_device_as_it_is: WORDS,
        threads_that_wait_leave_the_device_as_it_is: WORDS,
    },
    threads_work_on_device_0_too: {
        the_device_is_not_set: NVIDIA,
        torch_alone_sets_the_device: WORDS[:3],
    },
    memory_that_cannot_be_registered_disturbs_nobody: {
        errors_stay_pending: ("rocm-7",),
        the_runtime_registers: NVIDIA,
    },
    large_copies_are_cut_into_batches: {batches_have_any_size: BATCHES},
    copies_span_no_two_registrations: {moves_are_not_split: EVERYWHERE},
    unregistered_memory_never_blocks: {all_memory_counts_as_registered: WORDS},
    torchs_own_runtime_is_used: {a_second_runtime_is_loaded: ("rocm-7",)},
    captures_are_left_alone: {
        threads_of_others_are_not_relaxed: EVERYWHERE,
        our_threads_are_not_relaxed: EVERYWHERE,
    },
    the_engines_threads_keep_their_capture_mode: {every_thread_is_relaxed: EVERYWHERE},
}
"""What breaks each requirement, and where it must show."""

NEED_SIMULATION: Final = (
    no_thread_makes_a_context_on_another_device,
    unregistered_memory_never_blocks,
)


def named(value: object) -> str:
    return value if isinstance(value, str) else value.__name__  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("check", "word"),
    [
        (check, word)
        for check in REQUIREMENTS
        for word in (*WORDS, *(() if check in NEED_SIMULATION else REAL))
    ],
    ids=named,
)
def test_it_holds(check: Check, word: str) -> None:
    check(word)


@pytest.mark.parametrize(
    ("check", "breakage", "word"),
    [
        (check, breakage, word)
        for check, breakages in REQUIREMENTS.items()
        for breakage, words in breakages.items()
        for word in words
    ],
    ids=named,
)
def test_a_breakage_is_seen(
    check: Check, breakage: Breakage, word: str, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(streams, "LOST_S", 0.1)
    monkeypatch.setitem(globals(), "WAIT_S", 1.0)  # for copies that have no end
    breakage(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, DeviceCopyError, pytest.fail.Exception)):
        check(word)


# --- parts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", WORDS)
def test_copies_are_submitted_beside_the_engine(word: str, monkeypatch: Patch) -> None:
    """Thousands of copies take longer than the engine's thread has."""
    threads: list[str] = []
    for driver in (cuda._CudaDriver, cuda._HipDriver):
        copy: Any = driver.copy

        def noted(*given: Any, copy: Any = copy, **how: Any) -> None:
            threads.append(threading.current_thread().name)
            copy(*given, **how)

        monkeypatch.setattr(driver, "copy", noted)
    with opened(word) as found:
        Machine(found).round_trip()
        name = found.device.name
    assert set(threads) == {f"kvhaven-{name}-store-submit", f"kvhaven-{name}-load-submit"}


@pytest.mark.parametrize("word", EVERYWHERE)
def test_checksums_are_computed_while_the_device_copies(word: str, monkeypatch: Patch) -> None:
    """The device is at the second part only when the first one's checksum is there."""
    hashed, seen = threading.Event(), list[bool]()
    passed, checksum = StreamDevice._passed, checksum_at

    def wait(*given: Any) -> bool:
        seen.append(hashed.wait(WAIT_S) if seen else True)
        return passed(*given)

    def note(*place: int) -> Any:
        found = checksum(*place)
        hashed.set()
        return found

    monkeypatch.setattr(streams, "checksum_at", note)
    monkeypatch.setattr(StreamDevice, "_passed", wait)
    with opened(word) as found:
        monkeypatch.setattr(streams, "PART_BYTES", 1)
        machine = Machine(found)
        places = [machine.base, machine.base + machine.layout.payload_bytes(1)]
        job = machine.device.store(machine.layout, [[3], [5]], places)
        ended(job)
        assert seen == [True, True]
        assert list(job.checksums) == [
            checksum(place, machine.layout.payload_bytes(1)) for place in places
        ]


@pytest.mark.parametrize("word", WORDS)
def test_memory_is_registered_while_copies_run(word: str) -> None:
    """In the background, segment by segment: copies take whichever way there is by then."""
    with opened(word, seed=5) as found:
        machine = Machine(found, registered=False)
        block = machine.layout.payload_bytes(1)
        turn = threading.Barrier(2)

        def register() -> None:
            for start in range(machine.base, machine.base + len(machine.bytes), block):
                turn.wait(WAIT_S)
                machine.device.register_host(start, block)

        thread = threading.Thread(target=register)
        thread.start()
        for _ in range(len(machine.bytes) // block):
            turn.wait(WAIT_S)
            machine.round_trip([[0, 5, 1], [7, 9, 3, 4]])
        thread.join(WAIT_S)
        chunks = Chunks.of([[0] * 16], [machine.base])
        assert machine.device._make.reaches(machine.layout, chunks)
        machine.round_trip()


@pytest.mark.parametrize("word", WORDS)
def test_large_segments_are_registered_in_pieces(word: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr(cuda, "PIN_BYTES", 4096)
    with opened(word) as found:
        machine = Machine(found, blocks=200)
        pieces = machine.device._make._registered.pieces  # type: ignore[attr-defined]
        assert list(pieces.values()) == [4096] * 6 + [len(machine.bytes) % 4096]
        machine.round_trip([list(range(0, 200, 2)), list(range(1, 200, 2))])
        machine.device.unregister_host(machine.base, len(machine.bytes))
        assert machine.device._make._registered.pieces == {}  # type: ignore[attr-defined]


@pytest.mark.parametrize("word", WORDS)
def test_what_is_registered_is_given_up_at_the_end(word: str) -> None:
    with opened(word) as found:
        machine = Machine(found)
        machine.device.close()
        assert machine.device._make._registered.pieces == {}  # type: ignore[attr-defined]
        assert not torch.from_numpy(machine.bytes).is_pinned()


def test_ranges_are_registered_when_touching_pieces_hold_them() -> None:
    registered = Registered({100: 50, 150: 50, 300: 10})
    assert registered.borders.tolist() == [100, 150, 200, 300, 310]

    def holds(*ranges: tuple[int, int]) -> bool:
        starts, ends = np.array(ranges).T
        return registered.holds(starts, ends - starts)

    assert holds((100, 200), (120, 160), (300, 310))
    assert not holds((100, 201))
    assert not holds((99, 110))
    assert not holds((100, 110), (250, 260))
    assert not holds((305, 311))
    assert not Registered().holds(np.array([5]), np.array([1]))


def test_a_library_that_is_loaded_is_taken_before_any_that_can_be_found() -> None:
    assert loaded_library("libc.so", ".none")._handle == ctypes.CDLL("libc.so.6")._handle


def test_a_library_that_is_not_loaded_is_looked_for_by_its_versions(monkeypatch: Patch) -> None:
    tried: list[str] = []

    def load(name: str) -> None:
        tried.append(name)
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", load)
    with pytest.raises(OSError, match=r"libnone\.so$"):
        loaded_library("libnone.so", ".7", ".6", "")
    assert tried == ["libnone.so.7", "libnone.so.6", "libnone.so"]


def test_the_drivers_versions_are_as_named() -> None:
    for name, version in DRIVERS.items():
        with opened(f"cuda-{name}") as found:
            assert isinstance(found.device, StreamDevice)
            batch = found.device._make._driver._batch  # type: ignore[attr-defined]
            assert (batch is not None) == (version >= 12080)
