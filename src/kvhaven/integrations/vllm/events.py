# SPDX-License-Identifier: Apache-2.0
"""KV events in vLLM's format, which announce this engine's cached chunks to routers."""

from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, BlockStored, KVCacheEvent

from kvhaven.engine.jobs import SaveJob
from kvhaven.integrations.vllm.requests import VllmRequest
from kvhaven.types import ChunkKey

_EVENTS_MOST = 100_000


class StoredEvents:
    """Produces a `BlockStored` event for each run of chunks that all ranks have written.

    A "block" of these events is a chunk: its hash is the chunk's key, `block_size` the chunk's
    tokens, and the medium CPU. `BlockRemoved` is never sent, as the service evicts chunks without
    notifying engines, so a router must treat these events as hints. Chunks that other engines
    stored are not announced.
    """

    def __init__(self, chunk_size: int) -> None:
        self._chunk_size = chunk_size
        self._planned: dict[int, list[BlockStored]] = {}
        self._events: list[KVCacheEvent] = []

    def planned(self, job: SaveJob, request: VllmRequest, first_chunk: int) -> None:
        """Prepare the events of a save; `first_chunk` is the index of its first chunk."""
        parent = job.parent
        events = []
        for chunk, key in enumerate(job.keys, first_chunk):
            events.append(self._event(request.raw, chunk, key, parent))
            parent = key
        self._planned[job.id] = events

    def saved(self, job: SaveJob, unwritten: set[int]) -> None:
        """Queue the events of a save that all ranks reported, except for `unwritten` chunks."""
        stored: list[BlockStored] = []
        for index, event in enumerate(self._planned.pop(job.id, ())):
            if index in unwritten:
                continue
            if stored and stored[-1].block_hashes[-1] == event.parent_block_hash:
                last = stored[-1]
                last.block_hashes += event.block_hashes
                last.token_ids += event.token_ids
                last.extra_keys = _joined(last, event)
            else:
                stored.append(event)
        if len(self._events) + len(stored) <= _EVENTS_MOST:
            self._events += stored

    def forget(self, job: SaveJob) -> None:
        """Drop the events of a save that will not be reported any more."""
        self._planned.pop(job.id, None)

    def take(self) -> list[KVCacheEvent]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def _event(
        self, request: Any, chunk: int, key: ChunkKey, parent: ChunkKey | None
    ) -> BlockStored:
        size = self._chunk_size
        extras = _extra_keys(request, chunk * size, (chunk + 1) * size)
        lora = request.lora_request
        return BlockStored(
            block_hashes=[key],
            parent_block_hash=parent,
            token_ids=list(request._all_token_ids[chunk * size : (chunk + 1) * size]),  # noqa: SLF001
            block_size=size,
            lora_id=lora.lora_int_id if lora is not None else None,
            medium=MEDIUM_CPU,
            lora_name=lora.lora_name if lora is not None else None,
            extra_keys=[extras] if extras is not None else None,
            group_idx=0,
            locality="LOCAL",
        )


def _extra_keys(request: Any, start: int, end: int) -> tuple[Any, ...] | None:
    """Return the extra keys of a chunk, besides its tokens, in the form of vLLM's events."""
    extras: list[Any] = []
    if request.lora_request is not None:
        extras.append(request.lora_request.lora_name)
    for feature in request.mm_features:
        offset, length = feature.mm_position.offset, feature.mm_position.length
        if offset < end and offset + length > start:
            extras.append((feature.identifier, offset - start))
    if start == 0 and request.cache_salt:
        extras.append(request.cache_salt)
    return tuple(extras) or None


def _joined(first: BlockStored, second: BlockStored) -> list[tuple[Any, ...] | None] | None:
    """Return the extra keys of two events, one entry per chunk.

    `first` already has the hash of one more chunk.
    """
    if first.extra_keys is None and second.extra_keys is None:
        return None
    before = first.extra_keys or [None] * (len(first.block_hashes) - 1)
    return [*before, *(second.extra_keys or [None])]
