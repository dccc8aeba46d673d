# SPDX-License-Identifier: Apache-2.0
"""Extras of requests with adapters, a tenant's salt and media, all identified by content."""

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

from kvhaven.engine.adapters import Adapters, AdapterUse, CacheName
from kvhaven.engine.media import HashedMedia, MediaNames, MediaReader
from kvhaven.engine.requests import KnownExtras
from kvhaven.keys import Extras, KeyInputError


class RequestInputs(Protocol):
    """Inputs of an `EngineRequest` besides its tokens, as the engine's objects have them."""

    @property
    def request_id(self) -> str:
        """The id of the request."""

    @property
    def turn(self) -> Hashable:
        """A value that changes when a session gets more input."""

    @property
    def adapter_name(self) -> CacheName:
        """The name of the request's adapter in the engine's prefix cache; empty without one."""

    @property
    def adapter(self) -> int | None:
        """The number under which the ranks load the request's adapter; None without one."""

    @property
    def encoder_adapter(self) -> str | None:
        """The name of the adapter for the encodings of media; None without one."""

    @property
    def salt(self) -> object:
        """The tenant's cache salt: a text, or None. Clients may send other values."""

    @property
    def media(self) -> Sequence[Any]:
        """The engine's media items, which a `MediaReader` reads."""


class PendingContentExtras:
    """Extras of one request, which may not be known yet."""

    def __init__(
        self,
        salt: str,
        adapter: tuple[CacheName, int] | None,
        adapters: Adapters,
        media: HashedMedia | None,
    ) -> None:
        self._salt = salt
        self._adapter = adapter
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
        use: AdapterUse | None = None
        if self._adapter is not None:
            use = self._adapters.use_of(*self._adapter)
            if use is None:
                return None
        if self.hashing:
            return None
        items = self._media.items() if self._media is not None else ()
        digest = use.digest.hex() if use is not None else ""
        return KnownExtras(Extras(digest, self._salt, items), use, self._media)


class ContentExtras:
    """`ExtrasSource` of requests that are `RequestInputs`. A thread hashes media.

    Performs no I/O. Not thread-safe.
    """

    def __init__(self, adapters: Adapters, reader: MediaReader) -> None:
        self._adapters = adapters
        self.media = MediaNames(reader)
        self._media: dict[str, tuple[Hashable, HashedMedia]] = {}

    def note(self, request: RequestInputs, *, runs: bool = False) -> None:
        """Note a request that arrived, or that runs in this step (`runs`), cached or not.

        Its results stay in the engine's own caches, which use names as keys.
        """
        try:
            if request.adapter is not None:
                self._adapters.use_of(request.adapter_name, request.adapter)
        finally:
            noted, turn = self._media.get(request.request_id), request.turn
            if request.media and (noted is None or noted[0] != turn):
                media = self.media.note(request.media, request.encoder_adapter)
                self._media[request.request_id] = turn, media
            if runs and request.request_id in self._media:
                self.media.runs(self._media[request.request_id][1])

    def begin(self, request: RequestInputs) -> PendingContentExtras:
        """Start to determine a request's extras. Raises `KeyInputError` if one is invalid."""
        self.note(request)
        salt = request.salt
        if salt is None:
            salt = ""
        if not isinstance(salt, str):
            raise KeyInputError(
                f"cache_salt: not a text (got {type(salt).__name__}); expected a string or nothing"
            )
        number = request.adapter
        adapter = (request.adapter_name, number) if number is not None else None
        media = self._media[request.request_id][1] if request.media else None
        return PendingContentExtras(salt, adapter, self._adapters, media)

    def weights_changed(self) -> None:
        """Note that the weights changed, perhaps those of an encoder."""
        self.media.encoder_changed()

    def adapter_changed(self) -> None:
        """Note that an adapter's content changed; the adapter may affect the encoding of media."""
        self.media.adapter_changed()

    def encodings_dropped(self) -> None:
        """Note that the engine dropped its encodings of media."""
        self.media.encodings_dropped(media for _, media in self._media.values())

    def finished(self, request_id: str) -> None:
        """Forget a request. Hashing of its media continues: the engine's cache holds its KV."""
        self._media.pop(request_id, None)

    def close(self) -> None:
        """End the thread."""
        self.media.close()
