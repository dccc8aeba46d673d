# SPDX-License-Identifier: Apache-2.0
"""What the model of this process holds now: its weights, its LoRA adapters, memory for KV.

vLLM tells a connector of no change. Weights are changed in place by calls to the worker (reload,
weight transfer from a trainer), adapters are loaded when a request first needs them and again
after they were dropped, and their files may have changed meanwhile. When the engine goes to sleep
it waits for the device and then unmaps the KV tensors' memory, but copies are put on the device
piece by piece by threads of ours. So the methods of vLLM that do it are wrapped, once in a process,
and what was loaded is named by its tensors.
"""

import functools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakMethod, ref

from kvhaven.integrations.vllm.digests import content_digest
from kvhaven.protocol import AdapterVersion, ModelState

logger = logging.getLogger(__name__)

_ADAPTERS_MOST = 4096
"""Adapters that are remembered; vLLM holds fewer (`max_cpu_loras`)."""

_CHANGE_WEIGHTS = (
    "reload_weights",
    "reset_weights",
    "start_weight_update",
    "start_draft_weight_update",
    "update_weights",
    "finish_weight_update",
)
"""Methods of vLLM's workers after which the weights may be others (0.29 to 0.32)."""

_TAKE_MEMORY = ("sleep", "discard")
"""Methods of vLLM's workers that unmap the memory of the KV tensors."""

_WRAPPED = "_kvhaven_watches"


class LoadedModel:
    """The state of this process's model. Thread-safe; there is one in a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._weights = 0
        self._adapters: OrderedDict[int, AdapterVersion] = OrderedDict()
        self._generations: dict[int, int] = {}  # also of adapters that are not known any more
        self._manager: ref[Any] | None = None  # vLLM's, which loads an engine's adapters
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

        From the worker's thread. What it raises keeps vLLM from unmapping the memory.
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

    def adapter_loaded(self, model: Any, manager: Any = None) -> None:
        """Note an adapter as vLLM has just loaded it (its `LoRAModel`), and which object did it.

        Engines in one process have a manager each, and numbers of their own: with a second one
        no adapter is known any more.
        """
        if manager is not None and self._mixes(manager):
            self._changed.call()
            return
        adapter = int(model.id)
        digest = None
        try:
            digest = content_digest({k: v for k, v in vars(model).items() if k != "id"})
        except Exception as error:  # noqa: BLE001 - whatever it was: it has no name, and is loaded
            logger.warning("LoRA adapter %d: its requests are not cached: %s", adapter, error)
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

    def _mixes(self, manager: Any) -> bool:
        """Note who loads an adapter; return whether engines have mixed theirs, now or before."""
        with self._lock:
            before = self._manager() if self._manager is not None else None
            if before is not manager:
                self._adapters.clear()  # they are of another engine, which may be gone
                if before is not None and not self._mixed:
                    self._mixed = True
                    logger.warning(
                        "two engines of this process load LoRA adapters: requests with adapters "
                        "are not cached; give each engine a process of its own"
                    )
                self._manager = ref(manager)
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


LOADED = LoadedModel()
"""The one of this process."""


def watch_model() -> LoadedModel:
    """Wrap vLLM's methods that change the model, unless they are wrapped; return its state.

    Called when a worker's connector is made: every class of a worker is imported by then.
    """
    from vllm.v1.worker.worker_base import WorkerBase  # noqa: PLC0415 - workers have it

    for cls in subclasses(WorkerBase):
        for name in _CHANGE_WEIGHTS:
            wrap_method(cls, name, _changes_weights)
        for name in _TAKE_MEMORY:
            wrap_method(cls, name, _takes_memory)
    try:
        from vllm.lora.worker_manager import WorkerLoRAManager  # noqa: PLC0415 - as above
        from vllm.model_executor.models.utils import AutoWeightsLoader  # noqa: PLC0415
    except ImportError as error:
        logger.warning("requests with LoRA adapters are not cached: %s", error)
        return LOADED
    for cls in subclasses(WorkerLoRAManager):
        wrap_method(cls, "_load_adapter", _loads_adapter)
    wrap_method(AutoWeightsLoader, "load_weights", _changes_weights)  # what models' own methods use
    return LOADED


def _changes_weights(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def watched(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        finally:  # also after a failure: a part may be written
            LOADED.weights_changed()

    return watched


def _takes_memory(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def watched(*args: Any, **kwargs: Any) -> Any:
        LOADED.memory_goes()
        return method(*args, **kwargs)

    return watched


def _loads_adapter(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def watched(*args: Any, **kwargs: Any) -> Any:
        model = method(*args, **kwargs)
        LOADED.adapter_loaded(model, args[0])
        return model

    return watched


def wrap_method(
    cls: type[Any], name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Wrap the method that a class itself defines, if it does and is not wrapped yet."""
    method = vars(cls).get(name)
    if method is not None and not hasattr(method, _WRAPPED):
        watched = wrapper(method)
        setattr(watched, _WRAPPED, True)
        setattr(cls, name, watched)


def subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    """Yield a class and all that inherit from it."""
    yield cls
    for child in cls.__subclasses__():
        yield from subclasses(child)
