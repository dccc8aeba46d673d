# SPDX-License-Identifier: Apache-2.0
"""Dry runs of the API's changes: they change nothing, and say what the change then does."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvhaven.catalog import writebehind
from kvhaven.catalog.actions import TierName
from kvhaven.client.control import connect
from kvhaven.keys import tenant_id
from kvhaven.service import jobs, steering
from kvhaven.service.steering_messages import DropUnused, SwitchTier
from kvhaven.testing.faulty_tier import Faults
from kvhaven.tiers.format.header import stored_bytes
from tests.crash.engine import CHUNK_SIZE, EXTENT_BYTES, SHARD_BYTES, Engine, prompt
from tests.crash.node import NodeThread, eventually, flush

pytest.importorskip("aiohttp", reason="kvhaven[api] is not installed")

from tests.gateway_kit import (
    Answer,
    FaultyNode,
    GatewayThread,
    keys_of,
    post,
    send,
    state_at_rest,
    state_of,
    steerable,
    tiered_node,
    tokens_of,
)

SALT = "ann"
ANN = tenant_id(SALT)
DISK = TierName("disk")
STORED_BYTES = stored_bytes(SHARD_BYTES)


@pytest.fixture
def node(short_dir: Path) -> Iterator[NodeThread]:
    with tiered_node(short_dir) as node:
        yield node


@pytest.fixture
def api(node: NodeThread, short_dir: Path) -> Iterator[GatewayThread]:
    with steerable(node, short_dir) as api:
        yield api


@pytest.fixture
def engine(node: NodeThread) -> Iterator[Engine]:
    with Engine(node.address) as engine:
        yield engine


def dry_run(
    node: NodeThread, api: GatewayThread, method: str, path: str, body: object = None
) -> Answer:
    """Send the dry run of a change, which must change nothing. No write may be under way."""
    before = state_at_rest(node)
    answer = send(api, method, f"{path}?dry_run=true", body)
    assert state_of(node) == before
    return answer


def promised(
    node: NodeThread, api: GatewayThread, method: str, path: str, body: object = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the dry run of a change says, and the answer of the change."""
    dry = dry_run(node, api, method, path, body)
    assert (dry.status, dry.json["dry_run"]) == (200, True), dry.json
    real = send(api, method, path, body)
    assert real.status < 300, real.json
    return dry.json, real.json


def result_of(api: GatewayThread, job: dict[str, Any]) -> dict[str, Any]:
    """Return a job once it has ended."""

    def ended() -> dict[str, Any] | None:
        row: dict[str, Any] = api.get(f"/v1/jobs/{job['id']}").json
        return row if row["state"] != "running" else None

    row: dict[str, Any] = eventually(ended)
    return row


def chain(engine: Engine, tokens: list[int], **more: object) -> dict[str, object]:
    namespace = engine.ranks[0].attach.namespace.hex()
    return {"namespace": namespace, "token_ids": tokens} | more


def clear_memory(node: NodeThread) -> None:
    flush(node.address)
    with connect(node.address) as control:
        control.clear(tier="memory")


def changes(api: GatewayThread) -> Iterator[tuple[str, str]]:
    """Yield method and path of all changes."""
    for path, methods in api.get("/openapi.json").json["paths"].items():
        for method in methods.keys() - {"get"}:
            if path != "/v1/lookup":  # a question with a body
                yield method, path


# --- all changes ----------------------------------------------------------------------------


def test_every_change_has_a_dry_run(api: GatewayThread) -> None:
    described = api.get("/openapi.json").json["paths"]
    for method, path in changes(api):
        names = [one["name"] for one in described[path][method].get("parameters", [])]
        assert "dry_run" in names, (method, path)
        assert "200" in described[path][method]["responses"], (method, path)


def test_an_older_service_refuses_dry_runs_and_makes_changes() -> None:
    switched = SwitchTier("disk", "off")
    assert msgspec.json.encode(switched) == b'{"do":"tier","tier":"disk","state":"off"}'
    dry = msgspec.structs.replace(switched, dry_run=True)
    assert b'"dry_run":true' in msgspec.json.encode(dry), "a field that it does not know"


def test_a_misspelt_dry_run_changes_nothing(api: GatewayThread, node: NodeThread) -> None:
    before = state_at_rest(node)
    for method, path in changes(api):
        for query in ("dryrun=true", "dry_run=yes", "dry_run=", "Dry_Run=true"):
            real = path.replace("{id}", "0" * 16).replace("{name}", "disk")
            body = {"state": "off"} if "{name}" in path else {"pin_share": 0.1}
            answer = send(api, method.upper(), f"{real}?{query}", body)
            assert answer.status == 400, (method, path, query)
    assert state_of(node) == before


def test_a_dry_run_is_refused_as_its_change(
    api: GatewayThread, engine: Engine, node: NodeThread
) -> None:
    room = node.status().catalog.capacity_bytes // EXTENT_BYTES
    many = tokens_of(1, room // 4 + 1)
    post(api, "/v1/tiers/fs", {"state": "read_only"})
    tenant = f"/v1/tenants/{ANN.hex()}/quota"
    refused: list[tuple[str, str, object, int]] = [
        ("POST", "/config", {"no_such_setting": 1}, 409),
        ("POST", "/v1/tiers/moon", {"state": "on"}, 404),
        ("POST", "/v1/tiers/disk", {"state": "half"}, 400),
        ("PUT", "/v1/tenants/zz/quota", {}, 400),
        ("PUT", tenant, {"memory": -1}, 400),
        ("PUT", tenant, {"memory": 1 << 60}, 400),
        ("DELETE", "/v1/pins/0000000000000099", None, 404),
        ("DELETE", "/v1/pins/first", None, 404),
        ("POST", "/v1/pins", chain(engine, tokens_of(8, 1), ttl_s=9), 409),
        ("POST", "/v1/pins", chain(engine, many, ttl_s=9), 409),
        ("POST", "/v1/pins", chain(engine, tokens_of(8, 1)), 400),
        ("POST", "/v1/move", chain(engine, tokens_of(8, 1), to="moon"), 404),
        ("POST", "/v1/move", chain(engine, tokens_of(8, 1), to="fs"), 409),
        ("POST", "/v1/prefetch", {"token_ids": [1]}, 400),
        ("POST", "/v1/verify", chain(engine, []), 400),
        ("POST", "/v1/flush", {"wait_s": -1}, 400),
        ("POST", "/v1/drain", {"on": 3}, 400),
    ]
    for method, path, body, status in refused:
        dry = dry_run(node, api, method, path, body)
        real = send(api, method, path, body)
        assert (dry.status, dry.json) == (real.status, real.json), (method, path, body)
        assert dry.status == status, (method, path, body, dry.json)


def test_a_dry_run_is_refused_while_too_many_jobs_run(
    api: GatewayThread, engine: Engine, node: NodeThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "MOST_RUNNING", 0)
    tokens = tokens_of(1, 1)
    for path, body in (
        ("/v1/flush", None),
        ("/v1/drain", None),
        ("/v1/move", chain(engine, tokens, to="disk")),
    ):
        dry, real = dry_run(node, api, "POST", path, body), post(api, path, body)
        assert (dry.status, dry.json) == (real.status, real.json) == (503, dry.json), path
    assert dry_run(node, api, "POST", "/v1/drain", {"on": False}).status == 200


# --- tiers, quotas, drain -------------------------------------------------------------------


def test_a_switched_tier_drops_the_writes_and_hides_the_chunks_that_were_promised(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writebehind, "MOST_OUTSTANDING", 4)
    settings = {"local_disk": str(short_dir / "disk"), "remote_url": None}
    with (
        FaultyNode(short_dir / "s.sock", **settings) as node,
        steerable(node, short_dir) as api,
        Engine(node.address) as engine,
    ):
        engine.save(prompt("written", 3))
        flush(node.address)
        state_at_rest(node)  # a scan that stalls would never end
        node.disk._faults = Faults(stall=1)
        engine.save(prompt("waiting", 10))
        eventually(lambda: node.status().catalog.queued_writes == 6)
        told = []
        for state in ("read_only", "off", "off", "on"):
            dry, real = promised(node, api, "POST", "/v1/tiers/disk", {"state": state})
            assert real == dry | {"dry_run": False}
            told.append((dry["was"], dry["dropped_writes"], dry["unavailable_chunks"]))
        assert told == [("on", 6, 0), ("read_only", 0, 3), ("off", 0, 3), ("off", 0, 0)]
        assert node.status().catalog.tiers[DISK].dropped_writes == 6


def test_a_shared_tier_does_not_tell_its_chunks(api: GatewayThread, node: NodeThread) -> None:
    dry, real = promised(node, api, "POST", "/v1/tiers/fs", {"state": "off"})
    assert real == dry | {"dry_run": False}
    assert dry["unavailable_chunks"] is None


def test_a_quota_evicts_what_was_promised(
    api: GatewayThread, engine: Engine, node: NodeThread
) -> None:
    path = f"/v1/tenants/{ANN.hex()}/quota"
    engine.save(keys_of(engine, tokens_of(1, 8), SALT), tenant=ANN)
    flush(node.address)
    wanted = {"memory": 2 * EXTENT_BYTES, "disk": 3 * STORED_BYTES}
    dry, real = promised(node, api, "PUT", path, wanted)
    used = {"memory_bytes", "disk_bytes", "dry_run"}
    assert {n: v for n, v in dry.items() if n not in used} == {
        n: v for n, v in real.items() if n not in used
    }
    assert (dry["memory_was"], dry["memory"]) == (None, wanted["memory"])
    assert (dry["memory_bytes"], dry["disk_bytes"]) == (8 * EXTENT_BYTES, 8 * STORED_BYTES)
    assert (dry["memory_excess"], dry["disk_excess"]) == (6 * EXTENT_BYTES, 5 * STORED_BYTES)

    def left() -> tuple[int, int]:
        now = node.call(lambda: node.service.catalog.tenant_stats(ANN))
        return now.memory.bytes, sum(usage.bytes for usage in now.tiers.values())

    eventually(lambda: left() == (wanted["memory"], wanted["disk"]))
    dry, real = promised(node, api, "PUT", path, {"memory": None})
    assert (dry["memory_was"], dry["memory"], dry["memory_excess"]) == (wanted["memory"], None, 0)
    assert dry["disk"] == dry["disk_was"] == real["disk"] == wanted["disk"], "left out: unchanged"
    assert real == dry | {"dry_run": False}


def test_a_drain_says_who_is_affected(api: GatewayThread, engine: Engine, node: NodeThread) -> None:
    (grant,) = engine.ranks[0].reserve(prompt("begun", 1))
    wanted = {"on": True, "wait_s": 30}
    dry, real = promised(node, api, "POST", "/v1/drain", wanted)
    assert result_of(api, real["job"])["state"] == "done"
    assert real | {"job": None} == dry | {"dry_run": False}
    assert (dry["was"], dry["draining"], dry["job"]) == (False, True, None)
    assert (dry["engines"], dry["reserved_bytes"]) == (1, EXTENT_BYTES)
    engine.ranks[0].client.commit([engine.ranks[0].write(grant)])
    assert eventually(lambda: engine.load(prompt("begun", 1)) == 1), "what was begun is saved"
    assert engine.save(prompt("later", 1)) == 0
    flush(node.address)
    dry, real = promised(node, api, "POST", "/v1/drain", {"on": False})
    assert real == dry | {"dry_run": False}
    assert (dry["was"], dry["draining"]) == (True, False)


# --- prompts --------------------------------------------------------------------------------


def halfway(engine: Engine, node: NodeThread) -> list[int]:
    """Return a prompt of which two chunks are in memory, two on disk, one shared, one nowhere."""
    tokens = tokens_of(1, 6)
    keys = keys_of(engine, tokens)
    engine.save(keys[4:5], parent=keys[3])
    clear_memory(node)
    with connect(node.address) as control:
        control.clear(tier="disk")
    engine.save(keys[:4])
    clear_memory(node)
    assert engine.load(keys[:2]) == 2
    flush(node.address)
    return tokens


def test_a_pin_holds_what_was_promised(
    api: GatewayThread, engine: Engine, node: NodeThread
) -> None:
    tokens = halfway(engine, node)
    body = chain(engine, tokens, ttl_s=600)
    dry, real = promised(node, api, "POST", "/v1/pins", body)
    assert (dry["chunks"], dry["promoted_chunks"], dry["pinned_bytes"]) == (5, 3, 0)
    assert dry["most_bytes"] == node.status().catalog.capacity_bytes // 4
    for name in ("namespace", "tenant", "tokens", "chunks", "bytes"):
        assert dry[name] == real[name]
    flush(node.address)  # a promoted chunk is written to faster tiers
    again = dry_run(node, api, "POST", "/v1/pins", body).json
    assert (again["promoted_chunks"], again["pinned_bytes"]) == (0, real["bytes"])
    path = f"/v1/pins/{real['id']}"
    dry, ended = promised(node, api, "DELETE", path)
    assert ended == dry | {"dry_run": False} == real | {"dry_run": False}
    assert dry_run(node, api, "DELETE", path).status == 404


def test_jobs_do_what_was_promised(api: GatewayThread, engine: Engine, node: NodeThread) -> None:
    tokens = halfway(engine, node)
    wanted = {
        "/v1/prefetch": {"asked_chunks": 6, "resident_chunks": 5, "promoted_chunks": 3},
        "/v1/verify": {"chunks": 5},
        "/v1/move": {"resident_chunks": 5},
    }
    for path, figures in wanted.items():
        more = {"to": "disk"} if path == "/v1/move" else {}
        dry, real = promised(node, api, "POST", path, chain(engine, tokens, **more))
        row = result_of(api, real)
        flush(node.address)
        assert (dry["expected"], dry["error"]) == (figures, ""), path
        assert figures.items() <= row["result"].items(), row
        assert dry["kind"] == row["kind"]
    dry, real = promised(node, api, "POST", "/v1/flush")
    assert dry["expected"] == {"waiting_writes": 0}
    assert result_of(api, real)["result"] == {"outstanding_writes": 0}


def test_a_job_that_pins_leave_no_room_for_is_promised_to_fail(short_dir: Path) -> None:
    settings = {"local_disk": None, "remote_url": None}
    with (
        NodeThread(short_dir / "s.sock", **settings) as node,
        steerable(node, short_dir) as api,
        Engine(node.address) as engine,
    ):
        share = node.status().catalog.capacity_bytes // 4 // EXTENT_BYTES
        tokens = tokens_of(1, share + 1)
        engine.save(keys_of(engine, tokens))
        pinned = chain(engine, tokens[: share * CHUNK_SIZE], ttl_s=600)
        assert post(api, "/v1/pins", pinned).status == 201
        for path in ("/v1/prefetch", "/v1/verify"):
            dry, real = promised(node, api, "POST", path, chain(engine, tokens))
            row = result_of(api, real)
            assert (row["state"], row["error"]) == ("failed", dry["error"])
            assert "pin_share" in dry["error"]


# --- chunks that were not used for some time ------------------------------------------------


def pass_hour(node: NodeThread) -> None:
    """Let the catalog's clock be an hour later than it is."""
    catalog = node.service.catalog
    node.call(lambda: catalog.tick(catalog._space.now + 3600))


def drop(api: GatewayThread, query: str) -> Answer:
    return send(api, "DELETE", f"/v1/chunks?{query}")


def test_unused_chunks_are_dropped_as_they_were_counted(
    api: GatewayThread, engine: Engine, node: NodeThread
) -> None:
    old, used = tokens_of(1, 3), tokens_of(2, 2)
    engine.save(keys_of(engine, old, SALT), tenant=ANN)
    engine.save(keys_of(engine, used))
    flush(node.address)
    pass_hour(node)
    assert engine.load(keys_of(engine, used)) == 2
    pass_hour(node)
    pass_hour(node)
    namespace = engine.ranks[0].attach.namespace.hex()
    before = state_at_rest(node)
    for query, chunks in (
        ("all=true&older_than_s=8000", 0),
        ("all=true&older_than_s=5000", 6),
        ("tier=memory&older_than_s=5000", 3),
        (f"namespace={namespace}&tier=disk&older_than_s=5e3", 3),
        (f"tenant={ANN.hex()}&older_than_s=1000", 6),
        ("all=true&older_than_s=1000.5", 10),
    ):
        counted = drop(api, f"{query}&dry_run=true")
        assert (counted.status, counted.json["chunks"]) == (200, chunks), query
    assert state_of(node) == before
    dry = drop(api, "all=true&older_than_s=5000&dry_run=true").json
    assert dry == {"chunks": 6, "bytes": 3 * (EXTENT_BYTES + STORED_BYTES), "dry_run": True}
    real = drop(api, "all=true&older_than_s=5000")
    assert (real.status, real.json["kind"]) == (202, "drop")
    row = result_of(api, real.json)
    assert (row["state"], row["result"]) == ("done", {"chunks": 6, "bytes": dry["bytes"]})
    assert engine.load(keys_of(engine, used)) == 2
    totals = node.service.catalog.totals()
    assert (totals.resident_chunks, totals.tiers[DISK].chunks) == (2, 2)
    assert drop(api, "all=true&older_than_s=5000&dry_run=true").json["chunks"] == 0


def test_an_age_that_cannot_be_is_refused_and_drops_nothing(
    api: GatewayThread, engine: Engine, node: NodeThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.save(keys_of(engine, tokens_of(1, 3)))
    flush(node.address)
    pass_hour(node)
    before = state_at_rest(node)
    for age in ("", "0", "0.9", "-1", "nan", "1e999", "x", "1h", "true", "null", "%ff", "1_0"):
        for more in ("", "&dry_run=true"):
            answer = drop(api, f"all=true&older_than_s={age}{more}")
            assert (answer.status, answer.json["error"][:13]) == (400, "older_than_s:"), age
    for query, reason in (
        ("older_than_s=10", "all=true"),
        ("tier=fs&older_than_s=10", "shared tiers"),
        (f"namespace={'0' * 64}&older_than_s=10", "unknown"),
    ):
        for more in ("", "&dry_run=true"):
            answer = drop(api, query + more)
            assert (answer.status, reason in answer.json["error"]) == (400, True), answer.json
    monkeypatch.setattr(jobs, "MOST_RUNNING", 0)
    for more in ("", "&dry_run=true"):
        assert drop(api, f"all=true&older_than_s=10{more}").status == 503
    assert state_of(node) == before


def test_an_older_service_does_not_take_the_age_for_nothing() -> None:
    """It knows no such request; as a `Clear` with a field that it does not know, it would drop."""
    asked = msgspec.json.encode(DropUnused(older_than_s=60.0))
    assert asked == b'{"do":"drop_unused","older_than_s":60.0}'


def test_counting_ends_before_the_api_gives_up_and_is_not_repeated_meanwhile(
    api: GatewayThread, engine: Engine, node: NodeThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def endless(_: DropUnused) -> Iterator[None]:
        while True:
            yield

    engine.save(prompt("p", 2))
    wanted = "/v1/chunks?all=true&older_than_s=1&dry_run=true"
    with monkeypatch.context() as patch:
        patch.setattr(steering, "_COUNT_S", 0.01)
        patch.setattr(node.service._steering, "_unused", endless)
        assert "too many chunks to count" in send(api, "DELETE", wanted).json["error"]
    with monkeypatch.context() as patch:
        patch.setattr(node.service._steering, "_counting", True)
        refused = send(api, "DELETE", wanted)
    assert (refused.status, "another dry run" in refused.json["error"]) == (409, True)
    assert send(api, "DELETE", wanted).status == 200
