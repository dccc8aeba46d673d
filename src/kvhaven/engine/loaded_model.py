# SPDX-License-Identifier: Apache-2.0
"""What the model of this process holds now: its weights, its LoRA adapters, memory for KV."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from weakref import WeakMethod, ref

from kvhaven.protocol import AdapterVersion, ModelState

logger = logging.getLogger(__name__)

_ADAPTERS_MOST = 4096
"""Adapters that are remembered; engines hold fewer."""


class LoadedModel:
    """The state of this process's model. Thread-safe; there is one in a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._weights = 0
        self._adapters: OrderedDict[int, AdapterVersion] = OrderedDict()
        self._generations: dict[int, int] = {}  # also of adapters that are not known any more
        self._owner: ref[Any] | None = None  # which loads an engine's adapters
        self._mixed = False
        self._changed = _Listeners()
        self._memory_goes = _Listeners()

    @property
    def weights(self) -> int:
        """How often the weights were changed, or may have been, since the process started."""
        return self._weights

    def holds(self, adapter: int, generation: int) -> bool:
        """Return whether an adapter is still the content that was loaded as this generation."""
        version = self._adapters.get(adapter)
        return version is not None and version.generation == generation

    def state(self, since: int = 0) -> ModelState:
        """Return the state; `since` is what `weights` was when it began to count."""
        with self._lock:
            return ModelState(self._weights - since, tuple(self._adapters.values()))

    def listen(self, changed: Callable[[], None]) -> None:
        """Call a method after each change, from the thread that made it, as long as it lives."""
        self._changed.add(changed)

    def listen_for_memory(self, goes: Callable[[], None]) -> None:
        """Call a method before the KV tensors' memory is unmapped, as long as it lives.

        From the worker's thread. What it raises keeps the engine from unmapping the memory.
        """
        self._memory_goes.add(goes)

    def memory_goes(self) -> None:
        """Note that the KV tensors' memory is about to be unmapped."""
        self._memory_goes.call()

    def weights_changed(self) -> None:
        """Note that the weights are others, or may be."""
        with self._lock:
            self._weights += 1
        self._changed.call()

    def adapter_loaded(self, adapter: int, digest: bytes | None, owner: Any = None) -> None:
        """Note that an adapter was loaded; `digest` names its content, None: it has no name.

        `owner` is the engine's object that did it. Engines in one process have one each, and
        numbers of their own: once a second one has loaded adapters, none is known any more.
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
        """Note who loads an adapter; return whether engines have mixed theirs, now or before."""
        with self._lock:
            before = self._owner() if self._owner is not None else None
            if before is not owner:
                self._adapters.clear()  # they are of another engine, which may be gone
                if before is not None and not self._mixed:
                    self._mixed = True
                    logger.warning(
                        "two engines of this process load LoRA adapters: requests with adapters "
                        "are not cached; give each engine a process of its own"
                    )
                self._owner = ref(owner)
            return self._mixed


class _Listeners:
    """Methods that are called as long as their objects live. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._methods: list[WeakMethod[Callable[[], None]]] = []

    def add(self, method: Callable[[], None]) -> None:
        """Have a bound method called from now on."""
        with self._lock:
            self._methods.append(WeakMethod(method))

    def call(self) -> None:
        """Call all methods whose objects live."""
        with self._lock:
            alive = [(weak, method) for weak in self._methods if (method := weak()) is not None]
            self._methods = [weak for weak, _ in alive]
        for _, method in alive:
            method()
