# SPDX-License-Identifier: Apache-2.0
"""Identities of media by content, and checks that an engine's names have one content each."""

import contextlib
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, Final, NamedTuple, Protocol
from weakref import ref

from kvhaven.identity.digests import content_digest
from kvhaven.keys import KeyInputError, MediaItem

logger = logging.getLogger(__name__)

_KNOWN_MOST: Final = 1 << 17
"""Maximum number of identifiers with remembered content; encoder caches hold far fewer."""
_REFUSED_MOST: Final = 1 << 16
"""Maximum number of refused identifiers; beyond it, only identifiers already known are accepted."""
_QUEUED_MOST: Final = 4 << 30
"""Maximum number of media bytes queued for hashing: the queue may outlive their requests."""
_TOO_MANY: Final = "media: not hashed, as too many bytes of media are queued for hashing"

_ADVICE: Final = "give each item its own UUID, or none"


class MediaFeature(NamedTuple):
    """One media item of a request, with its place in the prompt in tokens.

    `identifier` is the key of the item's encoding in the engine's caches. `data` is the engine's
    own object with the tensors after preprocessing, `is_embed` says which of the tokens are
    replaced by an encoding. `tower` says whether the request's adapter affects the encoding: True
    where the engine does not tell.
    """

    identifier: str
    modality: str
    data: Any
    offset: int
    length: int
    is_embed: Any
    tower: bool


class MediaReader(Protocol):
    """Access to an engine's media items.

    Whatever a method raises leaves the content of the item unknown: its request is not cached.
    """

    @property
    def objects_of(self) -> str:
        """Prefix of the modules whose objects may be among the tensors; they count by attributes.

        Empty if there are only tensors, numbers, texts, and containers of them.
        """

    def identifier(self, item: Any) -> object:
        """Return the key of an item's encoding in the engine's caches, of whatever type."""

    def feature(self, item: Any, adapter: str | None) -> MediaFeature:
        """Return an item's feature; `adapter` is the name of the request's LoRA adapter."""

    def size(self, data: Any) -> int:
        """Return the number of bytes of an item's tensors."""

    def tensors(self, data: Any) -> Mapping[str, Any]:
        """Return all that the model receives of an item, by name, from `MediaFeature.data` alone.

        Runs in another thread, once for each such object while the engine keeps it. Raises
        `KeyInputError` if this process does not have it.
        """


class _Known(NamedTuple):
    """Content of an identifier, and the age of the engine's encoding of it.

    `drops` counts the drops of the engine's encodings before the identifier first came, `since` the
    changes of encoders before it came first after the last of these drops. `tower` says whether a
    LoRA adapter affects the encoding.
    """

    content: bytes
    since: int
    drops: int
    tower: bool


class HashedMedia:
    """Media of one request; their content is known once it is hashed."""

    def __init__(
        self,
        names: "MediaNames",
        features: Sequence[MediaFeature],
        digests: "Future[list[bytes | Exception]]",
        since: int,
        drops: int,
        error: Exception | None,
    ) -> None:
        self.features = features
        self.digests = digests
        self.since = since
        self.drops = drops
        self.runs = self.taken_in = False
        self.bytes = 0
        self._names = names
        self._error = error

    @property
    def hashing(self) -> bool:
        """Whether the content is being hashed and will be known soon."""
        return not self.digests.done()

    def items(self) -> tuple[MediaItem, ...]:
        """Return the media items for the keys, once they are hashed. Raises as `check` does."""
        self.check()
        return tuple(
            MediaItem(digest.hex(), feature.offset, feature.length)
            for feature, digest in zip(self.features, self.digests.result(), strict=True)
            if isinstance(digest, bytes)  # all are, by `check`
        )

    def check(self) -> None:
        """Check that the KV was computed with this content, once it is hashed.

        Raises `KeyInputError` if an identifier is refused, or the error that kept the content
        unknown.
        """
        self._names.take_in()
        for error in (self._error, *self.digests.result()):
            if isinstance(error, Exception):
                raise error
        for feature in self.features:
            self._names.check(feature.identifier)

    @property
    def settled(self) -> bool:
        """Whether all media that the engine computed with under these identifiers are hashed."""
        return self._names.settled(feature.identifier for feature in self.features)


class MediaNames:
    """Identifies media by the content that the model receives: the tensors after preprocessing.

    The engine's identifiers are not used as names: they may be a counter, a client's name for the
    item, or a digest of a part of it, and a request does not show which. But the engine's caches
    use identifiers as keys, so an identifier is reliable only while all media that the engine
    received under it had one content. Therefore the media of every request are hashed
    completely, also those of uncached requests. An identifier that came with two contents, or
    with content that could not be hashed, is refused until the engine ends.

    The engine keeps encodings when the encoder changes. All earlier identifiers are then refused
    until it drops its encodings.

    Not thread-safe. A separate thread computes digests and touches no other state.
    """

    def __init__(self, reader: MediaReader) -> None:
        self._reader = reader
        self._hasher = ThreadPoolExecutor(1, "kvhaven-media")
        self._kept: dict[int, tuple[ref[Any], bytes]] = {}  # used only by the hasher
        self._queue: deque[HashedMedia] = deque()
        self._queued_bytes = 0
        self._running: Counter[str] = Counter()  # identifiers in use before being hashed
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._refused: set[str] = set()
        self._full = False
        self._now = 0  # counts changes of encoders
        self._encoder_since = self._towers_since = 0
        self._drops = 0

    def note(self, items: Sequence[Any], adapter: str | None = None) -> HashedMedia:
        """Queue the media of a request for hashing; the engine's caches hold them from now on.

        `adapter` is the name of the request's LoRA adapter.
        """
        self.take_in()
        readable: list[MediaFeature] = []
        size = 0
        error: Exception | None = None
        for item in items:
            identifier: object = None
            try:  # copied now, as a session's media move when it gets more input
                identifier = self._reader.identifier(item)
                _require_text(identifier)
                feature = self._reader.feature(item, adapter)
                size += self._reader.size(feature.data)
                readable.append(feature)
            except Exception as raised:  # noqa: BLE001 - any error leaves the content unknown
                error = error or raised
                self._refuse(str(identifier))
        if self._queued_bytes + size > _QUEUED_MOST and self._queue:
            digests: Future[list[bytes | Exception]] = Future()
            digests.set_result([KeyInputError(_TOO_MANY)] * len(readable))
        else:
            digests = self._hasher.submit(self._hash, readable)
        media = HashedMedia(self, readable, digests, self._now, self._drops, error)
        media.bytes = size
        self._queued_bytes += size
        self._queue.append(media)
        return media

    def runs(self, media: HashedMedia) -> None:
        """Note that a request starts or continues to compute."""
        if not media.runs:
            media.runs = True
            if not media.taken_in:
                self._running.update(feature.identifier for feature in media.features)

    def take_in(self) -> None:
        """Process the media that were hashed since the last call, in the order of arrival."""
        while self._queue and not self._queue[0].hashing:
            media = self._queue.popleft()
            media.taken_in = True
            self._queued_bytes -= media.bytes
            if media.runs:
                self._running -= Counter(feature.identifier for feature in media.features)
            try:
                digests = media.digests.result()
            except CancelledError:  # the connector is closing
                digests = [KeyInputError("media: not hashed")] * len(media.features)
            for feature, digest in zip(media.features, digests, strict=True):
                self._take_in(feature, digest, media)

    def settled(self, identifiers: Iterable[str]) -> bool:
        """Return whether all media used under these identifiers are hashed."""
        self.take_in()
        return not any(identifier in self._running for identifier in identifiers)

    def check(self, identifier: str) -> None:
        """Raise `KeyInputError` if an identifier may stand for other content than it came with."""
        if identifier in self._refused:
            raise KeyInputError(
                f"media item {identifier!r}: the identifier came with two contents, or with "
                f"unknown content; {_ADVICE}"
            )
        known = self._known.get(identifier)
        if known is None:
            raise KeyInputError(
                f"media item {identifier!r}: too many identifiers came with two contents, so "
                f"new ones are not accepted; {_ADVICE}, and restart the engine"
            )
        changed = max(self._encoder_since, known.tower * self._towers_since)
        if known.drops == self._drops and known.since < changed:
            raise KeyInputError(
                f"media item {identifier!r}: it came before the encoder changed, and the engine "
                "may have kept its encoding; reset the engine's encoder cache after such a change"
            )

    def encoder_changed(self) -> None:
        """Refuse earlier identifiers: the encoder changed, and its encodings are kept."""
        self._now += 1
        self._encoder_since = self._now

    def adapter_changed(self) -> None:
        """Refuse earlier identifiers whose encoding an adapter affects."""
        self._now += 1
        self._towers_since = self._now

    def encodings_dropped(self, live: Iterable[HashedMedia]) -> None:
        """Accept earlier identifiers again: the engine dropped its encodings.

        The media of `live` requests may be encoded again from now on.
        """
        self._drops += 1
        for media in live:
            media.since, media.drops = self._now, self._drops
            for feature in media.features:
                known = self._known.get(feature.identifier)
                if known is not None:
                    again = known._replace(since=self._now, drops=self._drops)
                    self._known[feature.identifier] = again

    def close(self) -> None:
        """End the thread."""
        self._hasher.shutdown(wait=False, cancel_futures=True)

    def _take_in(
        self, feature: MediaFeature, digest: bytes | Exception, media: HashedMedia
    ) -> None:
        identifier = feature.identifier
        known = self._known.get(identifier)
        if isinstance(digest, Exception) or (known is not None and known.content != digest):
            self._refuse(identifier)
        elif known is not None and known.drops >= media.drops:
            self._known.move_to_end(identifier)
        elif known is not None or (identifier not in self._refused and not self._full):
            self._known[identifier] = _Known(digest, media.since, media.drops, feature.tower)
            self._known.move_to_end(identifier)
            if len(self._known) > _KNOWN_MOST:
                self._known.popitem(last=False)

    def _refuse(self, identifier: str) -> None:
        self._known.pop(identifier, None)
        if len(self._refused) < _REFUSED_MOST:
            self._refused.add(identifier)
        elif not self._full:
            self._full = True
            logger.warning(
                "requests with new media are not cached any more: %d identifiers came with two "
                "contents, or with unknown content; %s",
                _REFUSED_MOST,
                _ADVICE,
            )

    # --- in the hasher's thread -----------------------------------------------------------------

    def _hash(self, features: Sequence[MediaFeature]) -> list[bytes | Exception]:
        """Return for each item its digest, or the error of its hashing."""
        digests: list[bytes | Exception] = []
        for feature in features:
            try:
                name = [feature.modality, self._digest(feature), feature.is_embed]
                digests.append(content_digest(name, objects_of=self._reader.objects_of))
            except Exception as error:  # noqa: BLE001 - the others must still be hashed
                digests.append(error)
        return digests

    def _digest(self, feature: MediaFeature) -> bytes:
        """Return the digest of an item's tensors; it is kept as long as the engine keeps `data`."""
        data = feature.data
        kept = self._kept.get(id(data))
        if kept is not None and kept[0]() is data:
            return kept[1]
        try:
            tensors = self._reader.tensors(data)
        except KeyInputError as error:
            raise KeyInputError(f"media item {feature.identifier!r}: {error}") from error
        digest = content_digest(tensors, objects_of=self._reader.objects_of)
        address = id(data)
        with contextlib.suppress(TypeError):  # of a plain mapping, it is computed each time
            self._kept[address] = ref(data, lambda _: self._kept.pop(address, None)), digest
        return digest


def _require_text(identifier: object) -> None:
    """Raise `KeyInputError` for an identifier that is not text: others have several forms."""
    if not isinstance(identifier, str):
        raise KeyInputError(
            f"media item {identifier!r}: the identifier is not a text (got "
            f"{type(identifier).__name__}); {_ADVICE}"
        )
