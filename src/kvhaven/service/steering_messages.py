# SPDX-License-Identifier: Apache-2.0
"""Requests and answers of steering, as JSON: what operators ask and change.

Every request is a struct with its name under `do`. `Changes`, `PinRow` and `JobRow` are answers,
too.
"""

from typing import Annotated, Final

import msgspec

from kvhaven.protocol import MOST_KEYS, Quota
from kvhaven.service.jobs import JobRow
from kvhaven.service.pins import PinRow
from kvhaven.service.tier_runner import TierSwitch
from kvhaven.types import KEY_BYTES, TENANT_BYTES

MOST_TTL_S: Final = 30 * 86400.0
MOST_WAIT_S: Final = 3600.0
MOST_AGE_S: Final = 365 * 86400

Seconds = Annotated[float, msgspec.Meta(ge=0, le=MOST_WAIT_S)]
Ttl = Annotated[float, msgspec.Meta(gt=0, le=MOST_TTL_S)]
Age = Annotated[float, msgspec.Meta(ge=1, le=MOST_AGE_S)]
Keys = Annotated[bytes, msgspec.Meta(max_length=MOST_KEYS * KEY_BYTES)]


class Request(
    msgspec.Struct,
    frozen=True,
    tag_field="do",
    forbid_unknown_fields=True,
    omit_defaults=True,
    kw_only=True,
):
    """Base class of requests.

    With `dry_run`, a change is checked, refused and answered as without it, and nothing changes:
    the answer says what the change would do now. Questions change nothing anyway. It is left out
    otherwise, so that an older service refuses dry runs, and the quotas that it knows as `Limit`.
    """

    dry_run: bool = False


class GetConfig(Request, frozen=True, tag="config"):
    """All settings."""


class Configure(Request, frozen=True, tag="configure"):
    """Change settings; see `RuntimeSettings.change`, and its `persist`."""

    values: dict[str, str | int | float | bool | dict[str, str | int | float | None] | None]
    version: str | None = None
    persist: bool = False


class OnChain(Request, frozen=True):
    """Request about the full chunks of a prompt: consecutive keys of 32 bytes."""

    namespace: bytes
    keys: Keys
    tenant: bytes = b""


class LookUp(OnChain, frozen=True, tag="lookup"):
    """Where the chunks are, without promoting them."""


class GetChunk(OnChain, frozen=True, tag="chunk"):
    """State of one chunk: `keys` has its key."""


class ChainJob(OnChain, frozen=True):
    """Request whose job works on the chunks."""


class Promote(ChainJob, frozen=True, tag="prefetch"):
    """Promote the chunks to memory, as a job."""


class Verify(ChainJob, frozen=True, tag="verify"):
    """Verify the checksums of the chunks in memory, as a job."""


class Move(ChainJob, frozen=True, tag="move", kw_only=True):
    """Write the chunks to a tier, as a job."""

    to: str


class PinChain(OnChain, frozen=True, tag="pin", kw_only=True):
    """Pin the chunks for `ttl_s` seconds."""

    ttl_s: Ttl


class Unpin(Request, frozen=True, tag="unpin"):
    """End a pin."""

    id: str


class SwitchTier(Request, frozen=True, tag="tier"):
    """Switch a tier on, off, or to reads only."""

    tier: str
    state: TierSwitch


class SetQuotas(Request, frozen=True, tag="quotas"):
    """Set the quotas of a tenant in bytes; `NO_LIMIT`: no quota, None: unchanged."""

    tenant: Annotated[bytes, msgspec.Meta(max_length=TENANT_BYTES)]
    memory: Quota | None
    disk: Quota | None


class FlushAll(Request, frozen=True, tag="flush"):
    """Wait until all resident chunks are written, as a job."""

    wait_s: Seconds


class Drain(Request, frozen=True, tag="drain"):
    """Accept no new engine and save nothing more, and flush, as a job; `on` false: undo."""

    on: bool
    wait_s: Seconds


class DropUnused(Request, frozen=True, tag="drop_unused"):
    """Drop chunks without a use in the last `older_than_s` seconds, as a job.

    Those of a namespace (digest; empty: of all), of a tenant (empty: of all) and of a tier (empty:
    memory and the local tiers).
    """

    older_than_s: Age
    namespace: bytes = b""
    tier: str = ""
    tenant: Annotated[bytes, msgspec.Meta(max_length=TENANT_BYTES)] = b""


class GetJob(Request, frozen=True, tag="job"):
    """A job by its id."""

    id: str


AnyRequest = (
    GetConfig
    | Configure
    | LookUp
    | Promote
    | Verify
    | Move
    | PinChain
    | Unpin
    | SwitchTier
    | SetQuotas
    | FlushAll
    | Drain
    | DropUnused
    | GetJob
    | GetChunk
)


class Refusal(msgspec.Struct, frozen=True):
    """The reason why a request failed, as the HTTP API answers it."""

    error: str


class Found(msgspec.Struct, frozen=True):
    """Where the tokens of a prompt are, from its head to the first gap.

    `first_gap` is the index of the first token that is nowhere, and `reason` why; None if the whole
    prompt is cached. `by_place` has memory and the names of tiers.
    """

    tokens: int
    cached_tokens: int
    by_place: dict[str, int]
    first_gap: int | None
    reason: str | None
    chunks: list[str] | msgspec.UnsetType = msgspec.UNSET
    """Ids of all full chunks of the prompt, if the request asks for them."""


class ChunkRow(msgspec.Struct, frozen=True):
    """A chunk: its bytes by place, and its leases, pins and ages if it is in memory.

    `writes` are the tiers that write it, or wait to; `age_s` is the time since it came to memory,
    and `idle_s` since its last use there.
    """

    id: str
    namespace: str
    tenant: str
    places: dict[str, int]
    leases: int
    pins: int
    writes: int
    age_s: float | None
    idle_s: float | None


class Dropped(msgspec.Struct, frozen=True):
    """Chunks that were dropped, or with `dry_run` would be. A chunk in two places counts twice."""

    chunks: int
    bytes: int
    dry_run: bool


class TierState(msgspec.Struct, frozen=True):
    """How a tier is switched, and how it was before; with `dry_run`, how it would be."""

    id: str
    state: TierSwitch
    was: TierSwitch
    dropped_writes: int
    """Waiting writes that are dropped for it."""
    unavailable_chunks: int | None
    """Chunks in the tier that are not found while it is off; null: of a shared tier, not known."""
    dry_run: bool


class TenantQuota(msgspec.Struct, frozen=True):
    """Quotas of a tenant in bytes, null without one, now and before, and its usage.

    With `dry_run`, what the quotas would be. The quota of `disk` is that of each local tier, and
    `disk_bytes` the usage of all together.
    """

    id: str
    memory: int | None
    disk: int | None
    memory_was: int | None
    disk_was: int | None
    memory_bytes: int
    disk_bytes: int
    memory_excess: int
    """Bytes above the quota before the change: chunks that are evicted once they are not in use."""
    disk_excess: int
    dry_run: bool


class EndedPin(PinRow, frozen=True, kw_only=True):
    """A pin that has ended; with `dry_run`, that would end."""

    dry_run: bool


class Drained(msgspec.Struct, frozen=True):
    """Whether the service is draining, and was before, and the job that flushes it.

    With `dry_run`, whether it would be. `engines` are attached, and stay so; while the service
    drains they save nothing, except what they have begun: `reserved_bytes`. `outstanding_writes`
    wait to be written to tiers now, or are being written.
    """

    draining: bool
    was: bool
    engines: int
    reserved_bytes: int
    outstanding_writes: int
    job: JobRow | None
    dry_run: bool
