# SPDX-License-Identifier: Apache-2.0
"""State of this process's model: changes of weights, loaded LoRA adapters, memory for KV."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from weakref import WeakMethod, ref

from kvhaven.protocol import AdapterVersion, ModelState

logger = logging.getLogger(__name__)

_ADAPTERS_MOST = 4096
"""Maximum number of remembered adapters; engines hold fewer."""


class LoadedModel:
    """State of this process's model. Thread-safe; each process has one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._weights = 0
        self._adapters: OrderedDict[int, AdapterVersion] = OrderedDict()
        self._generations: dict[int, int] = {}  # includes forgotten adapters
        self._owner: ref[Any] | None = None  # the engine's object that loads its adapters
        self._mixed = False
        self._changed = _Listeners()
        self._memory_goes = _Listeners()

    @property
    def weights(self) -> int:
        """Number of (possible) changes of the weights since the process started."""
        return self._weights

    def holds(self, adapter: int, generation: int) -> bool:
        """Return whether this generation of an adapter is the one that is loaded."""
        version = self._adapters.get(adapter)
        return version is not None and version.generation == generation

    def state(self, since: int = 0) -> ModelState:
        """Return the state. Changes of weights count from the value `since` of `weights`."""
        with self._lock:
            return ModelState(self._weights - since, tuple(self._adapters.values()))

    def listen(self, changed: Callable[[], None]) -> None:
        """Call a bound method after each change, from the changing thread.

        The reference is weak: calls end when the method's object is deleted.
        """
        self._changed.add(changed)

    def listen_for_memory(self, goes: Callable[[], None]) -> None:
        """Call a bound method before the KV tensors' memory is unmapped.

        The call comes from the worker's thread; an exception prevents the unmapping. The
        reference is weak: calls end when the method's object is deleted.
        """
        self._memory_goes.add(goes)

    def memory_goes(self) -> None:
        """Note that the KV tensors' memory is about to be unmapped."""
        self._memory_goes.call()

    def weights_changed(self) -> None:
        """Note that the weights changed, or may have changed."""
        with self._lock:
            self._weights += 1
        self._changed.call()

    def adapter_loaded(self, adapter: int, digest: bytes | None, owner: Any = None) -> None:
        """Note that an adapter was loaded.

        `digest` identifies its content; None means that the content cannot be identified.
        `owner` is the engine's object that loaded it. Each engine of a process has its own owner
        and its own adapter numbers: once a second engine loads adapters, all become unknown.
        """
        if owner is not None and self._mixes(owner):
            self._changed.call()
            return
        with self._lock:
            before = self._adapters.pop(adapter, None)
            if before is None or before.digest != digest:
                self._generations[adapter] = self._generations.get(adapter, 0) + 1
            if digest is not None:
                generation = self._generations[adapter]
                self._adapters[adapter] = AdapterVersion(adapter, digest, generation)
            if len(self._adapters) > _ADAPTERS_MOST:
                self._adapters.popitem(last=False)
        self._changed.call()

    def _mixes(self, owner: Any) -> bool:
        """Note an adapter's owner; return whether two engines have ever loaded adapters."""
        with self._lock:
            before = self._owner() if self._owner is not None else None
            if before is not owner:
                self._adapters.clear()  # they belong to another engine, which may have ended
                if before is not None and not self._mixed:
                    self._mixed = True
                    logger.warning(
                        "LoRA adapters: two engines of this process load them, so requests with "
                        "adapters are not cached; run each engine in its own process"
                    )
                self._owner = ref(owner)
            return self._mixed


class _Listeners:
    """Weak references to bound methods that are called on an event. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._methods: list[WeakMethod[Callable[[], None]]] = []

    def add(self, method: Callable[[], None]) -> None:
        """Add a bound method."""
        with self._lock:
            self._methods.append(WeakMethod(method))

    def call(self) -> None:
        """Call the methods of all objects that still exist."""
        with self._lock:
            alive = [(weak, method) for weak in self._methods if (method := weak()) is not None]
            self._methods = [weak for weak, _ in alive]
        for _, method in alive:
            method()
