# SPDX-License-Identifier: Apache-2.0
"""Changes of a running service through the API: settings, prompts, pins, tiers, jobs."""

import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from kvhaven.catalog.actions import LeaseId, TierName
from kvhaven.client.control import connect
from kvhaven.config import NEXT_REQUEST, NOW, Settings, setting_infos
from kvhaven.errors import KVHavenError
from kvhaven.keys import tenant_id
from tests.crash.engine import CHUNK_SIZE, EXTENT_BYTES, Engine
from tests.crash.node import MIB, NodeThread, eventually, flush

pytest.importorskip("aiohttp", reason="kvhaven[api] is not installed")

from kvhaven.gateway.plugins import PluginSettings
from tests.gateway_kit import (
    TOKEN,
    Answer,
    GatewayThread,
    engine_server,
    keys_of,
    post,
    send,
    steerable,
    tiered_node,
    tokens_of,
)
from tests.metrics_kit import samples_of, summed

SALT = "ann"
DISK = TierName("disk")


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


def setting(api: GatewayThread, name: str) -> dict[str, Any]:
    rows = api.get("/config").json["settings"]
    found: dict[str, Any] = next(row for row in rows if row["name"] == name)
    return found


def prompt_of(engine: Engine, tokens: list[int], **more: object) -> dict[str, object]:
    namespace = engine.ranks[0].attach.namespace.hex()
    return {"namespace": namespace, "token_ids": tokens} | more


def done(api: GatewayThread, answer: Answer) -> dict[str, Any]:
    """Return the result of a job that has just been started."""
    assert answer.status == 202, answer.json
    job = answer.json.get("job", answer.json)

    def ended() -> dict[str, Any] | None:
        row: dict[str, Any] = api.get(f"/v1/jobs/{job['id']}").json
        return row if row["state"] != "running" else None

    row: dict[str, Any] = eventually(ended)
    assert row["state"] == "done", row
    result: dict[str, Any] = row["result"]
    return result


# --- settings -------------------------------------------------------------------------------


def test_settings_change_now_and_all_or_nothing(
    node: NodeThread, api: GatewayThread, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    before = api.get("/config").json["generation"]
    change = {
        "verify_memory": "always",
        "kvhaven.disk_write": "through",
        "write_queue_size": "1MiB",
    }
    answer = post(api, "/config?dry_run=true", change)
    assert (answer.status, answer.json["dry_run"]) == (200, True)
    assert setting(api, "verify_memory")["value"] == "sample"
    answer = post(api, "/config", change)
    assert answer.status == 200
    assert answer.json["generation"] == before + 1
    applied = {one["name"]: (one["was"], one["value"]) for one in answer.json["applied"]}
    assert applied["disk_write"] == ("behind", "through")
    assert node.call(lambda: node.service.verifier.blocks_answers)
    row = setting(api, "disk_write")
    assert (row["value"], row["origin"], row["changes"]) == ("through", "HTTP API", "now")
    disk = eventually(lambda: _tier(api, "disk", write_mode="through"))
    assert disk["state"] == "on"
    assert any("audit" in line and "disk_write" in line for line in caplog.messages)
    for refused, status in (
        ({"verify_memory": "off", "no_such_setting": 1}, 409),
        ({"verify_memory": "off", "disk_write": "sideways"}, 409),
        ({"verify_memory": "off", "max_local_cpu_size": "1GiB"}, 409),
        ({"verify_memory": "off", "write_queue_size": "1TiB"}, 409),
        ({}, 400),
        ([], 400),
    ):
        answer = post(api, "/config", refused)
        assert answer.status == status, refused
        assert answer.json["error"]
        assert setting(api, "verify_memory")["value"] == "always", refused
    assert api.get("/config").json["generation"] == before + 1
    metrics = samples_of(api.get("/metrics").body.decode())
    assert metrics["kvhaven_config_generation"][frozenset()] == before + 1


def _tier(api: GatewayThread, name: str, **wanted: object) -> dict[str, Any] | None:
    row: dict[str, Any] = next(r for r in api.get("/v1/tiers").json["rows"] if r["id"] == name)
    return row if wanted.items() <= row.items() else None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step_budget_ms", 10**400),
        ("priority_limit", 10**400),
        ("max_local_disk_size", "9" * 320 + ".5"),
        ("tenant_memory", {"ann": "9" * 320 + ".5"}),
    ],
    ids=range(4),  # the values are too long for names
)
def test_an_enormous_number_is_refused_and_the_connection_remains(
    node: NodeThread, api: GatewayThread, name: str, value: object
) -> None:
    before = node.call(lambda: list(node.service._observers))
    answer = post(api, "/config", {name: value})
    (allowed,) = (info.allowed for info in setting_infos() if info.name == name)
    assert answer.status == 409
    assert answer.json["error"].startswith(f"setting {name} = ")
    assert answer.json["error"].endswith(f"allowed: {allowed}")
    assert api.get("/config").status == 200
    assert node.call(lambda: list(node.service._observers)) == before


def test_an_unexpected_error_of_one_request_leaves_the_connection_to_the_others(
    node: NodeThread, api: GatewayThread, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: logging.LogRecord) -> bool:
        raise RuntimeError("a bug in a filter")

    before = node.call(lambda: list(node.service._observers))
    log = logging.getLogger("kvhaven.service.runtime_settings")
    caplog.set_level(logging.INFO)
    log.addFilter(fail)
    try:
        answer = post(api, "/config", {"verify_memory": "always"})
    finally:
        log.removeFilter(fail)
    assert answer.status == 500
    assert answer.json == {"error": "internal error; the log of the service has the details"}
    assert "a bug in a filter" in caplog.text
    assert post(api, "/config", {"verify_memory": "off"}).status == 200
    assert node.call(lambda: list(node.service._observers)) == before


def test_a_change_needs_the_etag_that_it_was_made_for(api: GatewayThread) -> None:
    etag = api.get("/config").headers["etag"]
    assert post(api, "/config", {"log_level": "INFO"}, If_Match='"other"').status == 412
    assert post(api, "/config", {"log_level": "INFO"}, If_Match=etag).status == 200
    assert post(api, "/config", {"log_level": "INFO"}, If_Match=etag).status == 412
    assert post(api, "/config", {"log_level": "INFO"}, If_Match="*").status == 200
    assert api.get("/config", headers={"If-None-Match": etag}).status == 200


def test_an_etag_of_a_service_that_has_ended_is_refused(short_dir: Path) -> None:
    token = short_dir / "token"
    token.write_text(TOKEN)
    address = short_dir / "s.sock"
    with GatewayThread(str(address), api_token_file=str(token)) as api:
        tags = []
        for _ in range(2):
            with NodeThread(address):
                eventually(lambda: api.health() == (200, "ok"))
                tags.append(api.get("/config").headers["etag"])
                for tag in tags:
                    answer = post(api, "/config?dry_run=true", {"pin_share": 0.1}, If_Match=tag)
                    assert answer.status == (200 if tag == tags[-1] else 412)
            eventually(lambda: api.health()[0] == 503)
    assert tags[0] != tags[1]


def test_nothing_changes_without_the_token(node: NodeThread, api: GatewayThread) -> None:
    described = api.get("/openapi.json").json["paths"]
    for path, methods in described.items():
        for method in methods.keys() - {"get"}:
            real = path.replace("{id}", "0" * 16).replace("{name}", "disk")
            for headers in ({}, {"Authorization": "Bearer wrong"}):
                answer = api.get(real, method=method.upper(), headers=headers, body="{}")
                assert answer.status == 401, (method, path)
    assert api.get("/config").json["generation"] == 1


def test_every_setting_says_when_it_changes(api: GatewayThread) -> None:
    changes = {row["name"]: row["changes"] for row in api.get("/config").json["settings"]}
    assert changes.keys() == {info.name for info in setting_infos()}
    assert {name for name, when in changes.items() if when == "now"} == NOW
    assert {name for name, when in changes.items() if when == "next_request"} == NEXT_REQUEST
    defaults = Settings()
    for name, when in changes.items():
        value = getattr(defaults, name)
        if value is None:
            continue
        if name in {"log_level", "max_local_disk_size"}:
            value = {"log_level": "WARNING", "max_local_disk_size": "1GiB"}[name]
        status = post(api, "/config?dry_run=true", {name: value}).status
        assert status == (409 if when == "restart" else 200), name


def test_engines_take_changed_settings_with_their_next_request_and_keep_chunk_size(
    api: GatewayThread, engine: Engine
) -> None:
    client = engine.scheduler.client
    assert client.changed is None
    body = {"lmcache.chunk_size": 512, "lmcache.save_decode_cache": True}  # the recipes' example
    answer = post(api, "/config", body)
    assert answer.status == 200
    assert [one["name"] for one in answer.json["applied"]] == ["save_decode_cache"]
    assert [one["name"] for one in answer.json["pending"]] == ["chunk_size"]
    assert setting(api, "chunk_size")["pending"] == 512
    assert setting(api, "save_decode_cache")["by_engine"] == {}
    changed = eventually(lambda: client.changed)
    assert json.loads(changed.values) == {"save_decode_cache": True}
    client.settings_taken(changed.generation)
    (engine_id,) = (row["id"] for row in api.get("/v1/engines").json["rows"])
    eventually(lambda: setting(api, "save_decode_cache")["by_engine"] == {engine_id: True})
    post(api, "/config", {"priority_limit": 3})
    assert setting(api, "save_decode_cache")["by_engine"] == {}, "not before it takes them again"


def test_quotas_of_the_settings_apply_to_tenants_that_have_chunks(
    api: GatewayThread, engine: Engine, node: NodeThread
) -> None:
    tenant = tenant_id(SALT)
    keys = keys_of(engine, tokens_of(1, 8), SALT)
    engine.save(keys, tenant=tenant)
    quota = f"{2 * EXTENT_BYTES // 1024}KiB"
    assert post(api, "/config", {"tenant_memory": {SALT: quota}}).status == 200

    def held() -> int:
        return node.call(lambda: node.service.catalog.tenant_stats(tenant)).memory.bytes

    eventually(lambda: held() <= 2 * EXTENT_BYTES)
    assert post(api, "/config", {"tenant_memory": None}).status == 200
    engine.save(keys, tenant=tenant)
    eventually(lambda: held() == 8 * EXTENT_BYTES)


def test_a_smaller_disk_evicts_and_a_larger_one_has_room(
    api: GatewayThread, engine: Engine, node: NodeThread
) -> None:
    for number in range(8):
        engine.save(keys_of(engine, tokens_of(number, 16)))
    flush(node.address)
    used = node.status().catalog.tiers[DISK].used_bytes
    assert used > MIB
    assert post(api, "/config", {"max_local_disk_size": "1MiB"}).status == 200
    eventually(lambda: node.status().catalog.tiers[DISK].used_bytes <= MIB)
    assert post(api, "/config", {"max_local_disk_size": "1GiB"}).status == 200
    eventually(lambda: node.status().catalog.tiers[DISK].capacity_bytes > 512 * MIB)


# --- prompts --------------------------------------------------------------------------------


def test_a_lookup_tells_the_places_and_the_first_gap(
    api: GatewayThread, engine: Engine, node: NodeThread
) -> None:
    tokens = tokens_of(1, 6, 3)
    keys = keys_of(engine, tokens)
    engine.save(keys[:4])
    flush(node.address)
    (engine_id,) = (row["id"] for row in api.get("/v1/engines").json["rows"])
    answer = post(api, "/v1/lookup", {"engine": engine_id, "token_ids": tokens})
    assert answer.json == {
        "tokens": 63, "cached_tokens": 40, "by_place": {"memory": 40}, "first_gap": 40,
        "reason": "cold",
    }  # fmt: skip
    answer = post(api, "/v1/lookup", prompt_of(engine, tokens[:43]))
    assert (answer.json["first_gap"], answer.json["reason"]) == (40, "partial_chunk")
    answer = post(api, "/v1/lookup", prompt_of(engine, tokens[:40]))
    assert (answer.json["first_gap"], answer.json["reason"]) == (None, None)
    with connect(node.address) as control:
        control.clear(tier="memory")
    answer = post(api, "/v1/lookup", prompt_of(engine, tokens))
    assert answer.json["by_place"] == {"disk": 40}
    with connect(node.address) as control:
        control.clear(tier="disk")
    answer = post(api, "/v1/lookup", prompt_of(engine, tokens))
    assert answer.json["by_place"] == {"fs": 40}, "the shared tier was asked"
    assert node.status().catalog.promoted_chunks == 0, "a lookup promotes nothing"
    salted = post(api, "/v1/lookup", prompt_of(engine, tokens, cache_salt=SALT))
    assert salted.json["cached_tokens"] == 0, "another tenant's"


def test_a_chunk_tells_its_places_leases_and_pins_but_not_its_key(
    api: GatewayThread, engine: Engine, node: NodeThread
) -> None:
    tokens = tokens_of(1, 3)
    keys = keys_of(engine, tokens[:20], SALT)
    engine.save(keys, tenant=tenant_id(SALT))
    flush(node.address)
    prompt = prompt_of(engine, tokens, cache_salt=SALT)
    assert api.get("/v1/chunks/0123456789abcdef").status == 404
    answer = post(api, "/v1/lookup?chunks=true", prompt)
    first, second, absent = answer.json["chunks"]
    assert answer.json["cached_tokens"] == 20
    assert "chunks" not in post(api, "/v1/lookup", prompt).json
    assert keys[0].hex() not in answer.body.decode()
    lease = engine.scheduler.acquire(keys, tenant_id(SALT))
    pin = post(api, "/v1/pins", prompt | {"token_ids": tokens[:10], "ttl_s": 60})
    assert lease is not None
    rows = [api.get(f"/v1/chunks/{id_}").json for id_ in (first, second, absent)]
    assert [row["leases"] for row in rows] == [2, 1, 0]
    assert [row["pins"] for row in rows] == [1, 0, 0]
    stored = 4096 + EXTENT_BYTES
    assert rows[1]["places"] == {"memory": EXTENT_BYTES, "disk": stored, "fs": stored}
    assert rows[2]["places"] == {}
    assert (rows[1]["tenant"], rows[1]["id"]) == (tenant_id(SALT).hex(), second)
    assert rows[2]["age_s"] is None
    assert 0 <= rows[1]["idle_s"] <= rows[1]["age_s"]
    engine.scheduler.client.release([lease.lease_id])
    assert send(api, "DELETE", f"/v1/pins/{pin.json['id']}").status == 200
    with connect(node.address) as control:
        control.clear(tier="memory")
    assert api.get(f"/v1/chunks/{first}").json["places"] == {"disk": stored, "fs": stored}


def test_a_prompt_must_be_named_well(api: GatewayThread, engine: Engine) -> None:
    good = prompt_of(engine, tokens_of(1, 1))
    for body in (
        {"token_ids": [1]},
        good | {"engine": "engine"},
        good | {"namespace": "00" * 32},
        good | {"namespace": "zz"},
        good | {"token_ids": []},
        good | {"text": "both"},
        good | {"token_ids": [], "text": "no engine tokenizes it"},
        good | {"token_ids": [-1]},
        good | {"token_ids": [1 << 40]},
        good | {"unknown": 1},
        "text",
    ):
        for path in ("/v1/lookup", "/v1/prefetch", "/v1/verify"):
            answer = post(api, path, body)
            assert answer.status == 400, (path, body)
            assert answer.json["error"]


def test_a_text_is_a_prompt_that_the_engine_tokenizes(
    node: NodeThread, engine: Engine, short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = tokens_of(1, 2, 3)
    engine.save(keys_of(engine, tokens[:20]))
    with engine_server(tokens) as server:
        secret = server.url.replace("://", "://user:secret@")
        own = PluginSettings(engine_url=f"{secret}/")
        with steerable(node, short_dir, plugins=own) as api:
            prompt = prompt_of(engine, []) | {"text": "What is cached of this?"}
            answer = post(api, "/v1/lookup", prompt)
            assert (answer.json["tokens"], answer.json["cached_tokens"]) == (23, 20)
            assert answer.json["reason"] == "partial_chunk"
            assert server.texts == ["What is cached of this?"]
            pin = post(api, "/v1/pins", prompt | {"ttl_s": 60})
            assert pin.status == 201, pin.json
            assert done(api, post(api, "/v1/verify", prompt))["intact_chunks"] == 2
            for wrong in (None, [], "abc", [-1], [1.5], {"a": 1}, [1 << 40]):
                server.tokens = wrong
                answer = post(api, "/v1/lookup", prompt)
                assert answer.status == (400 if wrong == [] else 503), wrong
                assert "token" in answer.json["error"]
            server.tokens = tokens
            for status, location in ((500, ""), (404, ""), (307, f"{server.url}/v1/completions")):
                server.status, server.location = status, location
                answer = post(api, "/v1/lookup", prompt)
                assert answer.status == 503
                assert f"status {status}, expected 200" in answer.json["error"]
            assert server.computed == []
            server.status, server.location = 200, ""
            monkeypatch.setattr("kvhaven.gateway.engine_server._MOST_BYTES", 16)
            assert "longer than 16 bytes" in post(api, "/v1/lookup", prompt).json["error"]
            server.shutdown()
            server.server_close()
            answer = post(api, "/v1/lookup", prompt)
            assert answer.status == 503
            assert f"@{server.url.removeprefix('http://')}/tokenize" in answer.json["error"]
            assert "secret" not in answer.json["error"]


def test_a_prefetch_is_a_job_that_promotes(
    api: GatewayThread, engine: Engine, node: NodeThread
) -> None:
    tokens = tokens_of(1, 5)
    keys = keys_of(engine, tokens)
    engine.save(keys)
    flush(node.address)
    with connect(node.address) as control:
        control.clear(tier="memory")
    result = done(api, post(api, "/v1/prefetch", prompt_of(engine, tokens)))
    assert result == {"asked_chunks": 5, "resident_chunks": 5, "promoted_chunks": 5}
    assert engine.load(keys) == 5
    answer = post(api, "/v1/lookup", prompt_of(engine, tokens))
    assert answer.json["by_place"] == {"memory": 50}
    result = done(api, post(api, "/v1/verify", prompt_of(engine, tokens)))
    assert result == {"chunks": 5, "intact_chunks": 5, "damaged_chunks": 0}
    assert api.get("/v1/jobs/0000000000000099").status == 404
    kinds = [row["kind"] for row in api.get("/v1/jobs").json["rows"]]
    assert kinds == ["prefetch", "verify"]


def test_a_move_writes_to_the_tier_that_it_names(
    api: GatewayThread, engine: Engine, node: NodeThread
) -> None:
    tokens = tokens_of(1, 3)
    assert post(api, "/config", {"disk_write": "behind"}).status == 200
    post(api, "/v1/tiers/disk", {"state": "read_only"})
    engine.save(keys_of(engine, tokens))
    flush(node.address)
    assert node.status().catalog.tiers[DISK].chunks == 0
    assert post(api, "/v1/move", prompt_of(engine, tokens, to="disk")).status == 409
    post(api, "/v1/tiers/disk", {"state": "on"})
    result = done(api, post(api, "/v1/move", prompt_of(engine, tokens, to="disk")))
    assert result == {"resident_chunks": 3, "outstanding_writes": 0}
    assert node.status().catalog.tiers[DISK].chunks == 3
    assert post(api, "/v1/move", prompt_of(engine, tokens, to="moon")).status == 404


# --- pins -----------------------------------------------------------------------------------


def test_pinned_chunks_stay_until_their_time(short_dir: Path) -> None:
    token = short_dir / "token"
    token.write_text(TOKEN)
    settings = {"max_local_cpu_size": MIB, "local_disk": None, "remote_url": None}
    with (
        NodeThread(short_dir / "s.sock", **settings) as node,
        GatewayThread(node.address, api_token_file=str(token)) as api,
        Engine(node.address) as engine,
    ):
        eventually(lambda: api.health() == (200, "ok"))
        tokens = tokens_of(1, 6)
        keys = keys_of(engine, tokens)
        engine.save(keys)
        pinned = post(api, "/v1/pins", prompt_of(engine, tokens, ttl_s=600))
        assert pinned.status == 201
        assert (pinned.json["tokens"], pinned.json["chunks"]) == (60, 6)
        assert pinned.json["bytes"] == 6 * EXTENT_BYTES

        def state(name: str) -> float:
            found = samples_of(api.get("/metrics").body.decode())
            return summed(found, "kvhaven_memory_bytes", "state")[name]

        eventually(lambda: state("pinned") == 6 * EXTENT_BYTES)
        room = node.status().catalog.capacity_bytes // EXTENT_BYTES
        for number in range(2, 6):
            engine.save(keys_of(engine, tokens_of(number, room // 2)))
        assert engine.load(keys) == 6, "nothing evicts them"
        again = post(api, "/v1/pins", prompt_of(engine, tokens[:20], ttl_s=600))
        others = keys_of(engine, tokens_of(8, 4))
        engine.save(others)
        lease = engine.scheduler.acquire(others)
        assert lease is not None
        eventually(lambda: state("leased") == 4 * EXTENT_BYTES)
        assert state("pinned") == 6 * EXTENT_BYTES, "two pins of a chunk take its space once"
        engine.scheduler.client.release([lease.lease_id])
        rows = api.get("/v1/pins").json["rows"]
        assert [row["chunks"] for row in rows] == [6, 2]
        many = tokens_of(9, room // 4 + 1)
        engine.save(keys_of(engine, many))
        refused = post(api, "/v1/pins", prompt_of(engine, many, ttl_s=600))
        assert refused.status == 409
        assert "pin_share" in refused.json["error"]
        assert post(api, "/v1/pins", prompt_of(engine, tokens)).status == 400, "without a time"
        assert send(api, "DELETE", f"/v1/pins/{pinned.json['id']}").status == 200
        assert send(api, "DELETE", f"/v1/pins/{pinned.json['id']}").status == 404
        eventually(lambda: state("pinned") == 2 * EXTENT_BYTES)
        assert send(api, "DELETE", f"/v1/pins/{again.json['id']}").status == 200
        short = post(api, "/v1/pins", prompt_of(engine, many[:10], ttl_s=0.2))
        assert short.status == 201
        eventually(lambda: not api.get("/v1/pins").json["rows"])
        eventually(lambda: state("pinned") == state("leased") == 0)
        node.check()


def test_jobs_hold_no_more_than_the_share_of_pins(short_dir: Path) -> None:
    token = short_dir / "token"
    token.write_text(TOKEN)
    settings = {"max_local_cpu_size": 2 * MIB, "local_disk": str(short_dir / "disk")}
    with (
        NodeThread(short_dir / "s.sock", **settings) as node,
        GatewayThread(node.address, api_token_file=str(token)) as api,
        Engine(node.address) as engine,
    ):
        eventually(lambda: api.health() == (200, "ok"))
        room = node.status().catalog.capacity_bytes // EXTENT_BYTES
        tokens = tokens_of(1, room // 2)
        engine.save(keys_of(engine, tokens))
        flush(node.address)
        with connect(node.address) as control:
            control.clear(tier="memory")
        held = [0]

        def note() -> None:
            totals = node.service.catalog.totals()
            held.append(totals.leased_bytes + totals.promoting_bytes)

        node.call(lambda: node.service.driver.observe(note))
        chunks = room // 2
        result = done(api, post(api, "/v1/prefetch", prompt_of(engine, tokens)))
        assert result == {
            "asked_chunks": chunks,
            "resident_chunks": chunks,
            "promoted_chunks": chunks,
        }
        result = done(api, post(api, "/v1/verify", prompt_of(engine, tokens)))
        assert result == {"chunks": chunks, "intact_chunks": chunks, "damaged_chunks": 0}
        share = node.status().catalog.capacity_bytes // 4
        assert 0 < max(held) <= share < chunks * EXTENT_BYTES
        fill = tokens[: share // EXTENT_BYTES * CHUNK_SIZE]
        pin = post(api, "/v1/pins", prompt_of(engine, fill, ttl_s=600))
        assert pin.status == 201, pin.json
        job = post(api, "/v1/prefetch", prompt_of(engine, tokens)).json["id"]
        row = eventually(lambda: (r := api.get(f"/v1/jobs/{job}").json)["state"] != "running" and r)
        assert row["state"] == "failed"
        assert "pin_share" in row["error"]
        node.check()


def test_long_pins_are_counted_piece_by_piece(short_dir: Path) -> None:
    token = short_dir / "token"
    token.write_text(TOKEN)
    with (
        NodeThread(short_dir / "s.sock", max_local_cpu_size=48 * MIB) as node,
        GatewayThread(node.address, api_token_file=str(token)) as api,
        Engine(node.address, shard_bytes=100) as engine,
    ):
        eventually(lambda: api.health() == (200, "ok"))
        tokens = tokens_of(0, 2500)
        engine.save(keys_of(engine, tokens))
        answer = post(api, "/v1/pins", prompt_of(engine, tokens, ttl_s=600))
        assert (answer.status, answer.json.get("chunks")) == (201, 2500), answer.json
        pins, turns = node.service.pins, node.service.driver.turns
        assert node.call(lambda: pins.bytes) == answer.json["bytes"]

        def unpin() -> int:
            before = turns.pieces
            pins.unpin(LeaseId(int(answer.json["id"])))
            return before

        before = node.call(unpin)
        eventually(lambda: node.call(lambda: pins.bytes) == 0)
        eventually(lambda: node.status().catalog.leases == 0)
        assert node.call(lambda: turns.pieces) - before >= 5
        node.check()


def test_no_answer_waits_for_an_operators_verification(
    api: GatewayThread, engine: Engine, node: NodeThread
) -> None:
    assert post(api, "/config", {"verify_memory": "always"}).status == 200
    tokens = tokens_of(1, 3)
    engine.save(keys_of(engine, tokens))
    release = threading.Event()
    try:
        node.service.verifier._audits.submit(release.wait, 30)
        job = post(api, "/v1/verify", prompt_of(engine, tokens))
        assert engine.load(keys_of(engine, tokens)) == 3
        assert api.get(f"/v1/jobs/{job.json['id']}").json["state"] == "running"
    finally:
        release.set()
    assert done(api, job)["intact_chunks"] == 3


# --- tiers and the service ------------------------------------------------------------------


def test_a_tier_is_switched_off_and_on(
    api: GatewayThread, engine: Engine, node: NodeThread
) -> None:
    tokens = tokens_of(1, 4)
    keys = keys_of(engine, tokens)
    engine.save(keys)
    flush(node.address)
    with connect(node.address) as control:
        control.clear(tier="memory")
    answer = post(api, "/v1/tiers/disk", {"state": "off"})
    assert (answer.status, answer.json["state"]) == (200, "off")
    post(api, "/v1/tiers/fs", {"state": "off"})
    assert engine.load(keys) == 0
    lookup = post(api, "/v1/lookup", prompt_of(engine, tokens))
    assert lookup.json["reason"] == "tier_off"
    rows = api.get("/v1/requests").json["rows"]
    assert rows[0]["missed"] == {"tier_off": 40}
    eventually(lambda: _tier(api, "disk", state="off", online=False))
    metrics = samples_of(api.get("/metrics").body.decode())
    assert summed(metrics, "kvhaven_tier_up", "tier") == {"disk": 0, "fs": 0}
    assert api.health() == (200, "ok"), "an operator's choice is no fault"
    post(api, "/v1/tiers/disk", {"state": "on"})
    assert engine.load(keys) == 4
    assert post(api, "/v1/tiers/nothing", {"state": "on"}).status == 404
    assert post(api, "/v1/tiers/disk", {"state": "half"}).status == 400


def test_what_is_seen_after_a_change_shows_it(
    node: NodeThread, engine: Engine, short_dir: Path
) -> None:
    engine.save(keys_of(engine, tokens_of(1, 4)))
    with steerable(node, short_dir, interval_s=2.0) as api:
        for state in ("off", "read_only", "on"):
            post(api, "/v1/tiers/disk", {"state": state})
            assert _tier(api, "disk", state=state)
        send(api, "DELETE", "/v1/chunks?tier=memory")
        assert api.get("/stats").json["memory"]["idle"] == 0


def test_flush_and_drain(api: GatewayThread, engine: Engine, node: NodeThread) -> None:
    engine.save(keys_of(engine, tokens_of(1, 4)))
    assert done(api, post(api, "/v1/flush")) == {"outstanding_writes": 0}
    assert node.status().catalog.tiers[DISK].written == 4
    answer = post(api, "/v1/drain", {"wait_s": 30})
    assert answer.json["draining"] is True
    assert done(api, answer) == {"outstanding_writes": 0}
    eventually(lambda: api.get("/readyz").status == 503)
    with pytest.raises(KVHavenError, match="draining"), Engine(node.address, engine="new"):
        pass
    assert api.get("/livez").status == 200
    assert engine.save(keys_of(engine, tokens_of(2, 2))) == 0
    assert engine.load(keys_of(engine, tokens_of(1, 4))) == 4, "what is there is served"
    undone = post(api, "/v1/drain", {"on": False}).json
    assert (undone["was"], undone["draining"], undone["job"]) == (True, False, None)
    assert engine.save(keys_of(engine, tokens_of(2, 2))) == 2
    eventually(lambda: api.get("/readyz").status == 200)


def test_a_drain_that_is_refused_changes_nothing(
    api: GatewayThread, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvhaven.service.jobs.MOST_RUNNING", 0)
    assert post(api, "/v1/drain").status == 503
    assert engine.save(keys_of(engine, tokens_of(1, 2))) == 2
    assert api.get("/readyz").status == 200


# --- clients that are wrong -----------------------------------------------------------------


def test_no_body_makes_the_api_fail(api: GatewayThread, engine: Engine) -> None:
    prompt = json.dumps(prompt_of(engine, tokens_of(1, 1), ttl_s=1, to="disk"))
    bodies = [
        *("", "{", "null", "[]", "1", '""', "true", "{}", "\x00", '{"a": {"b": {}}}'),
        *('{"state": 1}', '{"wait_s": -1}', '{"wait_s": 1e999}', '{"on": 3}', '{"memory": -1}'),
        *('{"tenant_memory": {"*": "1XB"}}', '{"tenant_memory": {"\\ud800": 1}}'),
        *(f'{{"step_budget_ms": 1{"0" * 400}}}', f'{{"priority_limit": 1{"0" * 400}}}'),
        *(f'{{"max_local_disk_size": "{"9" * 320}.5"}}', '{"a":' * 5000),
        *('{"\\ud800": 1}', '{"log_level": "\\u0000"}', '{"lmcache.kvhaven.": 1}'),
        *(prompt, prompt.replace("token_ids", "tokens"), prompt[:-1], "[" * 5000),
        '{"namespace": "' + "0" * 64 + '", "token_ids": [4294967296], "ttl_s": 1}',
        '{"engine": "\\ud800", "token_ids": [1], "cache_salt": "\\ud800"}',
        '{"engine": "engine#1", "token_ids": [1], "cache_salt": "\\ud800"}',
    ]
    described = api.get("/openapi.json").json["paths"]
    for path, methods in described.items():
        for method in methods.keys() - {"get"}:
            for id_ in ("0" * 16, "%00", "%ff", "x" * 200, "1e3", "-1", "²"):
                name = quote(id_, safe="%")
                real = path.replace("{id}", name).replace("{name}", name)
                for body in bodies if id_ == "0" * 16 else bodies[7:8]:
                    if path == "/v1/chunks":
                        continue
                    headers = {"Authorization": f"Bearer {TOKEN}"}
                    answer = api.get(real, method=method.upper(), headers=headers, body=body)
                    assert answer.status < 500, (method, real, body, answer.body)
                    known = methods[method]["responses"]
                    assert str(answer.status) in known, (method, real, body, answer.body)
    post(api, "/v1/drain", {"on": False})
    eventually(lambda: api.health() == (200, "ok"))
