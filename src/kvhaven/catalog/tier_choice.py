# SPDX-License-Identifier: Apache-2.0
"""Choice of the chunks of a lease that are read from tiers, by what reading and computing take."""

from collections.abc import Iterator, Sequence

from kvhaven.catalog.allocation import S
from kvhaven.catalog.entries import NamespaceState, State
from kvhaven.catalog.resident import ResidentChunks
from kvhaven.catalog.sessions import Lease
from kvhaven.catalog.tiering import Tiers
from kvhaven.catalog.worth import Price, Segment, best_ratios
from kvhaven.types import ChunkKey


class TierChoice:
    """Predictions for the segments of leases, and the judgements of tiers that follow from them.

    Loads come before the prefill of the rest, so only the ends of segments are candidates: the
    total time is concave between them.
    """

    def __init__(self, space: ResidentChunks[S], tiers: Tiers) -> None:
        self._space = space
        self._tiers = tiers

    def worth(
        self, lease: Lease, price: Price, first: int, keys: Sequence[ChunkKey]
    ) -> tuple[Sequence[ChunkKey], Sequence[ChunkKey]]:
        """Return those of the chunks from `first` on that are to be read: up to the first skipped.

        Also returns a few of the skipped ones, to be read without a request that waits, which
        measures their tier. Each lease counts once for each tier.
        """
        end, trial = first + len(keys), keys[:0]
        begin = max(first, lease.taken)
        if begin < end and not (lease.skipped and begin == lease.taken):
            trial = self._judge(lease, price, begin, keys[begin - first :])
        return (keys[: max(0, lease.taken - first)] if lease.skipped else keys), trial

    def not_skipped(
        self, namespace: NamespaceState, keys: Sequence[ChunkKey]
    ) -> Sequence[ChunkKey]:
        """Return the chunks before the first that requests do not wait for now."""
        digest = namespace.namespace.digest
        skipping = [t for t in self._tiers.indexes.values() if t.judgements.skips(digest)]
        if not skipping:
            return keys
        for at, key in enumerate(keys):
            if self._space.find(key) is None and self._tiers.source(key, namespace) in skipping:
                return keys[:at]
        return keys

    def _judge(
        self, lease: Lease, price: Price, first: int, keys: Sequence[ChunkKey]
    ) -> Sequence[ChunkKey]:
        """Set which chunks are worth reading, and how many are skipped; return those to be tried.

        Chunks in no known place remain: lookups may find them.
        """
        segments = list(self._segments(lease.namespace, first, keys))
        digest = lease.namespace.namespace.digest
        lease.skipped = 0
        lease.taken = segments[-1].end if segments else first
        for segment, ratio in zip(segments, best_ratios(segments, price), strict=True):
            if not segment.tier or ratio is None:
                continue
            judgement = self._tiers.numbered(segment.tier).judgements.of(digest)
            bit = 1 << segment.tier
            take = not judgement.skipping if lease.judged & bit else judgement.take(ratio)
            lease.judged |= bit
            if not take:
                lease.skipped = lease.taken - segment.start  # behind it nothing can be loaded
                lease.taken = segment.start
                tried = judgement.try_some(segment.end - segment.start)
                return keys[segment.start - first :][:tried]
        return keys[:0]

    def _segments(
        self, namespace: NamespaceState, first: int, keys: Sequence[ChunkKey]
    ) -> Iterator[Segment]:
        """Yield the runs of chunks in one place each, up to the first that is in no known one."""
        size = namespace.extent_bytes
        begun, place, reads = first, -1, 0
        asked: set[int] = set()
        for at, key in enumerate(keys, first):
            entry = self._space.find(key)
            tier = self._tiers.source(key, namespace) if entry is None else None
            if tier is not None:
                found = tier.number
            elif entry is not None:
                found = entry.origin if entry.state is State.PROMOTING else 0
            else:
                found = -1
            if found != place:
                if place >= 0:
                    yield Segment(place, begun, at, self._load_s(place, reads * size, asked))
                begun, place, reads = at, found, 0
            if found < 0:
                return
            reads += entry is None
        if place >= 0:
            yield Segment(place, begun, first + len(keys), self._load_s(place, reads * size, asked))

    def _load_s(self, number: int, bytes_: int, asked: set[int]) -> float | None:
        """Return how long reading more bytes from a tier takes; None: not measured yet.

        A tier that has sent nothing for a while takes at least that long. Its delay and its queue
        count once for a request: with the first of its segments, as `asked` says.
        """
        if not number:
            return 0.0
        tier = self._tiers.numbered(number)
        silent_s = self._space.now - tier.progress if tier.reads and number not in asked else 0.0
        if tier.speed is None:
            if silent_s:
                asked.add(number)
            return silent_s or (0.0 if number in asked else None)
        if number in asked:
            return bytes_ * tier.speed.byte_s
        asked.add(number)
        return max(silent_s, tier.speed.seconds(tier.reading_bytes + bytes_))
