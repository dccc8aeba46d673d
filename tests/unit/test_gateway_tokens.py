# SPDX-License-Identifier: Apache-2.0
"""Tokens by source and by reason of a miss, in real services, as the API shows them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvhaven.catalog.actions import TierName
from kvhaven.client.control import connect
from kvhaven.client.scheduler import Asking
from kvhaven.keys import tenant_id
from kvhaven.protocol import Hello, Release, Status, encode
from kvhaven.testing.faulty_tier import Faults
from tests.crash.engine import CHUNK_SIZE, EXTENT_BYTES, Engine, prompt
from tests.crash.node import MIB, NodeThread, eventually, flush
from tests.crash.raw import Raw

pytest.importorskip("aiohttp", reason="kvhaven[api] is not installed")

from kvhaven.gateway.tenants import TenantBytes, largest
from tests.gateway_kit import FaultyNode, GatewayThread, tiered_node
from tests.metrics_kit import samples_of, summed

DISK = TierName("disk")


@pytest.fixture
def node(short_dir: Path) -> Iterator[NodeThread]:
    with tiered_node(short_dir) as node:
        yield node


@pytest.fixture
def api(node: NodeThread) -> Iterator[GatewayThread]:
    with GatewayThread(node.address) as api:
        eventually(lambda: api.health() == (200, "ok"))
        yield api


def last_request(api: GatewayThread) -> dict[str, Any]:
    """Return the newest request."""
    row: dict[str, Any] = api.get("/v1/requests?limit=1").json["rows"][0]
    return row


def looked_up(
    engine: Engine, api: GatewayThread, keys: list[Any], about: Asking, **how: Any
) -> dict[str, Any]:
    """Look up chunks as a request, give the lease back, and return the request's row."""
    lease = engine.scheduler.acquire(keys, about=about, **how)
    if lease is not None:
        engine.scheduler.client.release([lease.lease_id])
    row: dict[str, Any] = eventually(lambda: _named(api, about.request))
    return row


def _named(api: GatewayThread, request: str) -> dict[str, Any] | None:
    rows = api.get("/v1/requests").json["rows"]
    return next((row for row in rows if row["request"] == request), None)


def scrape(api: GatewayThread, ready: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    """Return the missed tokens by reason of the first scrape that is ready."""

    def missed() -> dict[str, float] | None:
        found = samples_of(api.get("/metrics").body.decode())
        reasons = summed(found, "kvhaven_missed_tokens_total", "reason")
        return reasons if ready(reasons) else None

    return eventually(missed)


def test_tokens_are_counted_by_where_they_were(node: NodeThread, api: GatewayThread) -> None:
    keys = prompt("a", 4)
    with Engine(node.address) as engine:
        engine.save(keys)
        flush(node.address)
        # 4 chunks and 3 tokens behind them; the engine has 12 tokens, 2 of chunk 1.
        row = looked_up(engine, api, keys[1:], Asking(43, 12, "memory"))
        assert row["by_source"] == {"engine": 12, "memory": 28, "none": 3}
        assert row["missed"] == {"partial_chunk": 3}
        assert (row["first_gap"], row["reason"]) == (40, "partial_chunk")
        with connect(node.address) as control:
            control.clear(tier="memory")
        row = looked_up(engine, api, keys, Asking(40, 0, "disk"))
        assert row["by_source"] == {"disk": 40}
        assert (row["first_gap"], row["reason"]) == (None, None)
        with connect(node.address) as control:
            control.clear(tier="memory")
            control.clear(tier="disk")
        row = looked_up(engine, api, keys, Asking(40, 0, "share"))
        assert row["by_source"] == {"fs": 40}
        row = looked_up(engine, api, [*keys[:2], *prompt("b", 3)], Asking(50, 0, "cold"))
        assert row["by_source"] == {"memory": 20, "none": 30}
        assert (row["missed"], row["first_gap"]) == ({"cold": 30}, 20)
        assert row["prompt_tokens"] == 50
        assert row["wait_ms"] >= 0
    tokens = eventually(lambda: _of_asked(api, 173))
    assert tokens["by_source"] == {
        "engine": 12, "memory": 48, "disk": 40, "fs": 40, "none": 33,
    }  # fmt: skip
    assert {k: v for k, v in tokens["missed_by_reason"].items() if v} == {
        "partial_chunk": 3,
        "cold": 30,
    }
    found = samples_of(api.get("/metrics").body.decode())
    assert summed(found, "kvhaven_lookups_total", "result") == {"hit": 3, "partial": 1, "miss": 0}
    assert sum(found["kvhaven_saved_tokens_total"].values()) == 4 * CHUNK_SIZE
    assert summed(found, "kvhaven_tier_bytes_total", "tier", op="read")["disk"] == 4 * EXTENT_BYTES
    assert sum(found["kvhaven_promotion_wait_seconds_count"].values()) == 3


def test_requests_are_found_by_engine_tenant_and_reason(
    node: NodeThread, api: GatewayThread
) -> None:
    tenant, count = tenant_id("ann"), 130
    with Engine(node.address) as engine:
        engine.save(prompt("a", 2))
        for number in range(count):
            keys = prompt("a", 2) if number % 2 else prompt(number, 1)
            engine.scheduler.acquire(keys, about=Asking(23, 0, f"n{number}"))
        looked_up(engine, api, prompt("b", 2), Asking(20, 0, "ann"), tenant=tenant)
    every = api.get("/v1/requests?limit=100").json
    every["rows"] += api.get(f"/v1/requests?limit=100&cursor={every['next']}").json["rows"]
    assert len(every["rows"]) == count + 1

    def found(query: str, limit: int) -> list[str]:
        """Return the ids of all rows of a query, page by page."""
        rows, cursor = [], ""
        while cursor is not None:
            page = api.get(f"/v1/requests?limit={limit}&cursor={cursor}&{query}").json
            assert len(page["rows"]) <= limit
            rows += [row["id"] for row in page["rows"]]
            cursor = page["next"]
        return rows

    def kept(name: str, value: str) -> list[str]:
        rows = [row for row in every["rows"] if value in {row.get(name)} | row["missed"].keys()]
        return [row["id"] for row in rows]

    assert len(kept("reason", "cold")) == count // 2 + 1
    for limit in (100, 7):
        for reason in ("cold", "partial_chunk", "evicted"):
            assert found(f"reason={reason}", limit) == kept("reason", reason)
        assert found(f"tenant={tenant.hex()}", limit) == kept("tenant", tenant.hex())
        assert found("tenant=", limit) == kept("tenant", "")
        assert found("engine=engine%231", limit) == kept("engine", "engine#1")
        assert found("engine=engine%231&reason=cold&tenant=", limit) == kept("reason", "cold")[1:]
        assert found("engine=other", limit) == []
    assert api.get("/v1/requests?reason=unlucky").status == 400


def test_connections_that_break_the_protocol_are_counted(
    node: NodeThread, api: GatewayThread
) -> None:
    def errors() -> float:
        found = samples_of(api.get("/metrics").body.decode())
        return found["kvhaven_protocol_errors_total"][frozenset()]

    with Engine(node.address):
        assert errors() == 0
    with Raw(node) as raw:
        raw.say(Hello()).raw(encode(Status(1))[:-3])  # it only goes away
    for broken in (b"GET / HTTP/1.1\r\n\r\n", encode(Hello()) + encode(Release(1, [1]))):
        with Raw(node) as raw:
            raw.raw(broken)
            assert raw.is_closed()
    eventually(lambda: errors() == 2)


def test_tokens_that_could_not_be_saved_are_counted(node: NodeThread, api: GatewayThread) -> None:
    def skipped() -> dict[str, float]:
        return summed(
            samples_of(api.get("/metrics").body.decode()), "kvhaven_skipped_tokens_total", "reason"
        )

    tenant = tenant_id("ann")
    with Engine(node.address, 2) as engine:
        engine.save(prompt("free", 3))
        assert skipped() == {"quota": 0, "space": 0, "draining": 0}
        with connect(node.address) as control:
            control.limit(tenant, memory=2 * 2 * EXTENT_BYTES)
        engine.save(prompt("limited", 5), tenant=tenant)
        eventually(lambda: skipped() == {"quota": 30, "space": 0, "draining": 0})
        node.call(lambda: setattr(node.service._saves, "draining", True))
        engine.save(prompt("drained", 4))
        eventually(lambda: skipped() == {"quota": 30, "space": 0, "draining": 40})


def test_the_largest_tenants_are_named(api: GatewayThread, node: NodeThread) -> None:
    with Engine(node.address) as engine:
        for name in ("ann", "ben"):
            engine.save(prompt(name, 3), tenant=tenant_id(name))
        flush(node.address)
        with GatewayThread(node.address) as later:

            def shown() -> dict[str, float]:
                found = samples_of(later.get("/metrics").body.decode())
                return summed(found, "kvhaven_tenant_bytes", "tenant", place="memory")

            eventually(lambda: later.health() == (200, "ok"))
            expected = {tenant_id(name).hex(): 3 * EXTENT_BYTES for name in ("ann", "ben")}
            eventually(lambda: shown() == expected)


def test_other_tenants_are_summed() -> None:
    many = [TenantBytes(f"{n:02}", {"memory": n, "disk": 2 * n}) for n in range(30)]
    found = largest(many)
    assert [tenant.id for tenant in found] == [*(f"{n:02}" for n in range(29, 9, -1)), "other"]
    assert found[-1].bytes == {"memory": 45, "disk": 90}
    assert largest(many[:20]) == many[19::-1]


def _of_asked(api: GatewayThread, asked: int) -> dict[str, Any] | None:
    tokens: dict[str, Any] = api.get("/stats").json["tokens"]
    return tokens if tokens["asked"] == asked else None


def test_repeated_lookups_of_a_request_and_prefetches_do_not_count(
    node: NodeThread, api: GatewayThread
) -> None:
    with Engine(node.address) as engine:
        keys = prompt("a", 2)
        engine.save(keys)
        client = engine.scheduler.client
        client.prefetch(keys)
        again = client.ask(keys)
        assert again is not None
        eventually(lambda: client.look_up(again) is not None)
        assert client.count(Asking(7, 7, "whole in the engine"))
        row = eventually(lambda: _named(api, "whole in the engine"))
        assert row["by_source"] == {"engine": 7}
        tokens = eventually(lambda: _of_asked(api, 7))
        assert tokens["by_source"]["engine"] == 7


def test_an_evicted_chunk_is_told_from_one_that_never_was(
    short_dir: Path,
) -> None:
    settings = {"max_local_cpu_size": MIB, "local_disk": None, "remote_url": None}
    with NodeThread(short_dir / "s.sock", **settings) as node, GatewayThread(node.address) as api:
        eventually(lambda: api.health() == (200, "ok"))
        with Engine(node.address) as engine:
            keys = prompt("old", 8)
            engine.save(keys)
            room = node.status().catalog.capacity_bytes // EXTENT_BYTES
            for number in range(3):
                engine.save(prompt(f"new {number}", room // 2))
            row = looked_up(engine, api, [*keys, *prompt("x", 2)], Asking(100, 0, "gone"))
            assert row["reason"] == "evicted"
            assert row["missed"] == {"evicted": 80, "cold": 20}
            reasons = scrape(api, lambda found: found.get("evicted", 0) > 0)
            assert reasons["evicted"] == 80
            found = samples_of(api.get("/metrics").body.decode())
            ages = summed(found, "kvhaven_residence_seconds_count", "reason")
            evicted = summed(found, "kvhaven_evicted_chunks_total", "reason", place="memory")
            assert ages["space"] == evicted["space"] >= 8
        node.check()


@pytest.mark.parametrize(
    ("faults", "reason"), [(Faults(stall=1), "late"), (Faults(flip=1), "damaged")]
)
def test_a_chunk_that_cannot_be_read_in_time_or_at_all(
    short_dir: Path, faults: Faults, reason: str
) -> None:
    settings = {"local_disk": str(short_dir / "disk"), "remote_url": None}
    with (
        FaultyNode(short_dir / "s.sock", **settings) as node,
        GatewayThread(node.address) as api,
        Engine(node.address) as engine,
    ):
        eventually(lambda: api.health() == (200, "ok"))
        engine.scheduler.client._promote_deadline_s = 0.2
        keys = prompt("a", 3)
        engine.save(keys)
        flush(node.address)
        with connect(node.address) as control:
            control.clear(tier="memory")
        node.disk._faults = faults
        row = looked_up(engine, api, keys + prompt("never", 2), Asking(50, 0, "bad"))
        assert row["by_source"] == {"none": 50}
        assert row["reason"] == reason
        assert row["missed"] == {reason: 30, "cold": 20}
        assert row["wait_ms"] >= (200 if reason == "late" else 0)


def test_a_quota_is_the_reason_of_what_it_kept_out(short_dir: Path) -> None:
    tenant = tenant_id("ann")
    settings = {"local_disk": None, "remote_url": None}
    with NodeThread(short_dir / "s.sock", **settings) as node, GatewayThread(node.address) as api:
        eventually(lambda: api.health() == (200, "ok"))
        with Engine(node.address) as engine:
            with connect(node.address) as control:
                control.limit(tenant, memory=2 * EXTENT_BYTES)
            engine.save(prompt("first", 2), tenant=tenant)
            engine.save(prompt("second", 2), tenant=tenant)
            keys = prompt("first", 2)
            row = looked_up(engine, api, keys, Asking(20, 0, "quota"), tenant=tenant)
            assert row["missed"] == {"quota": 20}
            assert row["tenant"] == tenant.hex()
        node.check()
