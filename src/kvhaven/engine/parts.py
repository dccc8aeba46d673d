# SPDX-License-Identifier: Apache-2.0
"""Parts of a model's KV: groups of layers that need the same tokens of a prefix."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kvhaven.types import align_up

FULL: Final = "full"
STATE: Final = "state"


@dataclass(frozen=True)
class KvPart:
    """KV groups of an engine that need the same tokens. Each part is a namespace of its own.

    `groups` are the indices of the engine's KV groups, `block_size` is the number of tokens of
    their blocks. To continue after `t` tokens, a part needs the KV of all of them (`reach` None),
    or of the last `reach` ones: a sliding window of `reach + 1` tokens contains the next token.
    With chunked local attention, `local` is its chunk in tokens, and `reach` the most tokens that
    it can need: that much is looked up and saved, also where fewer would do.

    If the window is within a chunk, a multiple of `grain` tokens is stored of it: the same for all
    engines whose blocks divide `grain`. By default it is a block.

    A recurrent state (`is_state`) has no KV of tokens: a block has the state after its last token.
    To continue after `t` tokens, only the block that ends there is needed: its `reach` is 1.
    """

    name: str
    groups: tuple[int, ...]
    block_size: int
    reach: int | None = None
    local: int = 0
    grain: int = 1
    is_state: bool = False

    def first_token(self, tokens: int) -> int:
        """Return the first token whose KV the engine keeps to continue after `tokens` tokens."""
        if self.local:
            return tokens // self.local * self.local
        return self._first_within_reach(tokens)

    def chunks(self, end: int, computed: int, chunk_size: int) -> range:
        """Return the chunks to load so that a request can continue after its first `end` chunks.

        The engine has the KV of the first `computed` tokens.
        """
        first = max(computed, self._first_within_reach(end * chunk_size))
        return range(first // chunk_size, end)

    def _first_within_reach(self, tokens: int) -> int:
        return 0 if self.reach is None else max(0, tokens - self.reach)

    def ends(self, chunk: int, chunk_size: int) -> range:
        """Return the numbers of chunks after which a request can only continue with `chunk`."""
        assert self.reach is not None
        return range(chunk + 1, chunk + 1 + -(-self.reach // chunk_size))

    def stored_tokens(self, chunk_size: int) -> int:
        """Return the tokens, at a chunk's end, that a stored chunk contains: whole blocks.

        All of them, unless what is needed is always within one chunk. Blocks are loaded whole,
        since the engine may find them again for a request that continues elsewhere.
        """
        if self.reach is None:
            return chunk_size
        multiple = math.lcm(self.block_size, self.grain)
        return min(chunk_size, align_up(max(1, self.reach), multiple))

    def stored_blocks(self, chunk_size: int) -> int:
        """Return the blocks of each group that `stored_tokens` are in."""
        return self.stored_tokens(chunk_size) // self.block_size


def one_part(block_sizes: Sequence[int]) -> tuple[KvPart, ...]:
    """Return the only part of an engine whose layers all need the whole prefix."""
    return (KvPart(FULL, tuple(range(len(block_sizes))), block_sizes[0]),)


def state_part(groups: Sequence[int], block_size: int) -> KvPart:
    """Return the part of layers that keep a recurrent state."""
    return KvPart(STATE, tuple(groups), block_size, reach=1, is_state=True)


def usable_chunks(
    parts: Sequence[KvPart],
    present: Sequence[Sequence[bool]],
    *,
    most: int,
    computed: int,
    chunk_size: int,
) -> int:
    """Return the largest number of chunks, `most` at most, after which a request can continue.

    `present[i][c]` says whether chunk `c` of part `i` can be loaded. All chunks that a part needs
    behind the first `computed` tokens must be. Returns 0 if no chunk can be used.
    """
    end = most
    for part, chunks in zip(parts, present, strict=True):
        if part.reach is None:
            needed = range(computed // chunk_size, end)
            end = next((chunk for chunk in needed if not chunks[chunk]), end)
    limited = [
        (part, _last_missing(chunks, end))
        for part, chunks in zip(parts, present, strict=True)
        if part.reach is not None
    ]
    while end * chunk_size > computed:
        before = end
        for part, missing in limited:
            last, first = missing[end]
            needed = part.chunks(end, computed, chunk_size)
            if needed and last >= needed.start:
                # What is needed begins no later for smaller numbers: all down to `last` lack it,
                # and those below lack the chunk at their own end.
                end = first
        if end == before:
            return end
    return 0


def _last_missing(present: Sequence[bool], most: int) -> list[tuple[int, int]]:
    """Return, for each number of chunks, the last of them that is missing; -1: none is.

    And the first one of the missing ones that lie directly before it.
    """
    if all(present):
        return [(-1, -1)] * (most + 1)
    found = [(-1, -1)]
    for chunk in range(most):
        last, first = found[-1]
        if present[chunk]:
            found.append((last, first))
        else:
            found.append((chunk, first if last == chunk - 1 >= 0 else chunk))
    return found


def block_lists(blocks: Sequence[Sequence[Sequence[int]]]) -> list[tuple[int, ...]]:
    """Return each chunk's blocks in the order of its payload, from `blocks[group][chunk]`.

    The layers of a part's groups lie in the same memory, so a chunk of several groups is one of as
    many more blocks.
    """
    if len(blocks) == 1:
        return [tuple(ids) for ids in blocks[0]]
    return [tuple(_joined(groups)) for groups in zip(*blocks, strict=True)]


def _joined(groups: Iterable[Sequence[int]]) -> list[int]:
    return [block for ids in groups for block in ids]
