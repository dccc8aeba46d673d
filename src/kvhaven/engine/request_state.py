# SPDX-License-Identifier: Apache-2.0
"""State of one request on the scheduler side."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvhaven.catalog.actions import Source
from kvhaven.client.scheduler import LeasedChunks, Outcome
from kvhaven.engine.adapters import AdapterUse
from kvhaven.engine.jobs import LoadJob
from kvhaven.engine.parts import KvPart
from kvhaven.engine.requests import NOTHING, EngineRequest, KnownExtras, Media, PendingExtras
from kvhaven.errors import KVHavenError
from kvhaven.keys import KeyChain
from kvhaven.types import ChunkKey

NULL_BLOCK: Final = 0
"""The block id in the place of blocks that a group with a window does not need any more."""
NO_TURN: Final = object()
"""The turn of a request whose keys have not been computed yet."""


@dataclass(frozen=True)
class PartLoad:
    """Lease on chunks of a further part, for the same load. `part` is the part's number."""

    part: int
    first_chunk: int
    lease: LeasedChunks

    @property
    def chunks(self) -> range:
        """The leased chunks."""
        return range(self.first_chunk, self.first_chunk + len(self.lease.extents))


@dataclass(frozen=True)
class PendingLoad:
    """Load that was offered to the engine: a lease on chunks with tokens `start` to `end`.

    `first_chunk` is the index, in the request's key chain, of the lease's first chunk. `tail` is
    the number of tokens of the tail behind the chain, if it is leased; else 0. `others` are the
    leases of further parts. `layered`: it was offered as a synchronous load, as `LoadJob` says.
    """

    lease: LeasedChunks
    first_chunk: int
    start: int
    end: int
    chunk_size: int
    tail: int = 0
    others: tuple[PartLoad, ...] = ()
    layered: bool = False

    @property
    def end_chunk(self) -> int:
        """The index of the chunk after the lease's last full one."""
        return self.first_chunk + len(self.lease.extents) - bool(self.tail)

    def tokens_from_memory(self, tokens: int) -> int:
        """Return how many of the first `tokens` tokens were in memory, and not read from a tier."""
        found, at, end = 0, self.start, self.start + tokens
        while at < end:
            chunk = at // self.chunk_size
            step = min((chunk + 1) * self.chunk_size, end) - at
            if self.lease.sources[chunk - self.first_chunk] == Source.MEMORY:
                found += step
            at += step
        return found


@dataclass
class PartSearch:
    """Search for the chunks of one request. Its ids are those of each part's client.

    `located` are the ids of the questions about places, until `present` has their answers; `known`
    leaves out chunks that a shared tier only might have.
    `leases` are the leases on the chunks of `ranges`, which are needed to continue after `end`
    chunks.
    """

    computed: int
    most: int
    began: float
    located: list[int | None] = field(default_factory=list)
    places: list[bytes | Outcome] = field(default_factory=list)
    present: list[list[bool]] | None = None
    known: list[list[bool]] = field(default_factory=list)
    end: int = 0
    ranges: list[range] = field(default_factory=list)
    leases: list[int | None] = field(default_factory=list)
    attempts: int = 0
    found: LeasedChunks | None = None
    others: tuple[PartLoad, ...] = ()


class RequestState:
    """Keys, blocks, leases and planned saves of one request.

    Nothing is permitted before `key` was called: keys without all extras could name the KV of
    another request. `blocks[group]` are its block ids in order, since its last admission.
    `planned_chunks` is the number of leading chunks that have a planned save or need none. `root`
    is the root of the keys of the engine's first part, `more_roots` those of its further parts.
    """

    def __init__(
        self,
        request: EngineRequest,
        root: bytes,
        chunk_size: int,
        more_roots: Sequence[bytes] = (),
    ) -> None:
        self.request = request
        self.root = root
        self.more_roots = tuple(more_roots)
        self.chunk_size = chunk_size
        self.permissions = NOTHING
        self.adapter: AdapterUse | None = None
        self.media: Media | None = None
        self.pending: PendingExtras | None = None
        """Its extras while they are unknown; `wanted` becomes `permissions` once they are known."""
        self.wanted = NOTHING
        self.pending_since: float | None = None
        self.turn: Hashable = NO_TURN
        """The input that its keys were computed for; a streaming session gets further input."""
        self.blocks: list[list[int]] = []
        self.planned_chunks = 0
        self.decode_node = ""
        """Address of the node that decodes it, to which its chunks are announced; empty: none."""
        self.announced = self.pulled = False
        """Whether its chunks were announced there, and asked of the node that prefilled it."""
        self.asks_tail = self.saves_tail = False
        """Whether the tail of its prompt is looked up, and saved, too."""
        self.planned_tail = False
        """Whether the tail of its prompt has a planned save or needs none."""
        self.tail: ChunkKey | None = None
        """The tail that its lookup asks for, behind all full chunks."""
        self.counted = self.told = False
        """Whether its lookup is in the engine's statistics, and the service's: it counts once."""
        self.computed = 0
        """Number of tokens in the engine's prefix cache at the last lookup."""
        self.lease_id: int | None = None
        self.lease_start = 0
        self.ask_after = 0.0
        """Time until which a miss is cached, so that a waiting request does not ask each step."""
        self.waits_since: float | None = None
        """Time at which it began to wait for another request's load of the same chunk."""
        self.offer: PendingLoad | None = None
        self.loaded: PendingLoad | None = None
        """The last offer that the engine took; its tokens came from the cache."""
        self.unproven: LoadJob | None = None
        """Its asynchronous load, until the request computes for the first time after it."""
        self.search: PartSearch | None = None
        """The lookup of an engine with several parts."""
        self.junction = 0
        """Chunks of its prompt that the first part had at the last lookup: other prompts have them,
        too."""
        self.step_begin = 0
        """Tokens that had KV before the present step."""
        self._chain: KeyChain | None = None
        self._more_chains: list[KeyChain] = []

    @property
    def chains(self) -> list[KeyChain]:
        """The keys of its chunks, for each part. Raises `KVHavenError` if `key` was not called."""
        return [self.chain, *self._more_chains]

    @property
    def chain(self) -> KeyChain:
        """The keys of its chunks in the first part. Raises as `chains` does."""
        if self._chain is None:
            raise KVHavenError(f"request {self.request.request_id} has no keys yet")
        return self._chain

    def forbid(self) -> None:
        """Revoke all permissions, and stop waiting for extras."""
        self.permissions = self.wanted = NOTHING
        self.pending = None

    def key(self, known: KnownExtras) -> None:
        """Start a key chain with these extras, and grant the wanted permissions.

        If a streaming session continues, its unchanged chunks are not saved again. Raises
        `KeyInputError` if the tokens cannot be hashed; nothing is permitted then.
        """
        before = self._chain.keys if self._chain is not None else []
        self._chain = KeyChain(self.root, self.chunk_size, known.extras)
        self._more_chains = [
            KeyChain(root, self.chunk_size, known.extras) for root in self.more_roots
        ]
        self.adapter, self.media = known.adapter, known.media
        if before:
            self.extend_keys(self.request.num_tokens)
            pairs = enumerate(zip(before, self._chain.keys, strict=False))
            same = next((i for i, (old, new) in pairs if old != new), len(self._chain.keys))
            self.planned_chunks = min(self.planned_chunks, same, len(before))
        self.pending = self.pending_since = None
        self.planned_tail = False
        self.permissions = self.wanted

    def extend_keys(self, tokens: int) -> None:
        """Hash the full chunks of the first `tokens` tokens.

        Raises `KeyInputError` if the tokens cannot be hashed.
        """
        if tokens // self.chunk_size > len(self.chain.keys):
            ids = self.request.tokens
            ids = ids if tokens == len(ids) else ids[:tokens]
            self.chain.extend(ids)
            for chain in self._more_chains:
                chain.extend(ids)

    def tail_key(self, end: int) -> ChunkKey | None:
        """Return the key of the tail of the first `end` tokens; None if none is worth keeping.

        The engine computes the last token in any case, so a tail of it alone saves nothing. Raises
        `KeyInputError` if the tokens cannot be hashed.
        """
        if end % self.chunk_size <= 1:
            return None
        self.extend_keys(end)
        return self.chain.tail_key(self.request.tokens, end)

    def replace_blocks(self, blocks: Sequence[Sequence[int]]) -> None:
        """Replace the block ids, after the request was admitted or resumed."""
        self.blocks = [list(group) for group in blocks]

    def append_blocks(self, blocks: Sequence[Sequence[int]]) -> None:
        """Append block ids to each group."""
        for present, added in zip(self.blocks, blocks, strict=True):
            present.extend(added)

    def part_blocks(self, part: KvPart, chunk: int) -> list[tuple[int, ...]] | None:
        """Return the block ids of what is stored of a chunk, for each group of a further part.

        None if the engine may have freed one of them: it keeps those that a part needs to continue
        after the tokens that had KV before this step. Raises as `chunk_blocks` does.
        """
        size = part.block_size
        end = (chunk + 1) * (self.chunk_size // size)
        first = end - part.stored_blocks(self.chunk_size)
        if first < part.first_token(self.step_begin) // size:
            return None
        found = []
        for group in part.groups:
            ids = tuple(self.blocks[group][first:end])
            if len(ids) < end - first:
                raise self._missing_blocks(chunk, len(ids), end - first)
            if NULL_BLOCK in ids:
                return None
            found.append(ids)
        return found

    def _missing_blocks(self, chunk: int, got: int, wanted: int) -> KVHavenError:
        return KVHavenError(
            f"request {self.request.request_id}: block ids of chunk {chunk} are missing "
            f"(got {got}); expected {wanted}, as the chunk is complete"
        )

    def chunk_blocks(
        self,
        chunk: int,
        block_sizes: Sequence[int],
        tail: int = 0,
        groups: Sequence[int] | None = None,
    ) -> list[tuple[int, ...]]:
        """Return the block ids of a chunk for each group; with `tail`, of its first `tail` tokens.

        `block_sizes` are those of the `groups` (default: of all groups). Raises `KVHavenError` if
        the engine did not report all of them.
        """
        result = []
        tables = self.blocks if groups is None else [self.blocks[group] for group in groups]
        for group, size in zip(tables, block_sizes, strict=True):
            first = chunk * (self.chunk_size // size)
            wanted = -(-(tail or self.chunk_size) // size)
            blocks = tuple(group[first : first + wanted])
            if len(blocks) < wanted:
                raise self._missing_blocks(chunk, len(blocks), wanted)
            result.append(blocks)
        return result
