# SPDX-License-Identifier: Apache-2.0
"""Answers of the HTTP API. `/openapi.json` describes them by their types and docstrings."""

from typing import Annotated, Literal

import msgspec

from kvhaven.gateway.reuse import Curve
from kvhaven.protocol import MOST_QUOTA
from kvhaven.service.accounts import RequestRow
from kvhaven.service.jobs import JobRow
from kvhaven.service.pins import PinRow
from kvhaven.service.snapshot import EngineRow, NamespaceRow, TenantRow
from kvhaven.service.steering_messages import Seconds, Ttl
from kvhaven.service.tier_runner import TierSwitch

GB = 1_000_000_000

State = Literal["ok", "degraded", "stopping"]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
QuotaBytes = Annotated[int, msgspec.Meta(ge=0, le=MOST_QUOTA)]


class Problem(msgspec.Struct, frozen=True):
    """The reason why a request failed."""

    error: str


class Check(msgspec.Struct, frozen=True):
    """One condition of health, and what is wrong if it is not `ok`."""

    name: str
    ok: bool
    detail: str = ""


class Health(msgspec.Struct, frozen=True):
    """Health of the service. `degraded`: some check failed, but engines are served or may be."""

    status: State
    checks: list[Check]


class ServiceRow(msgspec.Struct, frozen=True):
    """A service of this node. All paths of this API exist for it below `path`."""

    id: str
    """The name of its socket."""
    path: str
    address: str
    status: Literal["ok", "degraded", "stopping", "silent"]
    engines: int
    """Attached to it, when it last answered."""
    here: bool
    """Whether the answer comes from this service's part of the API."""


class Services(msgspec.Struct, frozen=True):
    """The services of this node; the first one is the one that the API was started for."""

    rows: list[ServiceRow]


class Chunks(msgspec.Struct, frozen=True):
    """Chunks that requests asked for, since the service started."""

    asked: int
    resident: int
    """In memory when they were asked for."""
    awaited: int
    """Being promoted from a tier, so that the request waited."""
    missed: int


class Memory(msgspec.Struct, frozen=True):
    """Host memory for chunks, in bytes; the states are disjoint and sum to `capacity`."""

    capacity: int
    free: int
    idle: int
    """Chunks that no process uses."""
    leased: int
    pinned: int
    """Pinned through this API."""
    promoting: int
    reserved: int
    quarantined: int
    """Reserved by processes that are lost and may still write."""
    doomed: int
    """Dropped chunks that a process may still access or a tier is still writing."""
    waste: int
    """Remainders of slabs, which no chunk can use."""


class Tokens(msgspec.Struct, frozen=True):
    """Prompt tokens of requests that were looked up, since the service started.

    `by_source` sums to `asked`, and `missed_by_reason` to the source `none`.
    """

    asked: int
    by_source: dict[str, int]
    missed_by_reason: dict[str, int]


class TierRow(msgspec.Struct, frozen=True):
    """A tier. The content of a shared tier is unknown to a service: None."""

    id: str
    shared: bool
    state: TierSwitch
    """How an operator has switched it."""
    write_mode: str
    """Treatment of writes now: behind, through or off."""
    online: bool
    writable: bool
    used_bytes: int | None
    capacity_bytes: int | None
    chunks: int | None
    queued_writes: int
    """Chunks that wait to be written, or are being written."""
    queued_write_bytes: int
    written: int
    dropped_writes: int
    reads: int
    """Shards read since start, as the next ones."""
    writes: int
    misses: int
    errors: int
    rejected: int
    last_error: str


class Stats(msgspec.Struct, frozen=True):
    """Statistics since the service started. Values that are not measured are null."""

    cache_hits: int
    """Chunks that requests asked for and that were resident or promoted for them."""
    cache_misses: int
    hit_rate: float | None
    """`cache_hits` as a fraction of the chunks asked for; null before the first request."""
    total_cached_tokens: int | None
    """Tokens of the chunks in memory; null if an engine does not name its chunk size, or if there
    are tails of engines with different chunk sizes."""
    storage_used_gb: float
    """Bytes in memory and in local tiers, in units of 10^9."""
    avg_prefill_time_ms: float | None
    avg_save_time_ms: float | None
    avg_load_time_ms: float | None
    chunks: Chunks
    memory: Memory
    tiers: list[TierRow]
    tokens: Tokens
    reuse: Curve | None
    """The reuse curve; null before the first request."""


class InferenceInfo(msgspec.Struct, frozen=True):
    """Attached engines."""

    engines: list[EngineRow]


class Engines(msgspec.Struct, frozen=True):
    """A page of engines. `next` is the cursor of the next page; null on the last one."""

    rows: list[EngineRow]
    next: str | None


class Namespaces(msgspec.Struct, frozen=True):
    """A page of namespaces. `next` is the cursor of the next page; null on the last one."""

    rows: list[NamespaceRow]
    next: str | None


class Tenants(msgspec.Struct, frozen=True):
    """A page of tenants. `next` is the cursor of the next page; null on the last one."""

    rows: list[TenantRow]
    next: str | None


class Tiers(msgspec.Struct, frozen=True):
    """A page of tiers. `next` is the cursor of the next page; null on the last one."""

    rows: list[TierRow]
    next: str | None


class Pins(msgspec.Struct, frozen=True):
    """A page of pins. `next` is the cursor of the next page; null on the last one."""

    rows: list[PinRow]
    next: str | None


class Jobs(msgspec.Struct, frozen=True):
    """A page of jobs. `next` is the cursor of the next page; null on the last one."""

    rows: list[JobRow]
    next: str | None


class PluginRow(msgspec.Struct, frozen=True):
    """A plugin. `error` says why its process ended last."""

    id: str
    kind: Literal["class", "script"]
    state: Literal["starting", "running", "waiting", "ended", "off"]
    """`waiting`: for its next start; `off`: it has failed too often."""
    pid: int | None
    starts: int
    queued_events: int
    error: str


class Plugins(msgspec.Struct, frozen=True):
    """A page of plugins. `next` is the cursor of the next page; null on the last one."""

    rows: list[PluginRow]
    next: str | None


TokenIds = Annotated[list[TokenId], msgspec.Meta(max_length=1 << 23)]


class Chain(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A prompt: its tokens or its text, and the engine or the namespace that they are for.

    A text is tokenized by the engine at `plugin_engine_url`, as `/v1/completions` does.
    `cache_salt` is that of the request. Prompts with LoRA adapters or media, and engines after a
    reset of their cache, have other keys.
    """

    token_ids: TokenIds = []
    text: str = ""
    engine: str = ""
    namespace: str = ""
    cache_salt: str = ""


class PinnedChain(Chain, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A prompt to pin for `ttl_s` seconds. `place` can only be memory."""

    ttl_s: Ttl
    place: Literal["memory"] = "memory"


class MovedChain(Chain, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A prompt whose chunks in memory are written to the tier `to`, or promoted to memory.

    They stay where they are as well.
    """

    to: str
    keep_source: Literal[True] = True


class NewState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`off`: not used at all. `read_only`: no writes; waiting writes are dropped."""

    state: TierSwitch


class Waiting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long to wait, in seconds."""

    wait_s: Seconds = 60.0


class NewDrain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`on`: refuse new engines and save nothing more; then wait for writes. false: undo."""

    on: bool = True
    wait_s: Seconds = 60.0


Values = dict[str, str | int | float | bool | dict[str, str | int | float | None] | None]
"""New values of settings by name, plain or with the prefix `lmcache.` or `kvhaven.`"""


class NewQuota(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Quotas of a tenant in bytes. null removes a quota; one that is left out does not change."""

    memory: QuotaBytes | msgspec.UnsetType | None = msgspec.UNSET
    disk: QuotaBytes | msgspec.UnsetType | None = msgspec.UNSET


class Requests(msgspec.Struct, frozen=True):
    """A page of the last 1,024 requests, newest first. `next` is the cursor of the next page."""

    rows: list[RequestRow]
    next: str | None
