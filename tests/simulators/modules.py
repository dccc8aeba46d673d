# SPDX-License-Identifier: Apache-2.0
"""What `torch.hpu` and `torch.xpu` offer while they are simulated."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace, TracebackType
from typing import Any, Self

import torch

from tests.simulators.native import Native

DeviceLike = torch.device | str | int | None

_DEVICE_TYPES = {"hpu": 15, "xpu": 12}  # c10/core/DeviceType.h


class DeviceFunctions:
    """The functions of a device module, for one simulation; their names are the module's."""

    def __init__(self, native: Native, devices: int, memory: int) -> None:
        self._native = native
        self._devices = devices
        self._memory = memory
        self.Stream, self.Event = _stream_and_event(native, self)

    def names(self) -> dict[str, Any]:  # functions and classes of all kinds
        """Return all that belongs into the module."""
        found = {name: getattr(self, name) for name in dir(self) if not name.startswith("_")}
        del found["names"]
        return found | {
            "_lazy_init": lambda: None,
            "_is_in_bad_fork": lambda: False,
            "_is_compiled": lambda: True,
            "_exchange_device": self._exchange_device,
            "_maybe_exchange_device": self._exchange_device,
        }

    def init(self) -> None: ...

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        return True

    def manual_seed(self, seed: int) -> None: ...

    def manual_seed_all(self, seed: int) -> None: ...

    # --- devices ------------------------------------------------------------------------------

    def device_count(self) -> int:
        return self._devices

    def current_device(self) -> int:
        return self._native.device()

    def set_device(self, device: DeviceLike) -> None:
        self._native.set_device(self._index(device))

    @contextlib.contextmanager
    def device(self, device: DeviceLike) -> Iterator[None]:
        before = self._exchange_device(self._index(device))
        try:
            yield
        finally:
            self._native.set_device(before)

    def get_device_name(self, device: DeviceLike = None) -> str:
        return f"simulated {self._native.kind}"

    def get_device_properties(self, device: DeviceLike = None) -> SimpleNamespace:
        return SimpleNamespace(
            name=self.get_device_name(), total_memory=self._memory, has_fp64=True
        )

    def _exchange_device(self, index: int) -> int:
        before = self._native.device()
        if index >= 0:
            self._native.set_device(index)
        return before

    def _index(self, device: DeviceLike) -> int:
        if isinstance(device, int):
            return device
        if device is None:
            return self._native.device()
        device = torch.device(device)
        if device.type != self._native.kind:
            raise ValueError(f"Expected a {self._native.kind} device, but got: {device}")
        return self._native.device() if device.index is None else device.index

    # --- memory -------------------------------------------------------------------------------

    def mem_get_info(self, device: DeviceLike = None) -> tuple[int, int]:
        return self._memory - self.memory_allocated(device), self._memory

    def memory_allocated(self, device: DeviceLike = None) -> int:
        return self._native.allocated(self._index(device))

    def memory_reserved(self, device: DeviceLike = None) -> int:
        return self.memory_allocated(device)

    def max_memory_allocated(self, device: DeviceLike = None) -> int:
        return self._native.peak(self._index(device))

    def empty_cache(self) -> None: ...

    # --- streams ------------------------------------------------------------------------------

    def synchronize(self, device: DeviceLike = None) -> None:
        self._native.synchronize(self._index(device))

    def current_stream(self, device: DeviceLike = None) -> torch.Stream:
        index = self._index(device)
        return self._stream(index, self._native.stream(index))

    def default_stream(self, device: DeviceLike = None) -> torch.Stream:
        return self._stream(self._index(device), 0)

    def set_stream(self, stream: torch.Stream | None) -> None:
        if stream is not None:
            self._native.set_stream(stream.device_index, stream.stream_id)

    @contextlib.contextmanager
    def stream(self, stream: torch.Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        before = self.current_stream(stream.device_index)
        self.set_stream(stream)
        try:
            yield
        finally:
            self.set_stream(before)

    def _stream(self, device: int, stream: int) -> torch.Stream:
        kind = _DEVICE_TYPES[self._native.kind]
        return self.Stream(stream_id=stream, device_index=device, device_type=kind)


def _stream_and_event(
    native: Native, module: DeviceFunctions
) -> tuple[type[torch.Stream], type[torch.Event]]:
    """Make the classes of a module: torch's own, with a device that need not be named."""

    class Event(torch.Event):
        def __new__(
            cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
        ) -> Self:
            return super().__new__(cls, torch.device(native.kind, native.device()))

        def record(self, stream: torch.Stream | None = None) -> None:
            super().record(module.current_stream() if stream is None else stream)

        def wait(self, stream: torch.Stream | None = None) -> None:
            super().wait(module.current_stream() if stream is None else stream)

    class Stream(torch.Stream):
        _before: list[torch.Stream]

        def __new__(cls, device: DeviceLike = None, priority: int = 0, **known: int) -> Self:
            if "stream_id" in known:
                return super().__new__(cls, **known)
            index = module._index(device)
            return super().__new__(cls, torch.device(native.kind, index), priority=priority)

        def wait_event(self, event: torch.Event) -> None:
            event.wait(self)

        def wait_stream(self, stream: torch.Stream) -> None:
            self.wait_event(stream.record_event())

        def record_event(self, event: torch.Event | None = None) -> torch.Event:
            event = Event() if event is None else event
            event.record(self)
            return event

        # torch's own asks for the current accelerator, which a simulated one is not.
        def __enter__(self) -> Self:
            self.__dict__.setdefault("_before", []).append(module.current_stream(self.device_index))
            module.set_stream(self)
            return self

        def __exit__(
            self,
            kind: type[BaseException] | None,
            error: BaseException | None,
            traceback: TracebackType | None,
        ) -> None:
            module.set_stream(self._before.pop())

    return Stream, Event
