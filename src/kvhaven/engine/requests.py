# SPDX-License-Identifier: Apache-2.0
"""Interface for an engine's requests: their data, their permissions, their extras."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from kvhaven.config import Settings
from kvhaven.engine.adapters import AdapterUse, CacheName
from kvhaven.keys import Extras
from kvhaven.protocol import MOST_ADDRESS, MOST_NODE_NAME

MOST_TAGS = 8
"""Maximum number of counted tags per request; further ones are ignored."""
MOST_TAG_LENGTH = 64
"""Maximum length of a tag in characters; longer tags are truncated."""


@dataclass(frozen=True)
class Permissions:
    """Which transfers a request, or an engine, may make, and the labels of its lookups.

    `load` permits loading KV from the cache, `save` storing KV there. `tags` are counted in the
    statistics. `load_tokens` is the most tokens that are loaded; None: no limit.
    """

    load: bool
    save: bool
    tags: tuple[str, ...] = ()
    load_tokens: int | None = None


NOTHING = Permissions(load=False, save=False)
EVERYTHING = Permissions(load=True, save=True)


@dataclass(frozen=True)
class Transfer:
    """Part of a request that one node prefills and another decodes.

    The prefill node announces the request's chunks to the node at `to` (host:port), if it is set.
    On the decode node, `awaited` says that another node has prefilled the request: it waits up to
    `pd_wait_ms` for its chunks. `source` is the name of that node, if it is known.
    `handed` is set on the prefill node: another node will decode the request.

    Clients choose these texts. One that no message may have is dropped: it is too long, or contains
    unprintable characters, of which lone surrogates cannot be encoded.
    """

    to: str = ""
    awaited: bool = False
    source: str = ""
    handed: bool = False

    def __post_init__(self) -> None:
        """Drop an address, or a name, that no message may have."""
        for name, most in (("to", MOST_ADDRESS), ("source", MOST_NODE_NAME)):
            text: str = getattr(self, name)
            if len(text) > most or not text.isprintable():
                object.__setattr__(self, name, "")  # the only way in a frozen dataclass


NO_TRANSFER = Transfer()


class EngineRequest(Protocol):
    """One request, as the scheduler side reads it; it never writes attributes.

    An engine may pass a new object at each call: `request_id` identifies the request.
    """

    @property
    def request_id(self) -> str:
        """The id of the request, unique among the engine's running requests."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the output so far."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens, from the first on, whose KV is in the request's blocks."""

    @property
    def tokens(self) -> Sequence[int]:
        """All `num_tokens` token ids, each an unsigned 32-bit integer."""

    @property
    def permissions(self) -> Permissions:
        """The transfers that the request asks for; settings and engine role may forbid them."""

    @property
    def transfer(self) -> Transfer:
        """The request's part in prefill and decode on two nodes; usually `NO_TRANSFER`."""

    @property
    def priority(self) -> int:
        """Compared with the setting `priority_limit`; a larger number is less important."""

    @property
    def resumable(self) -> bool:
        """Whether the request may get more input after its output (a streaming session)."""

    @property
    def turn(self) -> Hashable:
        """A value that changes when a resumable request gets more input."""

    @property
    def adapter_name(self) -> CacheName:
        """The name of the request's adapter in the engine's prefix cache; empty without one."""


@dataclass
class Request:
    """Ready-made `EngineRequest` for engines without their own request class.

    The engine appends sampled tokens to `tokens` and increases `num_computed_tokens`.
    """

    request_id: str
    tokens: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    extras: Extras = field(default_factory=Extras)
    permissions: Permissions = EVERYTHING
    transfer: Transfer = NO_TRANSFER
    priority: int = 0
    resumable: bool = False
    turn: Hashable = 0
    adapter_name: CacheName = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the output so far."""
        return len(self.tokens)


class KeptState(NamedTuple):
    """A recurrent state that the engine keeps: `block` of a KV group has it after `tokens` tokens.

    It is complete after the step that it was reported for, until the block is reallocated.
    """

    group: int
    block: int
    tokens: int


class ScheduledRequest(NamedTuple):
    """A request in the step that the engine has just scheduled.

    `blocks[group]` are its additional block ids, or all of them if it `starts` (or resumes after
    a preemption) in this step; None means no additional ones. `computed` tokens have KV already;
    the step computes `scheduled` further tokens. `states` are those recurrent states that the
    engine keeps from this step on.
    """

    request_id: str
    blocks: Sequence[Sequence[int]] | None
    computed: int
    scheduled: int
    starts: bool = False
    states: Sequence[KeptState] = ()


class Media(Protocol):
    """The media of one request."""

    @property
    def settled(self) -> bool:
        """Whether blocks that this request shares cannot hold KV of other media."""

    def check(self) -> None:
        """Raise an exception unless the request's KV was computed with the media in its keys."""


class KnownExtras(NamedTuple):
    """Extras of a request, and the adapter and media that its KV is computed with."""

    extras: Extras
    adapter: AdapterUse | None = None
    media: Media | None = None


class PendingExtras(Protocol):
    """Extras of one request that may not be known yet."""

    @property
    def hashing(self) -> bool:
        """Whether media are being hashed, so that the extras will be known soon."""

    def poll(self) -> KnownExtras | None:
        """Return the extras, or None while they are not known.

        Raises an exception if they cannot be determined.
        """


class ExtrasSource(Protocol):
    """Source of requests' extras: everything besides tokens that determines KV. Never blocks.

    If a method raises, the request is not cached.
    """

    def note(self, request: Any, *, runs: bool = False) -> None:
        """Note a request that arrived, or that runs in this step (`runs`), cached or not."""

    def begin(self, request: Any) -> PendingExtras:
        """Start to determine a request's extras."""

    def weights_changed(self) -> None:
        """Note that the model's weights changed."""

    def adapter_changed(self) -> None:
        """Note that an adapter's content changed."""

    def encodings_dropped(self) -> None:
        """Note that the engine dropped its encodings of media."""

    def finished(self, request_id: str) -> None:
        """Forget a request."""

    def close(self) -> None:
        """Release threads and memory."""


class NoExtras:
    """Source of extras for engines without adapters and media.

    Reads the request's attribute `extras` (a `kvhaven.keys.Extras`), if it has one. It must hold
    everything that determines the request's KV besides tokens and namespace.
    """

    def note(self, request: Any, *, runs: bool = False) -> None:
        """Do nothing."""

    def begin(self, request: Any) -> PendingExtras:
        """Return the request's own extras."""
        return _GivenExtras(getattr(request, "extras", None) or Extras())

    def weights_changed(self) -> None:
        """Do nothing."""

    def adapter_changed(self) -> None:
        """Do nothing."""

    def encodings_dropped(self) -> None:
        """Do nothing."""

    def finished(self, request_id: str) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class _GivenExtras:
    extras: Extras
    hashing: bool = False

    def poll(self) -> KnownExtras:
        return KnownExtras(self.extras)


def permitted(request: EngineRequest, settings: Settings, role: Permissions) -> Permissions:
    """Return a request's permissions, restricted by the settings and by the engine's role."""
    asked = request.permissions
    save = role.save and asked.save and not settings.force_skip_save
    if settings.priority_limit is not None and request.priority > settings.priority_limit:
        save = False
    tags = tuple(printable(str(tag)[:MOST_TAG_LENGTH]) for tag in asked.tags[:MOST_TAGS])
    return Permissions(role.load and asked.load, save, tags, asked.load_tokens)


def printable(text: str) -> str:
    r"""Return a text with unprintable characters escaped (`\n`, `\x1b`), for use in a log line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
