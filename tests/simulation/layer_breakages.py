# SPDX-License-Identifier: Apache-2.0
"""Breakages of layered loads, which tests must notice."""

from typing import Any

import pytest

from kvhaven.engine.loader import Loader

Patch = pytest.MonkeyPatch


def no_waits(patch: Patch) -> None:
    """Have the forward wait for no layer."""

    def wait(loads: Loader, layer: str) -> None:
        loads._silent.discard(layer)
        for load in loads._running:
            load.unread.discard(layer)

    patch.setattr(Loader, "wait_for_layer", wait)


def layers_without_hooks_are_not_noticed(patch: Patch) -> None:
    """Have a load end well though layers have not waited for it."""
    original = Loader._end

    def end(loads: Loader, load: Any) -> None:
        load.unread.clear()
        original(loads, load)

    patch.setattr(Loader, "_end", end)
