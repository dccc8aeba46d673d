# SPDX-License-Identifier: Apache-2.0
"""Noticing that vLLM drops what it encoded of media: it tells a connector nothing of that."""

import functools
import logging
from collections.abc import Callable
from typing import Any

from kvhaven.integrations.vllm.loaded_model import subclasses, wrap_method

logger = logging.getLogger(__name__)


def watch_encoder_cache() -> None:
    """Have `encodings_dropped` of a scheduler's connectors called when it resets that cache.

    Wraps the method of vLLM's schedulers, unless it is wrapped. Called when the scheduler's
    connector is made: the classes are imported by then. The workers drop theirs after it and
    before they are given another step.
    """
    try:
        from vllm.v1.core.sched.scheduler import Scheduler  # noqa: PLC0415 - it imports connectors
    except ImportError as error:  # then encodings count as kept for ever
        logger.debug("vLLM's encoder cache is not watched: %s", error)
        return
    for cls in subclasses(Scheduler):
        wrap_method(cls, "reset_encoder_cache", _resets)


def _resets(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def watched(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(scheduler, *args, **kwargs)
        connector = getattr(scheduler, "connector", None)
        for one in (connector, *getattr(connector, "_connectors", ())):  # MultiConnector's
            if hasattr(one, "encodings_dropped"):
                one.encodings_dropped()
        return result

    return watched
