# SPDX-License-Identifier: Apache-2.0
"""What determines a request's KV besides its tokens: adapter, cache salt, media."""

from typing import TYPE_CHECKING, Any, NamedTuple

from kvhaven.integrations.vllm.adapters import Adapters, AdapterUse
from kvhaven.integrations.vllm.media import Media, MediaNames
from kvhaven.keys import Extras, KeyInputError

if TYPE_CHECKING:
    from vllm.v1.request import Request

Turn = tuple[float, int, int, int]
"""Tells one input of a streaming session from the next."""


class KnownExtras(NamedTuple):
    """The extras of a request, and the adapter and the media that its KV is computed with."""

    extras: Extras
    adapter: AdapterUse | None
    media: Media | None = None


class PendingExtras:
    """The extras of one request, as far as they are known."""

    def __init__(self, salt: str, lora: Any, adapters: Adapters, media: Media | None) -> None:
        self._salt = salt
        self._lora = lora
        self._adapters = adapters
        self._media = media

    @property
    def hashing(self) -> bool:
        """Whether media are being hashed: the answer follows soon."""
        return self._media is not None and self._media.hashing

    def poll(self) -> KnownExtras | None:
        """Return the extras, or None while media are hashed or the adapter is not known.

        Raises `KeyInputError`, and whatever else keeps them from being known.
        """
        adapter = None
        if self._lora is not None:
            adapter = self._adapters.use_of(self._lora)
            if adapter is None:
                return None
        if self.hashing:
            return None
        items = self._media.items() if self._media is not None else ()
        digest = adapter.digest.hex() if adapter is not None else ""
        return KnownExtras(Extras(digest, self._salt, items), adapter, self._media)


class ExtrasSource:
    """Finds out the extras of requests. Only media take time; a thread hashes them.

    Never does I/O. Not thread-safe.
    """

    def __init__(self, adapters: Adapters) -> None:
        self._adapters = adapters
        self.media = MediaNames()
        self._media: dict[str, tuple[Turn, Media]] = {}

    def note(self, request: "Request", *, runs: bool = False) -> None:
        """Note a request that is there, or `runs` in this step, whether it is cached or not.

        What it computes stays in the engine's own caches, and those go by names.
        """
        try:
            if request.lora_request is not None:
                self._adapters.use_of(request.lora_request)
        finally:
            noted, turn = self._media.get(request.request_id), turn_of(request)
            if request.mm_features and (noted is None or noted[0] != turn):
                adapter = getattr(request.lora_request, "lora_name", None)
                media = self.media.note(request.mm_features, adapter)
                self._media[request.request_id] = turn, media
            if runs and request.request_id in self._media:
                self.media.runs(self._media[request.request_id][1])

    def begin(self, request: "Request") -> PendingExtras:
        """Begin to find out a request's extras. Raises `KeyInputError` for what cannot be named."""
        self.note(request)
        salt = request.cache_salt
        if salt is None:
            salt = ""
        if not isinstance(salt, str):
            raise KeyInputError(
                f"cache_salt: not a text (got {type(salt).__name__}); expected a string or nothing"
            )
        media = self._media[request.request_id][1] if request.mm_features else None
        return PendingExtras(salt, request.lora_request, self._adapters, media)

    def encodings_dropped(self) -> None:
        """Note that vLLM has dropped what it encoded of media."""
        self.media.encodings_dropped(media for _, media in self._media.values())

    def finished(self, request_id: str) -> None:
        """Forget a request. Its media are hashed to the end: its KV stays in the engine's cache."""
        self._media.pop(request_id, None)

    def close(self) -> None:
        """End the thread."""
        self.media.close()


def turn_of(request: "Request") -> Turn:
    """Return what changes when a session gets more input. Its clients may choose the times."""
    features = getattr(request, "mm_features", None) or ()
    parameters = id(request.sampling_params)
    return request.arrival_time, request.num_prompt_tokens, len(features), parameters
