# SPDX-License-Identifier: Apache-2.0
"""Hooks into vLLM that track the state of this process's model.

vLLM does not notify connectors of changes. Calls to the worker change weights in place (reload,
weight transfer from a trainer). Adapters are loaded when a request first needs them, and reloaded
after they were evicted; their files may have changed in between. When the engine goes to sleep, it
waits for the device and then unmaps the KV tensors' memory, while threads of KVHaven may still
submit parts of copies. Therefore the methods of vLLM that do this are wrapped, once in a process,
and loaded adapters are identified by their tensors.
"""

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

from kvhaven.engine.loaded_model import LoadedModel
from kvhaven.identity.digests import content_digest

logger = logging.getLogger(__name__)

_CHANGE_WEIGHTS = (
    "reload_weights",
    "reset_weights",
    "start_weight_update",
    "start_draft_weight_update",
    "update_weights",
    "finish_weight_update",
)
"""Methods of vLLM's workers that may change the weights (0.29 to 0.32)."""

_TAKE_MEMORY = ("sleep", "discard")
"""Methods of vLLM's workers that unmap the memory of the KV tensors."""

OBJECTS = "vllm."
"""Modules whose objects in adapters and media count by their attributes."""

_WRAPPED = "_kvhaven_watches"


LOADED = LoadedModel()
"""The state of this process's model."""


def watch_model() -> LoadedModel:
    """Wrap vLLM's methods that change the model, unless they are wrapped; return its state.

    Called when a worker's connector is created: all worker classes are imported by then.
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
    wrap_method(AutoWeightsLoader, "load_weights", _changes_weights)  # used by models' own methods
    return LOADED


def _changes_weights(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def watched(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        finally:  # also after an error, as a part may be written
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
        LOADED.adapter_loaded(int(model.id), adapter_digest(model), args[0])
        return model

    return watched


def adapter_digest(model: Any) -> bytes | None:
    """Return the digest of a vLLM `LoRAModel`'s content; None if it cannot be identified."""
    try:
        content = {k: v for k, v in vars(model).items() if k != "id"}
        return content_digest(content, objects_of=OBJECTS)
    except Exception as error:  # noqa: BLE001 - the adapter is loaded, only unidentified
        logger.warning("LoRA adapter %s: its requests are not cached: %s", model.id, error)
        return None


def wrap_method(
    cls: type[Any], name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Wrap a method if the class itself defines it and it is not wrapped yet."""
    method = vars(cls).get(name)
    if method is not None and not hasattr(method, _WRAPPED):
        watched = wrapper(method)
        setattr(watched, _WRAPPED, True)
        setattr(cls, name, watched)


def subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    """Yield a class and all its subclasses, direct and indirect."""
    yield cls
    for child in cls.__subclasses__():
        yield from subclasses(child)
