# SPDX-License-Identifier: Apache-2.0
"""What `torch.hpu`, `torch.xpu` and `torch.cuda` offer while they are simulated."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace, TracebackType
from typing import Any, ClassVar, Self

import torch

from tests.simulators.native import Native

DeviceLike = torch.device | str | int | None

_DEVICE_TYPES = {"hpu": 15, "xpu": 12, "cuda": 1}  # c10/core/DeviceType.h


class DeviceFunctions:
    """The functions of a device module, for one simulation; their names are the module's."""

    def __init__(self, native: Native, devices: int, memory: int) -> None:
        self._native = native
        self._devices = devices
        self._memory = memory
        self.kind = native.kind
        self.Stream: type[DeviceStream] = type("Stream", (DeviceStream,), {"module": self})
        self.Event: type[DeviceEvent] = type("Event", (DeviceEvent,), {"module": self})

    def names(self) -> dict[str, Any]:  # functions and classes of all kinds
        """Return all that belongs into the module."""
        found = {name: getattr(self, name) for name in dir(self) if not name.startswith("_")}
        for name in ("kind", "names", "index_of", "note_event"):
            del found[name]
        if self.kind == "hpu":
            found["synchronize"] = self._synchronize_current
        if self.kind == "xpu":
            del found["default_stream"]  # torch has none
        if self.kind == "cuda":
            found["cudart"] = self._cudart
        else:  # of torch.cuda, torch's compilers would go on to import parts that are not there
            found["_is_compiled"] = lambda: True
        return found | {
            "_lazy_init": lambda: None,
            "_is_in_bad_fork": lambda: False,
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
        self._native.set_device(self.index_of(device))

    @contextlib.contextmanager
    def device(self, device: DeviceLike) -> Iterator[None]:
        before = self._exchange_device(self.index_of(device))
        try:
            yield
        finally:
            self._native.set_device(before)

    def get_device_name(self, device: DeviceLike = None) -> str:
        return f"simulated {self.kind}"

    def get_device_properties(self, device: DeviceLike = None) -> SimpleNamespace:
        return SimpleNamespace(
            name=self.get_device_name(), total_memory=self._memory, has_fp64=True
        )

    def _exchange_device(self, index: int) -> int:
        before = self._native.device()
        if index >= 0:
            self._native.set_device(index)
        return before

    def note_event(self) -> None:
        """Count an event, which may fail."""
        self._native.new_event()

    def index_of(self, device: DeviceLike) -> int:
        """Return the index that a device in any of torch's ways of naming it has."""
        if isinstance(device, int):
            return device
        if device is None:
            return self._native.device()
        named = torch.device(device)
        if named.type != self.kind:
            raise ValueError(f"Expected a {self.kind} device, but got: {device}")
        index: int | None = named.index  # which torch's types deny
        return self._native.device() if index is None else index

    # --- memory -------------------------------------------------------------------------------

    def mem_get_info(self, device: DeviceLike = None) -> tuple[int, int]:
        return self._memory - self.memory_allocated(device), self._memory

    def memory_allocated(self, device: DeviceLike = None) -> int:
        return self._native.allocated(self.index_of(device))

    def memory_reserved(self, device: DeviceLike = None) -> int:
        return self.memory_allocated(device)

    def max_memory_allocated(self, device: DeviceLike = None) -> int:
        return self._native.peak(self.index_of(device))

    def empty_cache(self) -> None: ...

    def _cudart(self) -> SimpleNamespace:
        return SimpleNamespace(
            cudaHostRegister=lambda address, size, flags: self._native.runtime_host_register(
                address, size
            )
        )

    # --- streams ------------------------------------------------------------------------------

    def synchronize(self, device: DeviceLike = None) -> None:
        self._native.synchronize(self.index_of(device))

    def _synchronize_current(self) -> None:  # Intel's takes no device
        self.synchronize()

    def current_stream(self, device: DeviceLike = None) -> torch.Stream:
        index = self.index_of(device)
        return self._stream(index, self._native.stream(index))

    def default_stream(self, device: DeviceLike = None) -> torch.Stream:
        return self._stream(self.index_of(device), 0)

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
        kind = _DEVICE_TYPES[self.kind]
        return self.Stream(stream_id=stream, device_index=device, device_type=kind)


class DeviceEvent(torch.Event):
    """Torch's event, of a device that need not be named."""

    module: ClassVar[DeviceFunctions]

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> Self:
        if cls.module.kind == "xpu" and (blocking or interprocess):
            raise TypeError("torch.xpu.Event() takes enable_timing only")
        cls.module.note_event()
        return super().__new__(cls, torch.device(cls.module.kind))

    def record(self, stream: torch.Stream | None = None) -> None:
        super().record(self.module.current_stream() if stream is None else stream)

    def wait(self, stream: torch.Stream | None = None) -> None:
        super().wait(self.module.current_stream() if stream is None else stream)


class DeviceStream(torch.Stream):
    """Torch's stream, of a device that need not be named, and of an accelerator that is not the
    process's only one: torch's own context manager does nothing for such.
    """

    module: ClassVar[DeviceFunctions]

    def __new__(cls, device: DeviceLike = None, priority: int = 0, **known: int) -> Self:
        if known:  # stream_id, device_index and device_type of a stream that exists
            return super().__new__(cls, **known)
        where = torch.device(cls.module.kind, cls.module.index_of(device))
        return super().__new__(cls, where, priority=priority)

    @property
    def cuda_stream(self) -> int:
        """The handle for CUDA's and HIP's calls; 0 is the legacy default stream."""
        return (self.device_index + 1) << 32 | self.stream_id if self.stream_id else 0

    def wait_event(self, event: torch.Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: torch.Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        event = self.module.Event() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> Self:
        before = self.module.current_stream(self.device_index)
        self.__dict__.setdefault("before", []).append(before)
        self.module.set_stream(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.module.set_stream(self.__dict__["before"].pop())
