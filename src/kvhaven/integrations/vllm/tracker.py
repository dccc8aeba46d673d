# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's side knows of one request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvhaven.client.scheduler import Lease
from kvhaven.config import Settings
from kvhaven.errors import KVHavenError
from kvhaven.integrations.vllm.adapters import AdapterUse
from kvhaven.integrations.vllm.extras import KnownExtras, PendingExtras, Turn
from kvhaven.integrations.vllm.media import Media
from kvhaven.integrations.vllm.metadata import LoadJob
from kvhaven.keys import KeyChain

if TYPE_CHECKING:
    from vllm.v1.request import Request

MOST_TAGS = 8
"""Tags of a request that are counted; further ones are left out."""
MOST_TAG_LENGTH = 64
"""Characters of a tag; the rest is cut off."""

_PREFIXES = ("kvhaven.", "lmcache.")


@dataclass(frozen=True)
class Permissions:
    """What may be done for a request, and how it is labelled."""

    load: bool
    save: bool
    tags: tuple[str, ...] = ()


NOTHING = Permissions(load=False, save=False)
EVERYTHING = Permissions(load=True, save=True)


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

    Nothing is permitted until `key` was called: without all extras its keys would name the KV of
    another request. `blocks[group]` are its block ids in order, as of its last admission.
    `planned_chunks` counts the chunks, from the first on, that a save was planned for, or need
    none.
    """

    def __init__(self, request: "Request", root: bytes, chunk_size: int) -> None:
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
        self.turn: Turn | None = None
        """The input that it was keyed for; a streaming session gets more."""
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
            per_chunk = self.chunk_size // size
            blocks = tuple(group[chunk * per_chunk : (chunk + 1) * per_chunk])
            if len(blocks) < per_chunk:
                raise KVHavenError(
                    f"request {self.request.request_id}: chunk {chunk} is complete, but of its "
                    f"{per_chunk} blocks {len(blocks)} are known"
                )
            result.append(blocks)
        return result


def permissions_of(request: "Request", settings: Settings, role: Permissions) -> Permissions:
    """Return what may be done for a request: by its engine's role, the settings, and itself."""
    parameters: Mapping[str, Any] = request.kv_transfer_params or {}
    embedded = request.prompt_embeds is not None
    load, save = role.load and not embedded, role.save and not embedded
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
    return Permissions(load, save, _tags(_parameter(parameters, "tags")))


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


def _tags(given: Any) -> tuple[str, ...]:
    """Return a request's tags: few, short, and fit for a line of a log."""
    if not isinstance(given, str | list | tuple):
        return ()
    texts = (given,) if isinstance(given, str) else given[:MOST_TAGS]
    return tuple(printable(str(text)[:MOST_TAG_LENGTH]) for text in texts)


def printable(text: str) -> str:
    r"""Return a text with what would end or colour a log line written as escapes (`\n`, `\x1b`)."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
