# SPDX-License-Identifier: Apache-2.0
"""Accounts of lookups: where the tokens of prompts were, and why the others were nowhere.

Each request counts once, with the first lookup that its engine sends for it. The accounts are plain
integers on the event loop. Three equations hold at any time: the sources of a namespace sum to the
tokens asked for, its reasons to the tokens found nowhere, and its results to its lookups.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final

import msgspec

from kvhaven.catalog.ghosts import Reason
from kvhaven.catalog.histograms import RATIOS, SECONDS, Buckets, Histogram
from kvhaven.catalog.misses import Gap
from kvhaven.types import ChunkKey, NamespaceDigest, TenantId

MOST_REQUESTS: Final = 1024
"""Number of the last requests that are kept."""
MOST_NAMESPACES: Final = 32
"""Maximum number of namespaces with accounts of their own; others share those of `OTHERS`."""
OTHERS: Final = "other"
_REASONS: Final = len(Reason)
_RESULTS: Final = ("hit", "partial", "miss")
_LABELS: Final = tuple(reason.label for reason in Reason)


class Question:
    """One lookup that counts, from its arrival to its final answer.

    `keys` are the full chunks that it asks for, from the one that contains token `computed` on.
    """

    __slots__ = (
        "awaited",
        "began",
        "chunk_tokens",
        "computed",
        "engine",
        "keys",
        "namespace",
        "prompt",
        "request",
        "tenant",
        "time",
    )

    def __init__(
        self,
        engine: str,
        namespace: NamespaceDigest,
        chunk_tokens: int,
        keys: Sequence[ChunkKey],
        *,
        prompt: int,
        computed: int,
        tenant: TenantId,
        request: str,
        began: float,
        time: float,
    ) -> None:
        self.engine = engine
        self.namespace = namespace
        self.chunk_tokens = chunk_tokens
        self.keys = keys
        self.prompt = prompt
        self.computed = min(computed, prompt)
        self.tenant = tenant
        self.request = request
        self.began = began  # of the event loop
        self.time = time  # since 1970
        self.awaited = False  # its first answer was not final


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

    __slots__ = ("lookups", "missed", "saved", "sources")

    def __init__(self, sources: int) -> None:
        self.sources = [0] * sources
        self.missed = [0] * _REASONS
        self.lookups = [0] * len(_RESULTS)
        self.saved = 0


class Accounts:
    """Counters by namespace, histograms, and the last requests. `tiers` are in their order."""

    def __init__(self, tiers: Sequence[str]) -> None:
        self._names = ("engine", "memory", *tiers, "none")
        self._counts: dict[str, _Counts] = {}
        self._requests: deque[tuple[Question, int, float, list[int], Gap | None, list[int]]] = (
            deque(maxlen=MOST_REQUESTS)
        )
        self._number = 0
        self._lookup = Histogram(SECONDS)
        self._wait = Histogram(SECONDS)
        self._ratio = Histogram(RATIOS)

    def answered(
        self, question: Question, found: bytes, gap: Gap | None, now: float, *, waited: bool
    ) -> None:
        """Count a lookup with its final answer.

        `found` has a byte for each chunk of the answer: 0 for memory, else the number of the tier.
        One more byte than there are keys is the tail. `gap` is why the answer ends before the last
        full chunk; None if it does not.
        """
        size, computed, prompt = question.chunk_tokens, question.computed, question.prompt
        sources = [0] * len(self._names)
        sources[0] = computed
        left = prompt - computed
        tail = prompt % size if len(found) > len(question.keys) else 0
        overlap = computed % size  # tokens of the first chunk that the engine has
        for number in range(len(sources) - 2):
            chunks = found.count(number)
            if not chunks:
                continue
            tokens = chunks * size
            if number == found[-1] and tail:
                tokens -= size - tail
            if number == found[0]:
                tokens -= overlap
            tokens = min(max(tokens, 0), left)
            sources[number + 1] = tokens
            left -= tokens
        sources[-1] = left
        missed = self._reasons(question, len(found), left, gap, has_tail=bool(tail))
        counts = self._of(question.namespace)
        for at, tokens in enumerate(sources):
            counts.sources[at] += tokens
        for reason, tokens in enumerate(missed):
            counts.missed[reason] += tokens
        absent = left - missed[Reason.PARTIAL_CHUNK]
        counts.lookups[0 if not absent else 1 if left < prompt else 2] += 1
        seconds = now - question.began
        self._lookup.observe(seconds)
        if waited:
            self._wait.observe(seconds)
        self._ratio.observe((prompt - left) / prompt if prompt else 0.0)
        self._number += 1
        question.keys = ()
        self._requests.append((question, self._number, seconds, sources, gap, missed))

    def saved(self, namespace: NamespaceDigest, tokens: int) -> None:
        """Count tokens that became resident."""
        self._of(namespace).saved += tokens

    def tokens(self) -> dict[str, TokenCounts]:
        """Return the counters by namespace, named by the first 16 hex digits of its digest."""
        return {
            name: TokenCounts(
                asked=sum(counts.sources),
                by_source=dict(zip(self._names, counts.sources, strict=True)),
                missed=dict(zip(_LABELS, counts.missed, strict=True)),
                lookups=dict(zip(_RESULTS, counts.lookups, strict=True)),
                saved=counts.saved,
            )
            for name, counts in self._counts.items()
        }

    def histograms(self) -> LookupHistograms:
        """Return the distributions."""
        return LookupHistograms(self._lookup.buckets(), self._wait.buckets(), self._ratio.buckets())

    def requests_before(self, last: str) -> "list[RequestRow]":
        """Return the last requests with an id below `last` (empty: all), newest first."""
        return [
            self._row(*found)
            for found in reversed(self._requests)
            if not last or f"{found[1]:016d}" < last
        ]

    def _reasons(
        self, question: Question, found: int, none: int, gap: Gap | None, *, has_tail: bool
    ) -> list[int]:
        """Return the tokens that were found nowhere, by reason."""
        missed = [0] * _REASONS
        if not none:
            return missed
        size = question.chunk_tokens
        overlap = question.computed % size
        partial = 0 if has_tail else min(question.prompt % size, none)
        missed[Reason.PARTIAL_CHUNK] = partial
        rest = none - partial
        if rest and gap is not None:
            stored = gap.chunks * size - (0 if found else overlap)
            stored = min(max(stored, 0), rest)
            missed[gap.reason] += stored
            rest -= stored
        missed[Reason.COLD] += rest
        return missed

    def _row(
        self,
        question: Question,
        number: int,
        seconds: float,
        sources: list[int],
        gap: Gap | None,
        missed: list[int],
    ) -> RequestRow:
        none = sources[-1]
        reasons = {label: tokens for label, tokens in zip(_LABELS, missed, strict=True) if tokens}
        first = gap.reason.label if gap is not None and missed[gap.reason] else None
        return RequestRow(
            id=f"{number:016d}",
            request=question.request,
            engine=question.engine,
            namespace=question.namespace.hex(),
            tenant=question.tenant.hex(),
            time=question.time,
            wait_ms=seconds * 1e3,
            prompt_tokens=question.prompt,
            by_source={n: t for n, t in zip(self._names, sources, strict=True) if t},
            first_gap=question.prompt - none if none else None,
            reason=first or next(iter(reasons), None),
            missed=reasons,
        )

    def _of(self, namespace: NamespaceDigest) -> _Counts:
        name = namespace.hex()[:16]
        counts = self._counts.get(name)
        if counts is None:
            if len(self._counts) >= MOST_NAMESPACES:
                name = OTHERS
                counts = self._counts.get(name)
            if counts is None:
                counts = self._counts[name] = _Counts(len(self._names))
        return counts
