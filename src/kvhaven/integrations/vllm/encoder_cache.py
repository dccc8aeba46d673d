# SPDX-License-Identifier: Apache-2.0
"""Hook into vLLM's resets of its encoder cache, of which it does not notify connectors."""

import functools
import logging
from collections.abc import Callable
from typing import Any

from kvhaven.integrations.vllm.loaded_model import subclasses, wrap_method

logger = logging.getLogger(__name__)


def watch_encoder_cache() -> None:
    """Wrap the resets of vLLM's schedulers to call `encodings_dropped` of their connectors.

    Methods that are already wrapped are skipped. Called when the scheduler's connector is
    created: the classes are imported by then. The workers drop their encodings after the
    scheduler does and before their next step.
    """
    try:
        from vllm.v1.core.sched.scheduler import Scheduler  # noqa: PLC0415 - it imports connectors
    except ImportError as error:  # then encodings count as never dropped
        logger.debug("vLLM's encoder cache: resets are not tracked: %s", error)
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
