# SPDX-License-Identifier: Apache-2.0
"""Extras of vLLM's requests, which determine KV besides tokens: adapter, cache salt, media."""

from collections.abc import Hashable
from typing import Any

from kvhaven.engine.adapters import Adapters, AdapterUse
from kvhaven.engine.requests import KnownExtras
from kvhaven.integrations.vllm.media import Media, MediaNames
from kvhaven.integrations.vllm.requests import VllmRequest, cache_name
from kvhaven.keys import Extras, KeyInputError


class VllmPendingExtras:
    """Extras of one request, which may not be known yet."""

    def __init__(self, salt: str, lora: Any, adapters: Adapters, media: Media | None) -> None:
        self._salt = salt
        self._lora = lora
        self._adapters = adapters
        self._media = media

    @property
    def hashing(self) -> bool:
        """Whether media are being hashed, so that the extras will be known soon."""
        return self._media is not None and self._media.hashing

    def poll(self) -> KnownExtras | None:
        """Return the extras, or None while media are being hashed or the adapter is unknown.

        Raises `KeyInputError`, or the error of the hashing, if the media cannot be identified.
        """
        adapter = None
        if self._lora is not None:
            adapter = _use_of(self._adapters, self._lora)
            if adapter is None:
                return None
        if self.hashing:
            return None
        items = self._media.items() if self._media is not None else ()
        digest = adapter.digest.hex() if adapter is not None else ""
        return KnownExtras(Extras(digest, self._salt, items), adapter, self._media)


class VllmExtras:
    """Source of the extras of vLLM's requests. A thread hashes media, which takes time.

    Performs no I/O. Not thread-safe.
    """

    def __init__(self, adapters: Adapters) -> None:
        self._adapters = adapters
        self.media = MediaNames()
        self._media: dict[str, tuple[Hashable, Media]] = {}

    def note(self, given: VllmRequest, *, runs: bool = False) -> None:
        """Note a request that arrived, or that runs in this step (`runs`), cached or not.

        Its results stay in the engine's own caches, which use names as keys.
        """
        request = given.raw
        try:
            if request.lora_request is not None:
                _use_of(self._adapters, request.lora_request)
        finally:
            noted, turn = self._media.get(request.request_id), given.turn
            if request.mm_features and (noted is None or noted[0] != turn):
                adapter = getattr(request.lora_request, "lora_name", None)
                media = self.media.note(request.mm_features, adapter)
                self._media[request.request_id] = turn, media
            if runs and request.request_id in self._media:
                self.media.runs(self._media[request.request_id][1])

    def begin(self, given: VllmRequest) -> VllmPendingExtras:
        """Start to determine a request's extras. Raises `KeyInputError` if one is invalid."""
        self.note(given)
        request = given.raw
        salt = request.cache_salt
        if salt is None:
            salt = ""
        if not isinstance(salt, str):
            raise KeyInputError(
                f"cache_salt: not a text (got {type(salt).__name__}); expected a string or nothing"
            )
        media = self._media[request.request_id][1] if request.mm_features else None
        return VllmPendingExtras(salt, request.lora_request, self._adapters, media)

    def weights_changed(self) -> None:
        """Note that the weights changed, perhaps those of an encoder."""
        self.media.encoder_changed()

    def adapter_changed(self) -> None:
        """Note that an adapter's content changed; the adapter may affect the encoding of media."""
        self.media.adapter_changed()

    def encodings_dropped(self) -> None:
        """Note that vLLM dropped its encodings of media."""
        self.media.encodings_dropped(media for _, media in self._media.values())

    def finished(self, request_id: str) -> None:
        """Forget a request. Hashing of its media continues: the engine's cache holds its KV."""
        self._media.pop(request_id, None)

    def close(self) -> None:
        """End the thread."""
        self.media.close()


def _use_of(adapters: Adapters, lora_request: Any) -> AdapterUse | None:
    return adapters.use_of(cache_name(lora_request), int(lora_request.lora_int_id))
