# SPDX-License-Identifier: Apache-2.0
"""The simulated drivers of CUDA and ROCm: what they do, refuse, and leave behind."""

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.simulators import simulated
from tests.simulators.plays import SEEDS, is_all, is_poison
from tests.simulators.simulation import Simulation

INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED = 1, 2, 3
INVALID_CONTEXT, INVALID_HANDLE, NOT_FOUND = 201, 400, 500
ALREADY_REGISTERED, NOT_REGISTERED, CAPTURE_UNSUPPORTED = 712, 713, 900
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2


class Attributes(ctypes.Structure):
    """`CUmemcpyAttributes`."""

    _fields_ = (
        ("order", ctypes.c_uint),
        ("source", ctypes.c_uint * 2),
        ("target", ctypes.c_uint * 2),
        ("flags", ctypes.c_uint),
    )


class Machine:
    """Two pieces of device memory, host memory, and the calls of the driver."""

    def __init__(self, sim: Simulation, kind: str = "cuda") -> None:
        self.sim = sim
        self.device = torch.arange(64, dtype=torch.uint8, device="cuda")
        self.host = torch.zeros(64, dtype=torch.uint8)
        self.stream = sim.module.Stream()
        sim.drain()
        cuda = kind == "cuda"
        driver = ctypes.CDLL("libcuda.so.1" if cuda else "libamdhip64.so.7")
        self._driver = driver
        self._to_host = driver.cuMemcpyDtoHAsync_v2 if cuda else driver.hipMemcpyDtoHAsync
        self._to_device = driver.cuMemcpyHtoDAsync_v2 if cuda else driver.hipMemcpyHtoDAsync
        self._register = driver.cuMemHostRegister_v2 if cuda else driver.hipHostRegister
        self._unregister = driver.cuMemHostUnregister if cuda else driver.hipHostUnregister
        self._mode = (
            driver.cuThreadExchangeStreamCaptureMode
            if cuda
            else driver.hipThreadExchangeStreamCaptureMode
        )

    def to_host(self, first: int = 0, count: int = 64) -> int:
        target, source = self.host.data_ptr() + first, self.device.data_ptr() + first
        return int(self._to_host(*_arguments(target, source, count, self.stream.cuda_stream)))

    def to_device(self, first: int = 0, count: int = 64) -> int:
        target, source = self.device.data_ptr() + first, self.host.data_ptr() + first
        return int(self._to_device(*_arguments(target, source, count, self.stream.cuda_stream)))

    def register(self, first: int = 0, count: int = 64) -> int:
        return int(self._register(*_arguments(self.host.data_ptr() + first, count), 1))

    def unregister(self, first: int = 0) -> int:
        return int(self._unregister(*_arguments(self.host.data_ptr() + first)))

    def exchange_mode(self, mode: int) -> int:
        value = ctypes.c_int(mode)
        assert self._mode(ctypes.byref(value)) == 0
        return value.value

    def batch_call(self, version: int = 12080) -> Any:
        found = ctypes.c_void_p()
        error = self._driver.cuGetProcAddress_v2(
            b"cuMemcpyBatchAsync", ctypes.byref(found), version, ctypes.c_uint64(0), None
        )
        assert (error == 0) == bool(found.value)
        return ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 9)(found.value or 0)

    def batch(self, *moves: tuple[int, int, int], order: int = 1, stream: int | None = None) -> int:
        """Copy `(host offset, device offset, size)` to the host in a batch."""
        host, device, size = np.array(moves, dtype=np.uint64).reshape(-1, 3).T
        targets = np.ascontiguousarray(host + np.uint64(self.host.data_ptr()))
        sources = np.ascontiguousarray(device + np.uint64(self.device.data_ptr()))
        sizes = np.ascontiguousarray(size)
        attributes, first, failed = Attributes(order), ctypes.c_size_t(0), ctypes.c_size_t(0)
        error = self.batch_call()(
            *(part.ctypes.data for part in (targets, sources, sizes)),
            len(sizes),
            ctypes.addressof(attributes),
            ctypes.addressof(first),
            1,
            ctypes.addressof(failed),
            self.stream.cuda_stream if stream is None else stream,
        )
        return int(error)


def _arguments(*values: int) -> tuple[ctypes.c_void_p, ...]:
    return tuple(ctypes.c_void_p(value) for value in values)


def in_thread(call: Callable[[], int]) -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("kind", ["cuda", "rocm"])
def test_copies_of_registered_memory_are_late(kind: Any) -> None:
    with simulated(kind) as sim:
        machine = Machine(sim, kind)
        assert machine.register() == 0
        assert machine.host.is_pinned()
        assert machine.to_host() == 0
        assert is_poison(machine.host)
        machine.stream.synchronize()
        assert machine.host.tolist() == list(range(64))
        machine.host.fill_(7)
        assert machine.to_device(8, 8) == 0
        machine.host.fill_(9)
        assert machine.device.cpu()[:8].tolist() == list(range(8))
        machine.stream.synchronize()
        assert is_all(machine.device.cpu()[8:16], 9), "the host's memory is read when it runs"
        assert machine.unregister() == 0
        assert not machine.host.is_pinned()


@pytest.mark.parametrize("kind", ["cuda", "rocm"])
def test_copies_of_unregistered_memory_wait(kind: Any) -> None:
    with simulated(kind) as sim:
        machine = Machine(sim, kind)
        with sim.module.stream(machine.stream):
            machine.device.add_(1)
        sim.synchronizations.clear()
        assert machine.to_host() == 0
        assert machine.host.tolist() == list(range(1, 65))
        machine.host.fill_(7)
        assert machine.to_device() == 0
        machine.host.fill_(9)
        machine.stream.synchronize()
        assert is_all(machine.device.cpu(), 7), "it was taken in the call"
        assert [seen.what for seen in sim.synchronizations[:2]] == [
            "copy to the host",
            "copy from the host",
        ]


def test_a_batch_has_no_order_within() -> None:
    orders = set()
    for seed in SEEDS:
        with simulated("cuda", seed=seed) as sim:
            machine = Machine(sim)
            assert machine.register() == 0
            assert machine.batch(*((at, at, 8) for at in range(0, 64, 8))) == 0
            assert is_poison(machine.host)
            assert sim.tick()
            arrived = machine.host.view(8, 8)[:, 1] != 0xA5
            assert 0 < arrived.sum() < 8, "others see a part of it"
            orders.add(tuple(arrived.tolist()))
            sim.drain()
            assert machine.host.tolist() == list(range(64))
    assert len(orders) > len(SEEDS) // 2


def test_batches_that_cannot_be_are_refused() -> None:
    with simulated("cuda", devices=2) as sim:
        machine = Machine(sim)
        assert machine.batch((0, 0, 8)) == INVALID_VALUE, "not registered"
        assert machine.register(0, 32) == 0
        assert machine.register(32, 32) == 0
        assert machine.batch((0, 0, 8), order=0) == INVALID_VALUE
        assert machine.batch((0, 0, 8), stream=0) == INVALID_VALUE
        assert machine.batch((0, 0, 8), (4, 16, 8)) == INVALID_VALUE, "they overlap"
        assert machine.batch((0, 16, 8), (24, 0, 16)) == INVALID_VALUE, "two registrations"
        assert machine.batch((0, 60, 8)) == INVALID_VALUE, "beyond the tensor"
        assert machine.batch(*[(0, 0, 1)] * 4097) != 0
        sim.module.set_device(1)
        assert machine.batch((0, 0, 8)) == INVALID_HANDLE, "the stream is another device's"
        machine.stream = sim.module.Stream()
        assert machine.batch((0, 0, 8)) == INVALID_VALUE, "the memory is another device's"
        sim.module.set_device(0)
        address = machine.device.data_ptr()
        machine.device = torch.ones(1, device="cuda")
        assert address != machine.device.data_ptr()
        assert sim.pending == 0 or sim.tick()
        assert machine.batch((0, 0, 8)) == INVALID_HANDLE


def test_a_batch_is_looked_up_by_its_version() -> None:
    for driver, version, there in (
        (12040, 12080, False),
        (12080, 12080, True),
        (12080, 13000, False),
        (13000, 12080, True),
        (13000, 13000, True),
    ):
        with simulated("cuda", driver=driver) as sim:
            call = Machine(sim).batch_call(version)
            assert bool(ctypes.cast(call, ctypes.c_void_p).value) == there
    with simulated("cuda", driver=13000) as sim:
        machine = Machine(sim)
        versions = {
            ctypes.cast(machine.batch_call(version), ctypes.c_void_p).value
            for version in (12080, 13000)
        }
        assert len(versions) == 2, "their signatures differ"


def test_registrations_are_bounded_and_do_not_overlap() -> None:
    with simulated("cuda", registered_bytes=48) as sim:
        machine = Machine(sim)
        assert machine.register(0, 32) == 0
        assert machine.register(16, 8) == ALREADY_REGISTERED
        assert machine.register(32, 32) == OUT_OF_MEMORY
        assert machine.unregister(16) == NOT_REGISTERED
        assert machine.unregister() == 0
        assert machine.register(32, 32) == 0
        assert machine.unregister(32) == 0
    with simulated("cuda") as sim:
        assert Machine(sim).register(0, 2**39) == OUT_OF_MEMORY, "in one call"


@pytest.mark.parametrize("kind", ["cuda", "rocm"])
def test_a_call_of_the_runtime_that_fails_is_told_of_the_next_kernel(kind: Any) -> None:
    with simulated(kind, registered_bytes=0) as sim:
        machine = Machine(sim, kind)
        if kind == "cuda":
            assert machine.register() == OUT_OF_MEMORY
            machine.device.add_(1)  # the driver's own calls leave nothing
            address = machine.host.data_ptr()
            assert sim.module.cudart().cudaHostRegister(address, 64, 1) == OUT_OF_MEMORY
        else:
            assert machine.register() == OUT_OF_MEMORY
        assert in_thread(lambda: machine.device.add_(1).numel()) == 64, "it is this thread's"
        with pytest.raises(RuntimeError, match="an earlier call left error 2 behind"):
            machine.device.add_(1)
        machine.device.add_(1)
        if kind == "rocm":
            assert machine.register() == OUT_OF_MEMORY
            assert machine._driver.hipGetLastError() == OUT_OF_MEMORY
            assert machine._driver.hipGetLastError() == 0
            machine.device.add_(1)


def test_cudas_driver_needs_a_context() -> None:
    with simulated("cuda", devices=2) as sim:
        machine = Machine(sim)
        machine._driver.cuCtxSetCurrent(ctypes.c_void_p(1))
        assert machine.register() == 0
        assert in_thread(machine.to_host) == INVALID_CONTEXT
        assert in_thread(lambda: machine.register(0, 8)) == INVALID_CONTEXT

        def set_first() -> int:
            sim.module.set_device(0)  # which it says it is: torch does nothing
            return machine.to_host()

        assert in_thread(set_first) == INVALID_CONTEXT

        def set_both() -> int:
            context = ctypes.c_void_p()
            machine._driver.cuCtxGetCurrent(ctypes.byref(context))
            assert context.value is None
            machine._driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
            machine._driver.cuCtxSetCurrent(context)
            return machine.to_host()

        assert in_thread(set_both) == 0
        assert sim.contexts == {0}


def test_contexts_are_made_where_calls_go() -> None:
    with simulated("cuda", devices=3) as sim:
        sim.module.set_device(1)
        torch.ones(1, device="cuda")
        event = sim.module.current_stream().record_event()
        stream = sim.module.current_stream()
        in_thread(lambda: event.wait(stream) or 0)
        assert sim.contexts == {1}
        in_thread(lambda: sim.module.Stream(2).device_index)
        assert sim.contexts == {1, 2}
        in_thread(lambda: event.synchronize() or 0)
        assert sim.contexts == {0, 1, 2}, "a new thread's device is 0"


CALLS: dict[str, Callable[[Machine, torch.Event], object]] = {
    "event.synchronize": lambda _, event: event.synchronize(),
    "event.query": lambda _, event: event.query(),
    "stream.synchronize": lambda machine, _: machine.stream.synchronize(),
    "stream.query": lambda machine, _: machine.stream.query(),
    "synchronize": lambda machine, _: machine.sim.module.synchronize(),
    "pin_memory": lambda *_: torch.ones(4).pin_memory(),
    "register": lambda machine, _: _raise(machine.register(8, 8)),
    "unregister": lambda machine, _: _raise(machine.unregister()),
    "copy": lambda machine, _: machine.device.cpu(),
}


def _raise(error: int) -> None:
    """Raise for a capture; what was done before may have been done already."""
    if error == CAPTURE_UNSUPPORTED:
        raise RuntimeError("operation not permitted when stream is capturing")
    assert error in {0, ALREADY_REGISTERED, NOT_REGISTERED}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", ["cuda", "rocm"])
def test_captures_forbid_what_is_unsafe_but_to_relaxed_threads(kind: Any, name: str) -> None:
    def attempt(machine: Machine, mode: int) -> int:
        def call() -> int:
            machine.sim.module.set_device(1)
            assert machine.exchange_mode(mode) == GLOBAL
            try:
                CALLS[name](machine, event)
            except RuntimeError as error:
                assert "not permitted when stream is capturing" in str(error)  # noqa: PT017
                return 1
            return 0

        return in_thread(call)

    for mode, in_this, refused in (
        (GLOBAL, False, 1),
        (THREAD_LOCAL, False, 0),
        (RELAXED, False, 0),
        (THREAD_LOCAL, True, 1),
    ):
        with simulated(kind, devices=2) as sim:
            sim.module.set_device(1)
            machine = Machine(sim, kind)
            machine.register(0, 8)
            event = machine.stream.record_event()
            if in_this:
                machine.exchange_mode(mode)
                sim._native.begin_capture()
                with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
                    CALLS[name](machine, event)
            else:
                sim._native.begin_capture()
                assert attempt(machine, mode) == refused
            assert sim._native.end_capture() == (not refused), "the capture is void"
            assert attempt(machine, GLOBAL) == 0


def test_what_is_off_is_not_initialized() -> None:
    with simulated("cuda") as sim:
        machine = Machine(sim)
    assert machine.register() == NOT_INITIALIZED
    assert machine.to_host() == NOT_INITIALIZED


@pytest.mark.parametrize("call", ["event", "record", "wait", "copy", "kernel", "synchronize"])
def test_calls_can_be_made_to_fail(call: str) -> None:
    with simulated("cuda") as sim:
        machine = Machine(sim)
        machine.register()

        def once() -> None:
            event = sim.module.Event()
            event.record(machine.stream)
            machine.stream.wait_event(event)
            if machine.batch((0, 0, 8), (8, 8, 8)):
                raise RuntimeError("the test lets this fail")
            machine.device.add_(1)
            event.synchronize()

        for nth in (1, 2):
            with sim.failing(call, nth) as failed:
                if nth == 2:
                    once()
                assert failed() == 0
                with pytest.raises(RuntimeError, match="the test lets this fail"):
                    once()
                assert failed() == 1
                once()
            once()
