# SPDX-License-Identifier: Apache-2.0
"""Sample of the chunks that requests ask for, from which an observer estimates the reuse curve.

A chunk has the same position in every prompt that contains it, because its key is that of the whole
prefix. So a sample by position takes each chunk always or never, as an estimate of reuse needs it.
The first 16 positions are all sampled, as the chunks of shared prompts have most of the reuse; then
one of 8, from position 64 one of 16, each from the middle of the chunks that it stands for.
"""

import struct
from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from typing import Final, NamedTuple

from kvhaven.protocol import MOST_KEYS, KeyList
from kvhaven.service.accounts import Question
from kvhaven.types import KEY_BYTES

PREFIX_BYTES: Final = 8
"""Of each sampled key. They tell chunks apart, and give no access to them."""
_WORDS: Final = KEY_BYTES // PREFIX_BYTES
_BLOCKS: Final = ((0, 16, 1), (16, 64, 8), (64, 1 << 40, 16))
"""First and last position, and how many chunks one stands for."""
_HEADER: Final = struct.Struct("<6IQ")
_MOST_BYTES: Final = 256 << 10
"""Bytes of requests that are kept for observers: those of about 500 prompts of 512 chunks."""
_MOST_WAITING: Final = 512 << 10
"""Bytes of keys that wait to be sampled: those of 32 prompts of 512 chunks."""
_MOST_REQUESTS: Final = 64
_WANTED_S: Final = 10.0
"""An observer that has not asked for this long wants no more."""


class Sampled(NamedTuple):
    """A request: its tokens, and the sampled ones of its `chunks` from position `first` on.

    `computed` tokens were in the engine, and `memory` tokens were found in memory. A chunk has
    `chunk_tokens` and takes `chunk_bytes` in memory.
    """

    prompt: int
    computed: int
    memory: int
    first: int
    chunks: int
    chunk_tokens: int
    chunk_bytes: int
    prefixes: tuple[bytes, ...]


class ReuseLog:
    """The sample of the last requests, each with a number. Without observers it costs nothing.

    Requests are sampled in batches, before a snapshot or when there are many keys: that takes a
    microsecond for each of them, five times less than one by one between other work.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Question, int]] = []
        self._waiting_bytes = 0
        self._requests = deque[bytes]()
        self._bytes = 0
        self._next = 0
        self._wanted_until = float("-inf")

    def note(self, question: Question, memory: int, now: float) -> None:
        """Record a request of which `memory` tokens were found in memory, if that is wanted."""
        if now <= self._wanted_until:
            self._waiting.append((question, memory))
            self._waiting_bytes += KEY_BYTES * len(question.keys)
            if self._waiting_bytes > _MOST_WAITING or len(self._waiting) > _MOST_REQUESTS:
                self._sample()

    def since(self, number: int, now: float) -> tuple[int, bytes]:
        """Return the number of the next request, and those from `number` on that are kept."""
        self._wanted_until = now + _WANTED_S
        self._sample()
        new = min(max(0, self._next - number), len(self._requests))
        return self._next, b"".join(self._requests[at] for at in range(-new, 0))

    def _sample(self) -> None:
        """Sample the waiting requests."""
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        for question, memory in waiting:
            engine, keys, computed = question.engine, question.keys, question.computed
            assert isinstance(keys, KeyList), "a message has them in one blob"
            size, count = engine.chunk_tokens, len(keys)
            extent_bytes = engine.session.described.table.extent_bytes
            first = computed // size
            tokens = question.prompt, computed, memory
            try:
                head = _HEADER.pack(*tokens, first, count, size, extent_bytes)
            except struct.error:  # numbers that no engine has, so there is nothing to learn
                continue
            request = head + sampled(keys.raw, first)
            self._requests.append(request)
            self._bytes += len(request)
            self._next += 1
        while self._bytes > _MOST_BYTES:
            self._bytes -= len(self._requests.popleft())


def sampled(keys: bytes, first: int) -> bytes:
    """Return the prefixes of the sampled ones of consecutive keys, beginning at `first`."""
    words, found = memoryview(keys).cast("Q"), b""
    for part in _slices(first, len(keys)):
        found += words[part].tobytes()
    return found


@lru_cache(maxsize=4096)
def _slices(first: int, length: int) -> tuple[slice, ...]:
    """Return the slices of the first words of the sampled keys, in `length` bytes of keys."""
    last = first + length // KEY_BYTES
    found = []
    for begin, end, step in _BLOCKS:
        if first < end and last > begin:
            at = begin + step // 2
            if at < first:
                at += -((at - first) // step) * step
            start, stop = (at - first) * _WORDS, (min(end, last) - first) * _WORDS
            found.append(slice(start, stop, step * _WORDS))
    return tuple(found)


@lru_cache(maxsize=4096)
def weights(first: int, chunks: int) -> tuple[int, ...]:
    """Return for how many chunks each sampled one of a request stands; empty if none is sampled.

    Chunks at the ends, whose own position is not in the request, count for the nearest that is.
    """
    last, found, before = first + chunks, list[int](), 0
    for begin, end, step in _BLOCKS:
        for start in range(max(begin, first - (first - begin) % step), min(end, last), step):
            own = min(last, start + step) - max(first, start)
            if first <= start + step // 2 < last:
                found.append(own + before)
                before = 0
            elif found:
                found[-1] += own
            else:
                before += own
    return tuple(found)


def decoded(sample: bytes) -> Iterator[Sampled]:
    """Yield the requests of `ReuseLog.since`. Raises `ValueError` if the sample is malformed."""
    at = 0
    while at < len(sample):
        if len(sample) - at < _HEADER.size:
            raise ValueError("the sample ends within a request")
        prompt, computed, memory, first, chunks, size, length = _HEADER.unpack_from(sample, at)
        if chunks > MOST_KEYS:
            raise ValueError(f"a request with {chunks} chunks; expected at most {MOST_KEYS}")
        at += _HEADER.size
        end = at + PREFIX_BYTES * len(weights(first, chunks))
        if end > len(sample):
            raise ValueError("the sample ends within a request")
        prefixes = tuple(sample[i : i + PREFIX_BYTES] for i in range(at, end, PREFIX_BYTES))
        yield Sampled(prompt, computed, memory, first, chunks, size, length, prefixes)
        at = end
