# SPDX-License-Identifier: Apache-2.0
"""Hooks that an engine calls in its loop, which a cache's errors must not end."""

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, Protocol, TypeVar

from kvhaven.errors import UnreportedLoadError

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


class Hooked(Protocol):
    """Object with hooks."""

    reported_errors: set[str]
    """Names of the hooks that have raised."""

    def in_doubt(self) -> None:
        """Count an error, and restore a consistent state (see `doubt` of either side)."""


def never_raises(default: Callable[[], Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a hook of a `Hooked` object return `default()` instead of raising.

    An exception there would end the engine and all its requests, which a cache must not do. An
    error is therefore logged with its trace, counted, and handled as a miss. Unfinished work of
    the hook is dropped (see `doubt` of either side). Only `UnreportedLoadError` is raised.
    """

    def decorate(hook: Callable[P, R]) -> Callable[P, R]:
        @wraps(hook)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return hook(*args, **kwargs)
            except UnreportedLoadError:
                raise
            except Exception as error:  # noqa: BLE001 - the reason for this decorator
                owner: Any = args[0]
                report_error(owner, hook.__name__, error)
                fallback: R = default()
                return fallback

        return guarded

    return decorate


def report_error(owner: Hooked, hook: str, error: Exception) -> None:
    """Log the first error of a hook, and restore a consistent state (`owner.in_doubt`)."""
    if hook not in owner.reported_errors:
        owner.reported_errors.add(hook)
        logger.error("%s failed; further failures are only counted", hook, exc_info=error)
    owner.in_doubt()
