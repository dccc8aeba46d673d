# SPDX-License-Identifier: Apache-2.0
"""Plans of loads: which bytes of a lease go to which of a request's blocks."""

from collections.abc import Sequence

from kvhaven.devices.base import SKIP
from kvhaven.engine.jobs import LoadJob
from kvhaven.engine.parts import KvPart
from kvhaven.engine.request_state import NULL_BLOCK, PartLoad, PendingLoad, RequestState
from kvhaven.errors import KVHavenError


class LoadPlanner:
    """Planner of loads for the `parts` of an engine, whose KV groups have these `block_sizes`."""

    def __init__(
        self, parts: Sequence[KvPart], block_sizes: Sequence[int], *, asynchronous: bool
    ) -> None:
        self._parts = tuple(parts)
        self._block_sizes = tuple(block_sizes)
        self._asynchronous = asynchronous

    def plan(self, state: RequestState, offer: PendingLoad, end: int) -> list[LoadJob]:
        """Plan the copy of tokens `offer.start` to `end` into the request's blocks, a job a part.

        Raises `KVHavenError` if the engine has no blocks for tokens that a part needs.
        """
        first = self._first(state, offer, end)
        return [first, *(self._further(state, offer, other, end) for other in offer.others)]

    def _first(self, state: RequestState, offer: PendingLoad, end: int) -> LoadJob:
        """Plan the copy of the first part's chunks.

        Blocks before the start come from the engine's prefix cache and may be shared, so they
        are never written.
        """
        size = state.chunk_size
        first, last = offer.start // size, -(-end // size)
        tail = offer.tail if last > offer.end_chunk else 0
        groups = []
        for group in self._parts[0].groups:
            block_size = self._block_sizes[group]
            start_block, end_block = offer.start // block_size, -(-end // block_size)
            per_chunk = size // block_size
            counts = [(chunk, per_chunk) for chunk in range(first, last)]
            if tail:
                counts[-1] = last - 1, -(-tail // block_size)
            ids = state.blocks[group]
            groups.append(
                tuple(
                    tuple(
                        ids[at] if start_block <= at < end_block else SKIP
                        for at in range(chunk * per_chunk, chunk * per_chunk + needed)
                    )
                    for chunk, needed in counts
                )
            )
        skipped = first - offer.first_chunk
        return LoadJob(
            request_id=state.request.request_id,
            lease_id=offer.lease.lease_id,
            service=offer.lease.service,
            places=tuple(offer.lease.extents[skipped : skipped + last - first]),
            shard_offsets=offer.lease.offsets,
            blocks=tuple(groups),
            asynchronous=self._asynchronous and not offer.layered,
            adapter=state.adapter,
            tail=tail,
            # Of a block that is loaded in part, the step computes the rest.
            layered=offer.layered and not end % self._block_sizes[0],
        )

    def _further(
        self, state: RequestState, offer: PendingLoad, other: PartLoad, end: int
    ) -> LoadJob:
        """Plan the copy of a further part's chunks into the request's blocks.

        The engine has no blocks for tokens that the part does not need. Raises `KVHavenError` if it
        has none for needed ones.
        """
        part, size = self._parts[other.part], state.chunk_size
        stored, per_chunk = part.stored_blocks(size), size // part.block_size
        start_block, end_block = offer.start // part.block_size, end // part.block_size
        needed = max(start_block, part.first_token(end) // part.block_size)
        groups = []
        for group in part.groups:
            ids = state.blocks[group]
            if NULL_BLOCK in ids[needed:end_block] or len(ids) < end_block:
                raise KVHavenError(
                    f"request {state.request.request_id}: the engine has no blocks of KV group "
                    f"{group} for tokens {needed * part.block_size} to {end}, which it loads"
                )
            groups.append(
                tuple(
                    tuple(
                        ids[at] if at >= start_block and ids[at] != NULL_BLOCK else SKIP
                        for at in range((chunk + 1) * per_chunk - stored, (chunk + 1) * per_chunk)
                    )
                    for chunk in other.chunks
                )
            )
        return LoadJob(
            request_id=state.request.request_id,
            lease_id=other.lease.lease_id,
            service=other.lease.service,
            places=tuple(other.lease.extents),
            shard_offsets=other.lease.offsets,
            blocks=tuple(groups),
            asynchronous=self._asynchronous,
            adapter=state.adapter,
            part=other.part,
        )
