# SPDX-License-Identifier: Apache-2.0
"""What an engine supplies about its requests, and what a request may do."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from kvhaven.config import Settings
from kvhaven.engine.adapters import AdapterUse, CacheName
from kvhaven.keys import Extras

MOST_TAGS = 8
"""Tags of a request that are counted; further ones are left out."""
MOST_TAG_LENGTH = 64
"""Characters of a tag; the rest is cut off."""


@dataclass(frozen=True)
class Permissions:
    """Which transfers a request, or an engine, may make, and the labels of its lookups.

    `load` permits loading KV from the cache, `save` storing KV there. `tags` are counted in the
    statistics.
    """

    load: bool
    save: bool
    tags: tuple[str, ...] = ()


NOTHING = Permissions(load=False, save=False)
EVERYTHING = Permissions(load=True, save=True)


class EngineRequest(Protocol):
    """One request, as the scheduler side reads it. Attributes are read, never written.

    An engine may pass a new object at each call: `request_id` identifies the request.
    """

    @property
    def request_id(self) -> str:
        """A name that no other running request of the engine has."""

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
        """What this request asks for; settings and the engine's role may permit less."""

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
        """The engine's own name for the request's adapter; empty for the base model."""


@dataclass
class Request:
    """A request of an engine that has no class of its own for it; fits `EngineRequest`.

    The engine appends to `tokens` as it samples, and counts `num_computed_tokens` up.
    """

    request_id: str
    tokens: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    extras: Extras = field(default_factory=Extras)
    permissions: Permissions = EVERYTHING
    priority: int = 0
    resumable: bool = False
    turn: Hashable = 0
    adapter_name: CacheName = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the output so far."""
        return len(self.tokens)


class ScheduledRequest(NamedTuple):
    """A request in the step that the engine has just scheduled.

    `blocks[group]` are its further block ids, or all of them if it `starts` (or resumes after a
    preemption) in this step; None: no further ones. `computed` tokens have KV already,
    `scheduled` further ones are computed in this step.
    """

    request_id: str
    blocks: Sequence[Sequence[int]] | None
    computed: int
    scheduled: int
    starts: bool = False


class Media(Protocol):
    """The media of one request."""

    @property
    def settled(self) -> bool:
        """Whether no other media can lie in blocks that this request shares."""

    def check(self) -> None:
        """Raise unless the request's KV is of the media that its keys name."""


class KnownExtras(NamedTuple):
    """The extras of a request, and the adapter and the media that its KV is computed with."""

    extras: Extras
    adapter: AdapterUse | None = None
    media: Media | None = None


class PendingExtras(Protocol):
    """The extras of one request, which may take a while to find out."""

    @property
    def hashing(self) -> bool:
        """Whether media are being hashed: the answer follows soon."""

    def poll(self) -> KnownExtras | None:
        """Return the extras, or None while they are not known. Raises what keeps them unknown."""


class ExtrasSource(Protocol):
    """Finds out what determines requests' KV besides their tokens. Never blocks.

    An exception from any method means that the request is not cached.
    """

    def note(self, request: Any, *, runs: bool = False) -> None:
        """Note a request that arrived, or that `runs` in this step, cached or not."""

    def begin(self, request: Any) -> PendingExtras:
        """Begin to find out a request's extras."""

    def weights_changed(self) -> None:
        """Note that the model's weights are others now."""

    def adapter_changed(self) -> None:
        """Note that an adapter's content is another now."""

    def encodings_dropped(self) -> None:
        """Note that the engine has dropped its encodings of media."""

    def finished(self, request_id: str) -> None:
        """Forget a request."""

    def close(self) -> None:
        """Release threads and memory."""


class NoExtras:
    """The extras of engines without adapters and media: `extras` of the request, if it has any.

    For such an engine a request's `extras` attribute (a `kvhaven.keys.Extras`) says all that
    determines its KV besides the tokens and the namespace.
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
    """Return what a request may do: what it asks for, within the settings and the engine's role."""
    asked = request.permissions
    save = role.save and asked.save and not settings.force_skip_save
    if settings.priority_limit is not None and request.priority > settings.priority_limit:
        save = False
    tags = tuple(printable(str(tag)[:MOST_TAG_LENGTH]) for tag in asked.tags[:MOST_TAGS])
    return Permissions(role.load and asked.load, save, tags)


def printable(text: str) -> str:
    r"""Return a text with what would end or colour a log line written as escapes (`\n`, `\x1b`)."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
