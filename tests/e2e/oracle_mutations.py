# SPDX-License-Identifier: Apache-2.0
"""Breakages of KVHaven that the oracle must find, made in the engine's process."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

PATCHES = pytest.MonkeyPatch()
"""What is broken now."""


def mutate(name: str) -> None:
    """Break KVHaven in the way that a function below names."""
    MUTATIONS[name](PATCHES)


def salts_are_left_out_of_the_keys(patch: pytest.MonkeyPatch) -> None:
    _leave_out(patch, salt="")


def media_are_left_out_of_the_keys(patch: pytest.MonkeyPatch) -> None:
    _leave_out(patch, items=())


def adapters_are_left_out_of_the_keys(patch: pytest.MonkeyPatch) -> None:
    _leave_out(patch, lora="")


def adapters_keep_the_name_of_what_was_loaded_first(patch: pytest.MonkeyPatch) -> None:
    from kvhaven.engine.loaded_model import LoadedModel

    load = LoadedModel.adapter_loaded

    def loaded(state: LoadedModel, adapter: int, digest: bytes | None, owner: Any = None) -> None:
        if adapter not in state._adapters:
            load(state, adapter, digest, owner)

    patch.setattr(LoadedModel, "adapter_loaded", loaded)


def an_update_of_weights_is_not_noticed(patch: pytest.MonkeyPatch) -> None:
    from kvhaven.engine.loaded_model import LoadedModel

    patch.setattr(LoadedModel, "weights_changed", lambda _: None)


def embeddings_are_cached_by_their_tokens(patch: pytest.MonkeyPatch) -> None:
    from kvhaven.engine import scheduler
    from kvhaven.engine.requests import EVERYTHING

    patch.setattr(scheduler, "permitted", lambda *_: EVERYTHING)


def a_reset_changes_nothing(patch: pytest.MonkeyPatch) -> None:
    from kvhaven.engine.epoch import Epoch

    patch.setattr(Epoch, "root", lambda _, namespace: namespace)


def blocks_of_an_older_content_are_saved(patch: pytest.MonkeyPatch) -> None:
    from kvhaven.engine.adapters import Adapters
    from kvhaven.engine.epoch import Epoch

    use_of = Adapters.use_of

    def trusting(adapters: Adapters, name: Any, adapter: int) -> Any:
        adapters._changed = lambda _: None
        return use_of(adapters, name, adapter)

    patch.setattr(Adapters, "use_of", trusting)
    patch.setattr(Epoch, "admitted", lambda *_: True)


MUTATIONS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    mutation.__name__: mutation
    for mutation in (
        salts_are_left_out_of_the_keys,
        media_are_left_out_of_the_keys,
        adapters_are_left_out_of_the_keys,
        adapters_keep_the_name_of_what_was_loaded_first,
        an_update_of_weights_is_not_noticed,
        embeddings_are_cached_by_their_tokens,
        a_reset_changes_nothing,
        blocks_of_an_older_content_are_saved,
    )
}


def _leave_out(patch: pytest.MonkeyPatch, **empty: Any) -> None:
    from kvhaven.engine.extras import PendingContentExtras

    poll = PendingContentExtras.poll

    def polled(pending: PendingContentExtras) -> Any:
        known = poll(pending)
        if known is None:
            return None
        return known._replace(
            extras=msgspec.structs.replace(known.extras, **empty),
            adapter=None if "lora" in empty else known.adapter,
        )

    patch.setattr(PendingContentExtras, "poll", polled)
