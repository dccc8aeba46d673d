# SPDX-License-Identifier: Apache-2.0
"""Names of media by their content, and which of vLLM's identifiers stand for one content only."""

import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, Final, NamedTuple
from weakref import ref

from kvhaven.integrations.vllm.values import content_digest
from kvhaven.keys import KeyInputError, MediaItem

logger = logging.getLogger(__name__)

_KNOWN_MOST: Final = 1 << 17
"""Identifiers whose content is remembered; the engine's encoder cache holds far fewer."""
_REFUSED_MOST: Final = 1 << 16
"""Identifiers that are remembered as ambiguous; beyond, only those that are known are accepted."""
_QUEUED_MOST: Final = 4 << 30
"""Bytes of media that wait to be hashed: they may be kept longer than their requests."""
_TOO_MANY: Final = "media: not hashed, as those of too many requests wait for it"

_ADVICE: Final = "give each item a UUID of its own, or none"


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


class _Known(NamedTuple):
    """An identifier's content, and what vLLM's encoding of it may be of.

    `since` is when it came first after the encodings were dropped for the `drops`-th time, and
    `tower` whether a LoRA adapter has a part in it.
    """

    content: bytes
    since: int
    drops: int
    tower: bool


class Media:
    """The media of one request, whose content is known when it was hashed."""

    def __init__(
        self,
        names: "MediaNames",
        features: Sequence[_Feature],
        digests: "Future[list[bytes | Exception]]",
        since: int,
        drops: int,
        adapter: str | None,
        error: Exception | None,
    ) -> None:
        self.features = features
        self.digests = digests
        self.since = since
        self.drops = drops
        self.adapter = adapter
        self.runs = self.taken_in = False
        self.bytes = 0
        self._names = names
        self._error = error

    @property
    def hashing(self) -> bool:
        """Whether the content is being hashed: the answer follows soon."""
        return not self.digests.done()

    def items(self) -> tuple[MediaItem, ...]:
        """Return what the keys have of the media, once hashed. Raises as `check`."""
        self.check()
        return tuple(
            MediaItem(digest.hex(), feature.offset, feature.length)
            for feature, digest in zip(self.features, self.digests.result(), strict=True)
            if isinstance(digest, bytes)  # all are, by `check`
        )

    def check(self) -> None:
        """Raise unless the KV is of this content: `KeyInputError`, or what kept it unknown."""
        self._names.take_in()
        for error in (self._error, *self.digests.result()):
            if isinstance(error, Exception):
                raise error
        for feature in self.features:
            self._names.check(feature.identifier)

    @property
    def settled(self) -> bool:
        """Whether all that the engine has begun to compute with these identifiers is hashed."""
        return self._names.settled(feature.identifier for feature in self.features)


class MediaNames:
    """Names media by the content that the model gets: the tensors after preprocessing.

    vLLM's own identifiers are not used as names: they may be a counter (with its caches off), or
    whatever a client sent as the item's UUID, and nothing in a request says which. A digest that
    vLLM made is no proof either: of an image with an ImageID in its EXIF data it covers nothing
    else. But vLLM's caches go by identifiers, so one names an item only as long as all that the
    engine was ever given under it had one content. So the media of every request are hashed,
    also of those that are not cached, and to the end; an identifier that came with two contents,
    or once with none that could be hashed, is refused for good.

    vLLM keeps encodings when the encoder changes. Then every identifier that came before is
    refused until vLLM has dropped them.

    Not thread-safe: a thread of its own computes digests, and touches nothing else.
    """

    def __init__(self) -> None:
        self._hasher = ThreadPoolExecutor(1, "kvhaven-media")
        self._kept: dict[int, tuple[ref[Any], bytes]] = {}  # the hasher's alone
        self._queue: deque[Media] = deque()
        self._queued_bytes = 0
        self._running: Counter[str] = Counter()  # identifiers that compute, or did, unhashed
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._refused: set[str] = set()
        self._full = False
        self._now = 0  # counts changes of encoders
        self._encoder_since = self._towers_since = 0
        self._drops = 0

    def note(self, features: Sequence[Any], adapter: str | None = None) -> Media:
        """Have the media of a request hashed, which vLLM's caches may hold from now on.

        `adapter` is the name of the request's LoRA adapter.
        """
        self.take_in()
        readable: list[_Feature] = []
        size = 0
        error: Exception | None = None
        for feature in features:
            try:  # copied now: a session's features move when more input comes
                one = _Feature.of(feature)
                size += _size(one.data)
                readable.append(one)
            except Exception as raised:  # noqa: BLE001 - whatever it is, the content is not known
                error = error or raised
                self._refuse(str(getattr(feature, "identifier", None)))
        if self._queued_bytes + size > _QUEUED_MOST and self._queue:
            digests: Future[list[bytes | Exception]] = Future()
            digests.set_result([KeyInputError(_TOO_MANY)] * len(readable))
        else:
            digests = self._hasher.submit(self._hash, readable)
        media = Media(self, readable, digests, self._now, self._drops, adapter, error)
        media.bytes = size
        self._queued_bytes += size
        self._queue.append(media)
        return media

    def runs(self, media: Media) -> None:
        """Note that a request begins to compute, or goes on."""
        if not media.runs:
            media.runs = True
            if not media.taken_in:
                self._running.update(feature.identifier for feature in media.features)

    def take_in(self) -> None:
        """Take in what was hashed since the last call, in the order in which it came."""
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
                # So vLLM marks encodings that an adapter has a part in.
                tower = media.adapter is not None and feature.identifier.startswith(
                    f"{media.adapter}:"
                )
                self._take_in(feature.identifier, digest, media, tower=tower)

    def settled(self, identifiers: Iterable[str]) -> bool:
        """Whether nothing that computes, or did, under these identifiers is still being hashed."""
        self.take_in()
        return not any(identifier in self._running for identifier in identifiers)

    def check(self, identifier: str) -> None:
        """Raise `KeyInputError` unless an identifier stands for the content that it came with."""
        if identifier in self._refused:
            raise KeyInputError(
                f"media item {identifier!r}: the identifier came with two contents, or with one "
                f"that is not known; {_ADVICE}"
            )
        known = self._known.get(identifier)
        if known is None:
            raise KeyInputError(
                f"media item {identifier!r}: too many identifiers came with two contents, so a "
                f"new one is not accepted; {_ADVICE}, and start the engine anew"
            )
        changed = max(self._encoder_since, known.tower * self._towers_since)
        if known.drops == self._drops and known.since < changed:
            raise KeyInputError(
                f"media item {identifier!r}: it came before the encoder was changed, and vLLM may "
                "have kept its encoding; reset vLLM's encoder cache after such a change"
            )

    def encoder_changed(self) -> None:
        """Refuse what came before: the encoder is another, and vLLM keeps what it encoded."""
        self._now += 1
        self._encoder_since = self._now

    def adapter_changed(self) -> None:
        """Refuse what came before with an adapter that has a part in encoding it."""
        self._now += 1
        self._towers_since = self._now

    def encodings_dropped(self, live: Iterable[Media]) -> None:
        """Accept what came before: vLLM has dropped what it had encoded.

        The media of `live` requests may be encoded from now on.
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
        self, identifier: str, digest: bytes | Exception, media: Media, *, tower: bool
    ) -> None:
        known = self._known.get(identifier)
        if isinstance(digest, Exception) or (known is not None and known.content != digest):
            self._refuse(identifier)
        elif known is not None and known.drops >= media.drops:
            self._known.move_to_end(identifier)
        elif known is not None or (identifier not in self._refused and not self._full):
            self._known[identifier] = _Known(digest, media.since, media.drops, tower)
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
                "requests with media that are new are not cached any more: %d identifiers came "
                "with two contents, or with one that is not known; %s",
                _REFUSED_MOST,
                _ADVICE,
            )

    # --- in the hasher's thread -----------------------------------------------------------------

    def _hash(self, features: Sequence[_Feature]) -> list[bytes | Exception]:
        """Return the digest of each item, or what keeps it from being known."""
        digests: list[bytes | Exception] = []
        for feature in features:
            try:
                name = [feature.modality, self._digest(feature), feature.is_embed]
                digests.append(content_digest(name))
            except Exception as error:  # noqa: BLE001 - the others' must be known all the same
                digests.append(error)
        return digests

    def _digest(self, feature: _Feature) -> bytes:
        """Return the digest of an item's tensors; that of an item in vLLM's cache is kept."""
        data = feature.data
        kept = self._kept.get(id(data))
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
        self._kept[address] = ref(data, lambda _: self._kept.pop(address, None)), digest
        return digest


def _size(data: Any) -> int:
    """Return how many bytes the tensors of a media item have, as far as they can be seen."""
    if isinstance(data, Mapping):
        return sum(_size(getattr(element, "data", None)) for element in data.values())
    if isinstance(data, list | tuple):
        return sum(map(_size, data))
    return int(getattr(data, "nbytes", 0))
