# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's side knows of one request."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvhaven.client.scheduler import Lease
from kvhaven.config import Settings
from kvhaven.keys import Extras, KeyChain, MediaItem

if TYPE_CHECKING:
    from vllm.v1.request import Request

_PREFIXES = ("kvhaven.", "lmcache.")


@dataclass(frozen=True)
class Permissions:
    """What may be done for a request, and how it is labelled."""

    load: bool
    save: bool
    tags: tuple[str, ...]


@dataclass(frozen=True)
class Offer:
    """A lease that the engine was told of: tokens `start` to `end` could be loaded.

    `first_chunk` is the index in the request's chain of the lease's first chunk.
    """

    lease: Lease
    first_chunk: int
    start: int
    end: int
    chunk_size: int


class Tracker:
    """One request: its keys, its blocks, what it leased, and what of it was saved.

    `blocks[group]` are its block ids in order. `planned_chunks` counts the chunks, from the
    first on, that are in the cache already or that a save was planned for.
    """

    def __init__(self, request: "Request", permissions: Permissions, chain: KeyChain) -> None:
        self.request = request
        self.permissions = permissions
        self.chain = chain
        self.blocks: list[list[int]] = []
        self.planned_chunks = 0
        self.ticket: int | None = None
        self.ticket_chunk = 0
        self.offer: Offer | None = None
        self.loaded: Offer | None = None
        """The offer that was taken last; its tokens came from the cache."""

    def extend_keys(self, tokens: int) -> None:
        """Hash the full chunks of the first `tokens` tokens."""
        size = self.chain.chunk_size
        if tokens // size > len(self.chain.keys):
            self.chain.extend(self.request._all_token_ids[:tokens])  # noqa: SLF001 - no copy

    def replace_blocks(self, blocks: Sequence[Sequence[int]]) -> None:
        """Take new block ids instead of the present ones: admitted, or resumed."""
        self.blocks = [list(group) for group in blocks]

    def append_blocks(self, blocks: Sequence[Sequence[int]]) -> None:
        """Take further block ids."""
        for present, added in zip(self.blocks, blocks, strict=True):
            present.extend(added)

    def chunk_blocks(self, chunk: int, block_sizes: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the block ids of a chunk, for each group."""
        result = []
        for group, size in zip(self.blocks, block_sizes, strict=True):
            per_chunk = self.chain.chunk_size // size
            result.append(tuple(group[chunk * per_chunk : (chunk + 1) * per_chunk]))
        return result


def permissions_of(request: "Request", settings: Settings) -> Permissions:
    """Return what may be done for a request, by the settings and its own parameters."""
    parameters: Mapping[str, Any] = request.kv_transfer_params or {}
    load = save = request.prompt_embeds is None
    sampling = request.sampling_params
    if sampling is not None and getattr(sampling, "prompt_logprobs", None) is not None:
        # The log-probabilities of cached prompt tokens would never be computed.
        load = False
    if getattr(request, "skip_reading_prefix_cache", False):
        load = False
    if settings.force_skip_save or _parameter(parameters, "skip_save"):
        save = False
    if settings.priority_limit is not None and request.priority > settings.priority_limit:
        save = False
    tags = _parameter(parameters, "tags") or ()
    if isinstance(tags, str):
        tags = (tags,)
    return Permissions(load, save, tuple(str(tag) for tag in tags))


def extras_of(request: "Request", lora_fingerprint: Callable[[str], str]) -> Extras:
    """Return what determines a request's KV besides its tokens."""
    lora = request.lora_request
    return Extras(
        lora=lora_fingerprint(lora.lora_path) if lora is not None else "",
        salt=request.cache_salt or "",
        items=tuple(
            MediaItem(feature.identifier, feature.mm_position.offset, feature.mm_position.length)
            for feature in request.mm_features
        ),
    )


def _parameter(parameters: Mapping[str, Any], name: str) -> Any:
    for prefix in _PREFIXES:
        if prefix + name in parameters:
            return parameters[prefix + name]
    return None
