# SPDX-License-Identifier: Apache-2.0
"""State of one request on the scheduler side."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

from kvhaven.client.scheduler import LeasedChunks
from kvhaven.engine.adapters import AdapterUse
from kvhaven.engine.jobs import LoadJob
from kvhaven.engine.requests import NOTHING, EngineRequest, KnownExtras, Media, PendingExtras
from kvhaven.errors import KVHavenError
from kvhaven.keys import KeyChain

NO_TURN: Final = object()
"""The turn of a request that was not keyed yet."""


@dataclass(frozen=True)
class PendingLoad:
    """A lease that the engine was told of: tokens `start` to `end` could be loaded.

    `first_chunk` is the index in the request's chain of the lease's first chunk.
    """

    lease: LeasedChunks
    first_chunk: int
    start: int
    end: int
    chunk_size: int

    @property
    def end_chunk(self) -> int:
        """The index of the chunk after the lease's last one."""
        return self.first_chunk + len(self.lease.extents)


class RequestState:
    """One request: its keys, its blocks, what it leased, and what of it was saved.

    Nothing is permitted until `key` was called: without all extras its keys would name the KV of
    another request. `blocks[group]` are its block ids in order, as of its last admission.
    `planned_chunks` counts the chunks, from the first on, that a save was planned for, or need
    none.
    """

    def __init__(self, request: EngineRequest, root: bytes, chunk_size: int) -> None:
        self.request = request
        self.root = root
        self.chunk_size = chunk_size
        self.permissions = NOTHING
        self.adapter: AdapterUse | None = None
        self.media: Media | None = None
        self.pending: PendingExtras | None = None
        """What is not known yet of its extras; then `wanted` is what it may have with them."""
        self.wanted = NOTHING
        self.pending_since: float | None = None
        self.turn: Hashable = NO_TURN
        """The input that it was keyed for; a streaming session gets more."""
        self.blocks: list[list[int]] = []
        self.planned_chunks = 0
        self.counted = False
        """Whether its look-up is in the statistics: one request counts once."""
        self.computed = 0
        """Tokens that the engine's own cache had when it asked last."""
        self.lease_id: int | None = None
        self.ticket_chunk = 0
        self.ask_after = 0.0
        """A miss is remembered until then, so that a request that waits does not ask each step."""
        self.waits_since: float | None = None
        """Since when it waits for another request's load of the same chunk."""
        self.offer: PendingLoad | None = None
        self.loaded: PendingLoad | None = None
        """The offer that was taken last; its tokens came from the cache."""
        self.unproven: LoadJob | None = None
        """Its asynchronous load, until it computes for the first time since."""
        self._chain: KeyChain | None = None

    @property
    def chain(self) -> KeyChain:
        """The keys of its chunks. Raises `KVHavenError` before `key`."""
        if self._chain is None:
            raise KVHavenError(f"request {self.request.request_id} has no keys yet")
        return self._chain

    def forbid(self) -> None:
        """Permit nothing from now on, and wait for nothing."""
        self.permissions = self.wanted = NOTHING
        self.pending = None

    def key(self, known: KnownExtras) -> None:
        """Begin with the keys of these extras, and permit what was wanted.

        Of a streaming session that goes on, chunks that are the same as before need not be saved
        again. Raises `KeyInputError`; nothing is permitted then.
        """
        before = self._chain.keys if self._chain is not None else []
        self._chain = KeyChain(self.root, self.chunk_size, known.extras)
        self.adapter, self.media = known.adapter, known.media
        if before:
            self.extend_keys(self.request.num_tokens)
            pairs = enumerate(zip(before, self._chain.keys, strict=False))
            same = next((i for i, (old, new) in pairs if old != new), len(self._chain.keys))
            self.planned_chunks = min(self.planned_chunks, same, len(before))
        self.pending = self.pending_since = None
        self.permissions = self.wanted

    def extend_keys(self, tokens: int) -> None:
        """Hash the full chunks of the first `tokens` tokens. Raises `KeyInputError`."""
        if tokens // self.chunk_size > len(self.chain.keys):
            ids = self.request.tokens
            self.chain.extend(ids if tokens == len(ids) else ids[:tokens])

    def replace_blocks(self, blocks: Sequence[Sequence[int]]) -> None:
        """Take new block ids instead of the present ones: admitted, or resumed."""
        self.blocks = [list(group) for group in blocks]

    def append_blocks(self, blocks: Sequence[Sequence[int]]) -> None:
        """Take further block ids."""
        for present, added in zip(self.blocks, blocks, strict=True):
            present.extend(added)

    def chunk_blocks(self, chunk: int, block_sizes: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the block ids of a chunk, for each group. Raises `KVHavenError` if unknown."""
        result = []
        for group, size in zip(self.blocks, block_sizes, strict=True):
            per_chunk = self.chunk_size // size
            blocks = tuple(group[chunk * per_chunk : (chunk + 1) * per_chunk])
            if len(blocks) < per_chunk:
                raise KVHavenError(
                    f"request {self.request.request_id}: chunk {chunk} is complete, but of its "
                    f"{per_chunk} blocks {len(blocks)} are known"
                )
            result.append(blocks)
        return result
