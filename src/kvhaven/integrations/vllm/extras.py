# SPDX-License-Identifier: Apache-2.0
"""What determines a request's KV besides its tokens: adapter, cache salt, media."""

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

from kvhaven.integrations.vllm.adapters import Adapters, AdapterUse
from kvhaven.integrations.vllm.digests import content_digest
from kvhaven.keys import Extras, KeyInputError, MediaItem

if TYPE_CHECKING:
    from vllm.v1.request import Request

_NAMES_MOST = 1 << 17
"""Identifiers of media whose content is remembered; the engine's encoder cache holds far fewer."""


class KnownExtras(NamedTuple):
    """The extras of a request, and the adapter that its KV is computed with."""

    extras: Extras
    adapter: AdapterUse | None


class PendingExtras:
    """The extras of one request, as far as they are known."""

    def __init__(
        self,
        salt: str,
        lora: Any,
        adapters: Adapters,
        media: "Future[tuple[MediaItem, ...]] | None",
    ) -> None:
        self._salt = salt
        self._lora = lora
        self._adapters = adapters
        self._media = media

    @property
    def hashing(self) -> bool:
        """Whether media are being hashed: the answer follows soon."""
        return self._media is not None and not self._media.done()

    def poll(self) -> KnownExtras | None:
        """Return the extras, or None while media are hashed or the adapter is not known.

        Raises `KeyInputError` when they cannot be known.
        """
        adapter = None
        if self._lora is not None:
            adapter = self._adapters.use_of(self._lora)
            if adapter is None:
                return None
        if self.hashing:
            return None
        items = self._media.result() if self._media is not None else ()
        digest = adapter.digest.hex() if adapter is not None else ""
        return KnownExtras(Extras(digest, self._salt, items), adapter)

    def cancel(self) -> None:
        """Give up: nobody waits for it any more."""
        if self._media is not None:
            self._media.cancel()


class ExtrasSource:
    """Finds out the extras of requests. Only media take time; a thread hashes them.

    Never does I/O. Thread-safe only in that the thread is its own.
    """

    def __init__(self, adapters: Adapters) -> None:
        self._adapters = adapters
        self._hasher = ThreadPoolExecutor(1, "kvhaven-media")
        self._media = _MediaNames()

    def begin(self, request: "Request") -> PendingExtras:
        """Begin to find out a request's extras. Raises `KeyInputError` for what cannot be named."""
        salt = request.cache_salt
        if salt is None:
            salt = ""
        if not isinstance(salt, str):
            raise KeyInputError(
                f"cache_salt: not a text (got {type(salt).__name__}); expected a string or nothing"
            )
        media = None
        if request.mm_features:
            # Copied now: a session's features move when more input comes.
            features = [_Feature.of(feature) for feature in request.mm_features]
            media = self._hasher.submit(self._media.items_of, features)
        return PendingExtras(salt, request.lora_request, self._adapters, media)

    def seen(self, request: "Request") -> None:
        """Note a request that runs without being cached: its KV stays in the engine's own cache."""
        if request.lora_request is not None:
            self._adapters.use_of(request.lora_request)

    def close(self) -> None:
        """End the thread."""
        self._hasher.shutdown(wait=False, cancel_futures=True)


class _Feature(NamedTuple):
    """One of vLLM's `MultiModalFeatureSpec`, with its place in the prompt in tokens."""

    identifier: str
    modality: str
    data: Any
    offset: int
    length: int
    is_embed: Any

    @classmethod
    def of(cls, feature: Any) -> "_Feature":
        place = feature.mm_position
        return cls(
            feature.identifier,
            feature.modality,
            feature.data,
            place.offset,
            place.length,
            getattr(place, "is_embed", None),
        )


class _MediaNames:
    """Names media by the content that the model gets: the tensors after preprocessing.

    vLLM's own identifiers are not used as names: they may be a counter (with its caches off), or
    whatever a client sent as the item's UUID. But vLLM's encoder cache goes by them, so an
    identifier that came with two contents names neither: the KV may be of either.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._contents: OrderedDict[str, bytes | None] = OrderedDict()
        self._digests: dict[int, tuple[ref[Any], bytes]] = {}

    def items_of(self, features: Sequence[_Feature]) -> tuple[MediaItem, ...]:
        """Return the items of a request. Raises `KeyInputError`."""
        return tuple(
            MediaItem(self._name(feature).hex(), feature.offset, feature.length)
            for feature in features
        )

    def _name(self, feature: _Feature) -> bytes:
        data = self._digest(feature)
        name = content_digest([feature.modality, data, feature.is_embed])
        known = self._contents.setdefault(feature.identifier, name)
        self._contents.move_to_end(feature.identifier)
        if len(self._contents) > _NAMES_MOST:
            self._contents.popitem(last=False)
        if known != name:
            self._contents[feature.identifier] = None
            raise KeyInputError(
                f"media item {feature.identifier!r}: the identifier came with two contents; give "
                "each item a UUID of its own, or none"
            )
        return name

    def _digest(self, feature: _Feature) -> bytes:
        """Return the digest of an item's tensors; that of an item in vLLM's cache is kept."""
        data = feature.data
        kept = self._digests.get(id(data))
        if kept is not None and kept[0]() is data:
            return kept[1]
        if not isinstance(data, Mapping) or not data:
            raise KeyInputError(
                f"media item {feature.identifier!r}: its content is not in the scheduler's "
                f"process (got {type(data).__name__}); set --mm-processor-cache-type lru"
            )
        fields = {name: getattr(element, "data", None) for name, element in data.items()}
        absent = [name for name, value in fields.items() if value is None]
        if absent:
            raise KeyInputError(
                f"media item {feature.identifier!r}: field {absent[0]!r} has no data in the "
                "scheduler's process; set --mm-processor-cache-type lru"
            )
        digest = content_digest(fields)
        address = id(data)
        self._digests[address] = ref(data, lambda _: self._digests.pop(address, None)), digest
        return digest
