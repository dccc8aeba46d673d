# SPDX-License-Identifier: Apache-2.0
"""The catalog's figures, for status and metrics."""

import msgspec

from kvhaven.catalog.actions import MemberId, TierName
from kvhaven.types import NamespaceDigest, TenantId

MOST_TENANTS = 1000
"""There may be as many tenants as there are users; figures must fit into an answer."""


class Usage(msgspec.Struct, frozen=True, gc=False):
    """How much of something there is. In a tier, bytes include the shards' headers."""

    chunks: int = 0
    bytes: int = 0


class NamespaceStats(msgspec.Struct, frozen=True):
    """Where a namespace's chunks are, as far as is known. A chunk may be in several places."""

    fields: dict[str, str]
    memory: Usage
    tiers: dict[TierName, Usage]


class TenantStats(msgspec.Struct, frozen=True):
    """What a tenant has, and its quotas in bytes (None: none): of memory, and of each tier.

    In memory, what is being written or promoted counts too, and what is out of sight in use.
    """

    memory: Usage
    tiers: dict[TierName, Usage]
    memory_quota: int | None
    disk_quota: int | None


class TierStats(msgspec.Struct, frozen=True):
    """One tier, as the catalog sees it. What a shared one holds, it does not know: zeros."""

    online: bool
    shared: bool
    capacity_bytes: int
    used_bytes: int
    chunks: int
    reads: int
    """Reads under way."""
    outstanding_writes: int
    outstanding_write_bytes: int
    queued_writes: int
    queued_write_bytes: int
    written: int
    """Chunks written since start."""
    dropped_writes: int
    """Chunks not written since start: overload, evicted before their turn, failure, offline."""
    evictions: int
    looking_up: int
    """Chunks that a shared tier is asked for and has not answered."""
    looked_up: int
    """Chunks that it was asked for since start."""
    found: int
    """Chunks of these that it said to have, whole."""
    scanned: bool = True
    """Whether all is known that it holds from before the start. A shared one is asked instead."""


class CatalogStats(msgspec.Struct, frozen=True):
    """All figures of one moment; counters count chunks since start unless they say otherwise."""

    namespaces: dict[NamespaceDigest, NamespaceStats]
    tiers: dict[TierName, TierStats]
    sessions: int
    members: int
    capacity_bytes: int
    used_bytes: int
    pin_limit_bytes: int
    resident_chunks: int
    leases: int
    """Tickets that hold or await something."""
    leased_bytes: int
    promoting_bytes: int
    reserved_bytes: int
    """Reserved and still in sight; what was given up is in `doomed_bytes`."""
    doomed_bytes: int
    """Out of sight, but someone may still read or write it."""
    quarantined_bytes: int
    """Held by members whose connection closed and who are not proven gone."""
    quarantined_by: dict[MemberId, int]
    """The same by member; bytes that several hold are counted for each."""
    evictions: int
    commits: int
    """Shards committed."""
    refused_commits: int
    queued_writes: int
    """Chunks that wait to be written to a tier; what tiers are writing is not counted."""
    dropped_writes: int
    hit_chunks: int
    """Asked for and resident."""
    missed_chunks: int
    """Asked for, neither resident nor being promoted."""
    promoted_chunks: int
    failed_promotions: int
    foreign: int = 0
    """Requests that ended before a chunk which is here as another tenant's (a client's bug)."""
    unready: int = 0
    """Requests that ended before a chunk in memory that their engine's ranks are not ready for."""
    quota_evictions: int = 0
    """Of the evictions, those that made room within the tenant's own quota."""
    quota_refusals: int = 0
    """Chunks that were not saved or promoted because the tenant's quota had no room."""
    tenants: dict[TenantId, TenantStats] = {}
    """The tenants that have most, `MOST_TENANTS` of them."""
    more_tenants: int = 0
    """How many others have anything."""
