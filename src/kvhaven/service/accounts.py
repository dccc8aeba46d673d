# SPDX-License-Identifier: Apache-2.0
"""Accounts of lookups: where the tokens of prompts were, and why the others were nowhere.

Each request counts once, with the first lookup that its engine sends for it. The accounts are plain
integers on the event loop. Three equations hold at any time: the sources of a namespace sum to the
tokens asked for, its reasons to the tokens found nowhere, and its results to its lookups.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple

import msgspec

from kvhaven.catalog.ghosts import Reason
from kvhaven.catalog.histograms import RATIOS, SECONDS, Buckets, Histogram
from kvhaven.catalog.misses import Gap
from kvhaven.errors import KVHavenError
from kvhaven.service.engines import AttachedEngine
from kvhaven.types import ChunkKey, NamespaceDigest, TenantId

MOST_REQUESTS: Final = 1024
"""Number of the last requests that are kept."""
MOST_NAMESPACES: Final = 32
"""Maximum number of namespaces with accounts of their own; others share those of `OTHERS`."""
OTHERS: Final = "other"
SKIPPED: Final = ("quota", "space", "draining")
"""Why tokens were not saved: the quota of their tenant, no memory, or the service was draining."""
_DIGITS: Final = 16
_REASONS: Final = len(Reason)
_RESULTS: Final = ("hit", "partial", "miss")
_NOTHING: Final = [0] * _REASONS
_LABELS: Final = tuple(reason.label for reason in Reason)


class Question:
    """One lookup that counts, from its arrival at `began` (of the event loop) to its final answer.

    `keys` are the full chunks that it asks for, from the one that contains token `computed` on.
    `awaited` says that its first answer was not final, `limited` that the request's own limit ends
    `keys`.
    """

    __slots__ = (
        *("awaited", "began", "computed", "engine", "keys", "limited", "prompt", "request"),
        "tenant",
    )

    def __init__(
        self,
        engine: AttachedEngine,
        keys: Sequence[ChunkKey],
        prompt: int,
        computed: int,
        tenant: TenantId,
        request: str,
        began: float,
    ) -> None:
        self.engine = engine
        self.keys = keys
        self.prompt = prompt
        self.computed = min(prompt, computed)
        self.tenant = tenant
        self.request = request
        self.began = began
        self.awaited = False
        self.limited = False


class TokenCounts(msgspec.Struct, frozen=True):
    """Tokens of a namespace since start, in prompts of requests that were looked up."""

    asked: int
    by_source: dict[str, int]
    """`engine`: in the engine's own cache; `memory` and the names of tiers: where the KV was when
    it was asked for; `none`: found nowhere."""
    missed: dict[str, int]
    """Tokens of `none` by reason."""
    lookups: dict[str, int]
    """Requests by result: hit (at most the tokens behind the last full chunk were not found),
    partial, miss."""
    saved: int
    """Tokens of full chunks that became resident."""


class RequestRow(msgspec.Struct, frozen=True):
    """A request that was looked up: its tokens by source, and why the others were not found.

    `first_gap` is the index of the first token that was found nowhere, and `reason` why; None if
    all of them were found.
    """

    id: str
    """A number that grows by one for each request, in 16 digits."""
    request: str
    """The engine's id of the request; empty if the engine did not say."""
    engine: str
    namespace: str
    tenant: str
    time: float
    """Of the lookup, in seconds since 1970."""
    wait_ms: float
    """From the lookup to its final answer."""
    prompt_tokens: int
    by_source: dict[str, int]
    first_gap: int | None
    reason: str | None
    missed: dict[str, int]


class LookupHistograms(msgspec.Struct, frozen=True):
    """Distributions of all lookups since start."""

    lookup_seconds: Buckets
    """From a lookup to its final answer."""
    promotion_wait_seconds: Buckets
    """The same, of lookups that waited for a tier."""
    request_hit_ratio: Buckets
    """Tokens that were found, as a fraction of the prompt."""


class _Counts:
    """Mutable counters of one namespace; sources are engine, memory, tiers, none."""

    __slots__ = ("asked", "lookups", "missed", "saved", "sources")

    def __init__(self, sources: int) -> None:
        self.asked = 0
        self.sources = [0] * sources
        self.missed = [0] * _REASONS
        self.lookups = [0] * len(_RESULTS)
        self.saved = 0


class _Answered(NamedTuple):
    """A lookup with its final answer. Names are kept, because the engine may be gone by then."""

    number: int
    request: str
    engine: str
    namespace: NamespaceDigest
    tenant: TenantId
    began: float
    seconds: float
    prompt: int
    sources: list[int]
    gap: Gap | None
    missed: list[int]


_Row = tuple[
    int,
    str,
    str,
    NamespaceDigest,
    TenantId,
    float,
    float,
    int,
    list[int],
    Gap | None,
    list[int],
]
"""Values of an `_Answered`, which is made when it is shown: it takes a microsecond."""


class Accounts:
    """Counters by namespace, histograms, and the last requests. `tiers` are in their order."""

    def __init__(self, tiers: Sequence[str]) -> None:
        self._names = ("engine", "memory", *tiers, "none")
        self.skipped = dict.fromkeys(SKIPPED, 0)
        """Tokens of chunks that engines wanted to save and could not, by reason."""
        self._counts: dict[str, _Counts] = {}
        self._by_digest: dict[NamespaceDigest, _Counts] = {}
        self._requests: deque[_Row] = deque(maxlen=MOST_REQUESTS)
        self._number = 0
        self._lookup = Histogram(SECONDS)
        self._wait = Histogram(SECONDS)
        self._ratio = Histogram(RATIOS)

    def answered(self, question: Question, found: bytes, gap: Gap | None, now: float) -> int:
        """Count a lookup with its final answer; return the tokens that were in memory.

        `found` has a byte for each chunk of the answer: 0 for memory, else the number of the tier.
        One more byte than there are keys is the tail. `gap` is why the answer ends before the last
        full chunk; None if it does not.
        """
        engine, prompt = question.engine, question.prompt
        sources = self._sources(question, found)
        none = sources[-1]
        missed = _NOTHING
        counts = self._by_digest.get(engine.session.digest) or self._of(engine.session.digest)
        counts.asked += prompt
        traffic = engine.traffic
        traffic.asked_tokens += prompt
        traffic.found_tokens += prompt - none
        totals = counts.sources
        for at, tokens in enumerate(sources):
            totals[at] += tokens
        result = 0
        if none:
            missed = _reasons(question, len(found), none, gap)
            for reason, tokens in enumerate(missed):
                counts.missed[reason] += tokens
            if none > missed[Reason.PARTIAL_CHUNK]:
                result = 1 if none < prompt else 2
        counts.lookups[result] += 1
        seconds = now - question.began
        self._lookup.observe(seconds)
        if question.awaited:
            self._wait.observe(seconds)
        self._ratio.observe(1 - none / prompt if prompt else 0.0)
        self._number += 1
        self._requests.append(
            (
                self._number,
                question.request,
                engine.session.id,
                engine.session.digest,
                question.tenant,
                question.began,
                seconds,
                prompt,
                sources,
                gap,
                missed,
            )
        )
        return sources[1]

    def _sources(self, question: Question, found: bytes) -> list[int]:
        """Return the tokens by source, in the order of the names."""
        size, computed = question.engine.chunk_tokens, question.computed
        sources = [0] * len(self._names)
        sources[0] = computed
        left = question.prompt - computed
        if found:
            tail = question.prompt % size if len(found) > len(question.keys) else size
            for number in range(len(sources) - 2):
                chunks = found.count(number)
                if not chunks:
                    continue
                tokens = chunks * size
                if number == found[-1]:
                    tokens -= size - tail
                if number == found[0]:
                    tokens -= computed % size  # of the first chunk, which the engine has
                tokens = min(max(tokens, 0), left)
                sources[number + 1] = tokens
                left -= tokens
                if chunks == len(found):
                    break
        sources[-1] = left
        return sources

    def saved(self, namespace: NamespaceDigest, tokens: int) -> None:
        """Count tokens that became resident."""
        self._of(namespace).saved += tokens

    def tokens(self) -> dict[str, TokenCounts]:
        """Return the counters by namespace, named by the first 16 hex digits of its digest."""
        return {
            name: TokenCounts(
                asked=counts.asked,
                by_source=dict(zip(self._names, counts.sources, strict=True)),
                missed=dict(zip(_LABELS, counts.missed, strict=True)),
                lookups=dict(zip(_RESULTS, counts.lookups, strict=True)),
                saved=counts.saved,
            )
            for name, counts in self._counts.items()
        }

    def check(self) -> None:
        """Audit the equations. Raises `AssertionError` that names the violated one."""
        for name, counts in self._counts.items():
            none, missed = counts.sources[-1], sum(counts.missed)
            assert none == missed, f"namespace {name}: {none} tokens of none, {missed} by reason"
            asked = sum(counts.sources)
            assert asked == counts.asked, (
                f"namespace {name}: {asked} by source, {counts.asked} asked"
            )
            assert min(counts.sources) >= 0, f"namespace {name}: a source is negative"
        lookups = sum(sum(counts.lookups) for counts in self._counts.values())
        assert lookups == self._number, f"{lookups} lookups by result, {self._number} in all"

    def histograms(self) -> LookupHistograms:
        """Return the distributions."""
        return LookupHistograms(self._lookup.buckets(), self._wait.buckets(), self._ratio.buckets())

    def requests_before(self, last: str, clock: float) -> Iterator[RequestRow]:
        """Yield the requests with an id below `last` (empty: all) that are kept now, newest first.

        `clock` is what has to be added to a time of the event loop. Raises `KVHavenError` if `last`
        cannot be an id.
        """
        if last and not (last.isascii() and last.isdecimal() and len(last) == _DIGITS):
            raise KVHavenError(f"after: not an id (got {last!r}); expected {_DIGITS} digits")
        kept = list(self._requests)  # others may come while the rows are made, one by one
        newer = max(0, self._number - int(last) + 1) if last else 0
        return (
            self._row(_Answered._make(found), clock)
            for found in islice(reversed(kept), newer, None)
        )

    def _row(self, found: _Answered, clock: float) -> RequestRow:
        none, gap, missed = found.sources[-1], found.gap, found.missed
        reasons = {label: tokens for label, tokens in zip(_LABELS, missed, strict=True) if tokens}
        first = gap.reason.label if gap is not None and missed[gap.reason] else None
        return RequestRow(
            id=f"{found.number:0{_DIGITS}d}",
            request=found.request,
            engine=found.engine,
            namespace=found.namespace.hex(),
            tenant=found.tenant.hex(),
            time=found.began + clock,
            wait_ms=found.seconds * 1e3,
            prompt_tokens=found.prompt,
            by_source={n: t for n, t in zip(self._names, found.sources, strict=True) if t},
            first_gap=found.prompt - none if none else None,
            reason=first or next(iter(reasons), None),
            missed=reasons,
        )

    def _of(self, namespace: NamespaceDigest) -> _Counts:
        counts = self._by_digest.get(namespace)
        if counts is None:
            name = namespace.hex()[:16] if len(self._counts) < MOST_NAMESPACES else OTHERS
            counts = self._counts.get(name)
            if counts is None:
                counts = self._counts[name] = _Counts(len(self._names))
            if len(self._by_digest) < MOST_NAMESPACES:  # those of `OTHERS` may be any number
                self._by_digest[namespace] = counts
        return counts


def _reasons(question: Question, found: int, none: int, gap: Gap | None) -> list[int]:
    """Return the tokens that were found nowhere, by reason."""
    missed = [0] * _REASONS
    size = question.engine.chunk_tokens
    partial = 0 if found > len(question.keys) else min(question.prompt % size, none)
    missed[Reason.PARTIAL_CHUNK] = partial
    rest = none - partial
    if rest and gap is not None:
        stored = gap.chunks * size - (0 if found else question.computed % size)
        stored = min(max(stored, 0), rest)
        missed[gap.reason] += stored
        rest -= stored
    missed[Reason.LOAD_LIMIT if question.limited and gap is None else Reason.COLD] += rest
    return missed
