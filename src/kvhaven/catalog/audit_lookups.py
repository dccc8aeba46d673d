# SPDX-License-Identifier: Apache-2.0
"""Audits what is asked of shared tiers: every question is somebody's, and nobody waits in vain."""

from collections import Counter

from kvhaven.catalog.actions import SessionId
from kvhaven.catalog.leases import MOST_PREFETCHED, Leases, named
from kvhaven.catalog.presence import LOOKUP_SHARDS, MOST_KNOWN, MOST_PENDING, Presence
from kvhaven.catalog.sessions import Lease, Sessions
from kvhaven.catalog.tiering import Tiers


def check_lookups(sessions: Sessions, tiers: Tiers, leases: Leases, *, at_rest: bool) -> None:
    """Raise AssertionError that names the first invariant that does not hold."""
    homes = {*sessions.sessions.values(), *leases.leaving}
    everyone = [lease for home in homes for lease in home.leases.values()]
    for lease in (*everyone, *leases.prefetches):
        _check_lease(lease, tiers, prefetch=lease in leases.prefetches, at_rest=at_rest)
    for prefetch in leases.prefetches:
        assert not prefetch.slots, "a prefetch pins chunks"
        assert prefetch.lookups or prefetch.growing, "a prefetch waits for nothing"
    chunks = Counter[SessionId]()
    for prefetch in leases.prefetches:
        chunks[prefetch.session] += named(prefetch)
    assert chunks == leases.prefetched, "what prefetches name is miscounted"
    assert max(chunks.values(), default=0) <= MOST_PREFETCHED, "too many prefetches wait"
    known = {id(lease) for lease in (*everyone, *leases.prefetches)}
    for presence in tiers.shared.values():
        _check_presence(presence, known)
    for name, tier in tiers.indexes.items():
        few = tier.reading_bytes <= leases.tier_limit(tier) or sum(tier.reads.values()) == 1
        assert few, f"tier {name} fills {tier.reading_bytes} bytes"


def _check_lease(lease: Lease, tiers: Tiers, *, prefetch: bool, at_rest: bool) -> None:
    name = f"lease {lease.ticket} of session {lease.session}"
    assert len(set(map(id, lease.lookups))) == len(lease.lookups), f"{name} waits twice"
    if lease.lookups:
        # A prefetch has let go of what comes before, so it asks for any of its chunks.
        wanted = () if prefetch else lease.keys[len(lease.slots) :]
        for lookup in lease.lookups:
            assert lease in lookup.waiting, f"{name} waits for an answer that nobody tells it of"
            right = not wanted or wanted[0] in lookup.keys
            assert right, f"{name} waits for an answer about other chunks"
            owners = [p for p in tiers.shared.values() if lookup.number in p.lookups]
            asked = any(p.lookups[lookup.number] is lookup and p.online for p in owners)
            told = not at_rest  # it hears of an answer, or that there is none, in its turn
            assert asked or told, f"{name} waits for a tier that was not asked, or is offline"


def _check_presence(presence: Presence, known: set[int]) -> None:
    name = presence.spec.name
    pending = {key: lookup for lookup in presence.lookups.values() for key in lookup.keys}
    assert pending == presence.pending, f"tier {name}: what it is asked for is miscounted"
    keys = sum(len(lookup.keys) for lookup in presence.lookups.values())
    assert keys == len(pending), f"tier {name} is asked for a chunk twice at a time"
    assert keys <= MOST_PENDING, f"tier {name} is asked for {keys} chunks at a time"
    assert len(presence.known) <= MOST_KNOWN, f"tier {name}: too many answers are remembered"
    for lookup in presence.lookups.values():
        most = max(1, LOOKUP_SHARDS // lookup.namespace.shards)
        assert len(lookup.keys) <= most, f"tier {name} is asked for too much in a batch"
        strangers = [lease for lease in lookup.waiting if id(lease) not in known]
        assert not strangers, f"tier {name}: an ended lease waits for an answer"
    for answer in presence.known.values():
        latest = presence.now + presence.spec.believe_s
        assert answer.until <= latest, f"tier {name} is believed until {answer.until} s"
