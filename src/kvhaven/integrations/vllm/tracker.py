# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's side knows of one request."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvhaven.client.scheduler import Lease
from kvhaven.config import Settings
from kvhaven.errors import KVHavenError
from kvhaven.keys import Extras, KeyChain, MediaItem

if TYPE_CHECKING:
    from vllm.v1.request import Request

_PREFIXES = ("kvhaven.", "lmcache.")


@dataclass(frozen=True)
class Permissions:
    """What may be done for a request, and how it is labelled."""

    load: bool
    save: bool
    tags: tuple[str, ...] = ()


NOTHING = Permissions(load=False, save=False)


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

    @property
    def end_chunk(self) -> int:
        """The index of the chunk after the lease's last one."""
        return self.first_chunk + len(self.lease.extents)


class Tracker:
    """One request: its keys, its blocks, what it leased, and what of it was saved.

    `blocks[group]` are its block ids in order, as of its last admission. `planned_chunks`
    counts the chunks, from the first on, that a save was planned for, or need none.
    """

    def __init__(self, request: "Request", permissions: Permissions, chain: KeyChain) -> None:
        self.request = request
        self.permissions = permissions
        self.chain = chain
        self.turn: float = request.arrival_time
        """Changes when a streaming session gets its next input."""
        self.blocks: list[list[int]] = []
        self.planned_chunks = 0
        self.counted = False
        """Whether its look-up is in the statistics: one request counts once."""
        self.computed = 0
        """Tokens that the engine's own cache had when it asked last."""
        self.ticket: int | None = None
        self.ticket_chunk = 0
        self.ask_after = 0.0
        """A miss is remembered until then, so that a request that waits does not ask each step."""
        self.waits_since: float | None = None
        """Since when it waits for another request's load of the same chunk."""
        self.offer: Offer | None = None
        self.loaded: Offer | None = None
        """The offer that was taken last; its tokens came from the cache."""

    def extend_keys(self, tokens: int) -> None:
        """Hash the full chunks of the first `tokens` tokens. Raises `KeyInputError`."""
        size = self.chain.chunk_size
        if tokens // size > len(self.chain.keys):
            ids = self.request._all_token_ids  # noqa: SLF001 - its public view is slower
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
            per_chunk = self.chain.chunk_size // size
            blocks = tuple(group[chunk * per_chunk : (chunk + 1) * per_chunk])
            if len(blocks) < per_chunk:
                raise KVHavenError(
                    f"request {self.request.request_id}: chunk {chunk} is complete, but of its "
                    f"{per_chunk} blocks {len(blocks)} are known"
                )
            result.append(blocks)
        return result

    def follow_session(self, lora_fingerprint: Callable[[str], str]) -> None:
        """Hash anew what a streaming session's last input changed.

        It drops the last sampled token and may bring media. Chunks that are the same as
        before need not be saved again.
        """
        request = self.request
        if not getattr(request, "resumable", False) or request.arrival_time == self.turn:
            return
        self.turn = request.arrival_time
        before = self.chain.keys
        extras = extras_of(request, lora_fingerprint)
        self.chain = KeyChain(self.chain.root, self.chain.chunk_size, extras)
        self.extend_keys(request.num_tokens)
        pairs = zip(before, self.chain.keys, strict=False)
        same = next((i for i, (old, new) in enumerate(pairs) if old != new), len(self.chain.keys))
        self.planned_chunks = min(self.planned_chunks, same, len(before))


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
    if settings.force_skip_save or _is_on(_parameter(parameters, "skip_save")):
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


def _is_on(value: Any) -> bool:
    """Return whether a switch is on; JSON clients also write it as text."""
    if isinstance(value, str):
        return value.strip().lower() in {"true", "1", "yes", "on"}
    return bool(value)
