# SPDX-License-Identifier: Apache-2.0
"""The HTTP API over real sockets, with a real service: answers, lists, health, streams, limits."""

import contextlib
import os
import select
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from examples.demo.processes import free_port
from kvhaven.client.control import connect
from kvhaven.client.scheduler import Asking
from kvhaven.config import Settings
from kvhaven.keys import tenant_id
from kvhaven.protocol import OBSERVE
from kvhaven.service.snapshot import ServiceSnapshot
from kvhaven.types import NO_TENANT, NamespaceDigest
from tests.crash.engine import CHUNK_SIZE, MODEL, SHARD_BYTES, Engine, prompt
from tests.crash.node import MIB, NodeProcess, NodeThread, eventually, flush, settled
from tests.unit.catalog_kit import namespace_of

pytest.importorskip("aiohttp", reason="kvhaven[api] is not installed")

from kvhaven import http_server
from kvhaven.gateway import server, views
from kvhaven.gateway.page import FILES
from tests.gateway_kit import GatewayThread, ask, streams

ANN, BEN = tenant_id("ann"), tenant_id("ben")
TOKEN = "0123456789abcdef-token"
LISTS = ("engines", "namespaces", "requests", "tenants", "tiers")
EMPTY_LISTS = ("jobs", "pins", "plugins")
JSON_PATHS = (
    *(
        "/health",
        "/livez",
        "/readyz",
        "/stats",
        "/config",
        "/inference_info",
        "/v1/history",
        "/v1/curve",
        "/v1/services",
    ),
    *(f"/v1/{name}" for name in (*LISTS, *EMPTY_LISTS)),
)


@pytest.fixture
def node(short_dir: Path) -> Iterator[NodeThread]:
    settings = {"local_disk": str(short_dir / "disk"), "remote_url": None}
    with NodeThread(short_dir / "s.sock", **settings) as node:
        yield node
        node.check()


@pytest.fixture
def api(node: NodeThread) -> Iterator[GatewayThread]:
    with GatewayThread(node.address) as api:
        eventually(lambda: api.health() == (200, "ok"))
        yield api


@contextlib.contextmanager
def used(node: NodeThread) -> Iterator[Engine]:
    """Attach an engine that has saved and loaded chunks of two tenants and of none."""
    with Engine(node.address, 2) as engine:
        for number, tenant in enumerate((ANN, BEN, NO_TENANT), 2):
            keys = prompt(tenant, number)
            engine.save(keys, tenant=tenant)
            eventually(lambda k=keys, t=tenant: engine.load(k, t) == len(k))  # type: ignore[misc]
        flush(node.address)
        yield engine


def rows_of(api: GatewayThread, kind: str, limit: int = 100) -> list[dict[str, Any]]:
    """Return all rows of a list, page by page."""
    rows: list[dict[str, Any]] = []
    cursor: str | None = ""
    while cursor is not None:
        page = api.get(f"/v1/{kind}?limit={limit}&cursor={cursor}").json
        assert len(page["rows"]) <= limit
        rows += page["rows"]
        cursor = page["next"]
    return rows


def settled_stats(api: GatewayThread, node: NodeThread) -> dict[str, Any]:
    """Return the statistics when nothing is under way and a snapshot was taken since."""
    settled(node.address)
    before = first_event(api)["id"]
    eventually(lambda: first_event(api)["id"] != before)
    stats: dict[str, Any] = api.get("/stats").json
    return stats


def shown(api: GatewayThread) -> list[int]:
    """Return the numbers of chunks in memory and on disk that the metrics show."""
    lines = api.get("/metrics").body.decode().splitlines()
    return [int(float(one.split()[-1])) for one in lines if one.startswith("kvhaven_chunks{")]


def first_event(api: GatewayThread) -> dict[str, str]:
    """Return the fields of the first event of a stream."""
    where = urlsplit(api.url)
    assert where.hostname is not None
    assert where.port is not None
    with socket.create_connection((where.hostname, where.port), 30) as sock:
        sock.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with sock.makefile("rb") as lines:
            fields: dict[str, str] = {}
            while "data" not in fields:
                name, _, value = lines.readline().decode().rstrip("\n").partition(": ")
                fields[name] = value
            return fields


# --- answers --------------------------------------------------------------------------------


def test_every_answer_is_as_the_description_says(node: NodeThread, api: GatewayThread) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    described = api.get("/openapi.json").json
    assert described["openapi"] == "3.1.0"
    validator = jsonschema.Draft202012Validator
    for schema in described["components"]["schemas"].values():
        validator.check_schema(schema)

    def check(answer: Any, path: str) -> None:
        responses = described["paths"][path]["get"]["responses"]
        schema = responses[str(answer.status)]["content"]["application/json"]["schema"]
        whole = schema | {"components": described["components"]}
        validator(whole).validate(answer.json)

    with used(node):
        for path in JSON_PATHS:
            answer = api.get(path)
            assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
            check(answer, path)
        for name in LISTS:
            check(api.get(f"/v1/{name}?limit=0"), f"/v1/{name}")
            assert rows_of(api, name), name
    read = {path for path, methods in described["paths"].items() if "get" in methods}
    others = {"/v1/jobs/{id}", "/v1/chunks/{id}", "/metrics", "/openapi.json", "/events", *FILES}
    assert read == {*JSON_PATHS, *others}
    changes = {
        (method, path): operation["security"]
        for path, methods in described["paths"].items()
        for method, operation in methods.items()
        if method != "get"
    }
    assert set(map(str, changes.values())) == {"[{'token': []}]"}
    assert {path for _, path in changes} == {
        *("/config", "/v1/tenants/{id}/quota", "/v1/chunks", "/v1/pins", "/v1/pins/{id}"),
        *("/v1/lookup", "/v1/prefetch", "/v1/verify", "/v1/move", "/v1/tiers/{name}"),
        *("/v1/flush", "/v1/drain"),
    }


def test_statistics_count_what_was_done_and_invent_nothing(
    node: NodeThread, api: GatewayThread
) -> None:
    assert api.get("/stats").json["hit_rate"] is None
    with used(node) as engine:
        assert engine.load(prompt("unknown", 3)) == 0
        before = settled_stats(api, node)
        assert before["cache_hits"] == before["chunks"]["resident"] >= 9
        assert before["cache_misses"] >= 3
        asked = before["cache_hits"] + before["cache_misses"]
        assert before["chunks"]["asked"] == asked
        assert before["hit_rate"] == before["cache_hits"] / asked
        assert before["total_cached_tokens"] == CHUNK_SIZE * before["chunks"]["resident"]
        for name in ("avg_prefill_time_ms", "avg_save_time_ms", "avg_load_time_ms"):
            assert before[name] is None
        memory = before["memory"]
        assert sum(memory.values()) == 2 * memory["capacity"]
        (disk,) = before["tiers"]
        used_bytes = memory["idle"] + disk["used_bytes"]
        assert before["storage_used_gb"] == pytest.approx(used_bytes / 1e9)
        with connect(node.address) as control:
            control.clear(tier="memory")
        assert engine.load(prompt(ANN, 2), ANN) == 2
        after = settled_stats(api, node)
        # A chunk that was prefetched before it was asked for is one hit, not two.
        assert after["cache_hits"] - before["cache_hits"] == 2
        assert after["cache_misses"] == before["cache_misses"]


def test_leased_memory_is_counted_apart_also_after_a_clear(
    node: NodeThread, api: GatewayThread
) -> None:
    def memory() -> dict[str, int]:
        states: dict[str, int] = api.get("/stats").json["memory"]
        return states

    with used(node) as engine:
        lease = engine.scheduler.acquire(prompt(BEN, 3), BEN)
        assert lease is not None
        eventually(lambda: memory()["leased"])
        with connect(node.address) as control:
            control.clear(tier="memory")
        eventually(lambda: memory()["idle"] == 0)
        states = memory()
        assert states["doomed"] == 0
        assert states["leased"] + states["free"] == states["capacity"]
        for rank in engine.ranks:
            rank.load(lease, prompt(BEN, 3))
        eventually(lambda: memory()["free"] == memory()["capacity"])


def test_the_tokens_in_memory_are_exact_or_unknown() -> None:
    from kvhaven.gateway.views import tokens_in_memory
    from kvhaven.service.snapshot import NamespaceRow

    def row(chunks: int, tokens: int | None) -> NamespaceRow:
        return NamespaceRow("00", None, None, None, tokens, {"memory": chunks}, {"memory": 1})

    assert tokens_in_memory([], 0) == 0
    assert tokens_in_memory([row(3, 256), row(2, 512), row(0, None)], 0) == 3 * 256 + 2 * 512
    assert tokens_in_memory([row(3, 256), row(2, 256)], 1) == 4 * 256
    assert tokens_in_memory([row(3, 256), row(2, 512)], 1) is None
    assert tokens_in_memory([row(3, 256), row(2, None)], 0) is None


def test_settings_tell_their_origin_and_no_secrets(short_dir: Path) -> None:
    port = free_port()
    with NodeProcess(
        short_dir / "s.sock",
        short_dir / "log",
        api_listen=f"127.0.0.1:{port}",
        remote_url="redis://user:hush@127.0.0.1:1/0",
        tenant_memory="my-salt=1MiB",
    ):
        url = f"http://127.0.0.1:{port}"
        answer = eventually(lambda: answered(url, "/config"))
        rows = {row["name"]: row for row in answer.json["settings"]}
        assert rows.keys() == set(Settings.__struct_fields__)
        assert rows["api_listen"]["origin"] == "KVHAVEN_API_LISTEN"
        assert rows["max_local_cpu_size"]["value"] == 16 * MIB
        assert (rows["peers"]["origin"], rows["peers"]["changes"]) == ("default", "restart")
        assert rows["chunk_size"]["changes"] == "next_attach"
        assert b"hush" not in answer.body
        assert b"my-salt" not in answer.body
        tag = answer.headers["etag"]
        again = ask(url, "/config", headers={"If-None-Match": tag})
        assert (again.status, again.body, again.headers["etag"]) == (304, b"", tag)


def answered(url: str, path: str) -> Any:
    """Return the answer with status 200; None without one."""
    try:
        answer = ask(url, path)
    except OSError:
        return None
    return answer if answer.status == 200 else None


def test_metrics_are_what_prometheus_reads(node: NodeThread, api: GatewayThread) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    with used(node) as engine:
        # All is saved and on disk in the snapshot that is shown; then the lease is, too.
        eventually(lambda: shown(api) == [9, 9])
        engine.scheduler.acquire(prompt(ANN, 2), ANN)
        eventually(lambda: api.get("/stats").json["memory"]["leased"])
        answer = api.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {f.name: f for f in parser.text_string_to_metric_families(answer.body.decode())}
    assert all(
        f.documentation and f.type in {"counter", "gauge", "histogram"} for f in families.values()
    )

    def values(name: str) -> dict[tuple[str, ...], float]:
        samples = families[name].samples
        return {tuple(sample.labels.values()): sample.value for sample in samples}

    states = values("kvhaven_memory_bytes")
    assert sum(states.values()) == values("kvhaven_memory_capacity_bytes")[()]
    assert states["leased",] > 0
    assert values("kvhaven_chunks") == {("memory",): 9, ("disk",): 9}
    assert values("kvhaven_engines") == {(): 1}
    assert values("kvhaven_tier_up") == {("disk",): 1}
    assert values("process_open_fds")[()] > 3
    ((labels, one),) = values("kvhaven_namespace_info").items()
    assert (MODEL in labels, one) == (True, 1)
    assert values("kvhaven_http_requests")["/stats", "200"] >= 1


# --- lists ----------------------------------------------------------------------------------


def test_pages_have_every_tenant_once_while_others_come_and_go(
    node: NodeThread, api: GatewayThread
) -> None:
    names = {f"t{number}": tenant_id(f"t{number}") for number in range(60)}
    with Engine(node.address) as engine:
        for name, tenant in names.items():
            engine.save(prompt(name, 1), tenant=tenant)
        eventually(lambda: len(rows_of(api, "tenants")) == 60)
        ids = sorted(tenant.hex() for tenant in names.values())
        assert [row["id"] for row in rows_of(api, "tenants", 7)] == ids
        page = api.get("/v1/tenants?limit=25").json
        assert [row["id"] for row in page["rows"]] == ids[:25]
        # The row that the cursor names is cleared, and new ones appear on both sides of it.
        gone = bytes.fromhex(ids[24])
        with connect(node.address) as control:
            control.clear(tenant=next(t for t in names.values() if t == gone))
        for number in range(8):
            engine.save(prompt(f"n{number}", 1), tenant=tenant_id(f"n{number}"))
        eventually(lambda: len(rows_of(api, "tenants")) == 67)
        rest = []
        cursor = page["next"]
        while cursor is not None:
            page = api.get(f"/v1/tenants?limit=10&cursor={cursor}").json
            rest += [row["id"] for row in page["rows"]]
            cursor = page["next"]
        assert rest == sorted(set(rest))
        assert set(rest) >= set(ids[25:])
        assert min(rest) > ids[24]


def test_pages_have_every_namespace_once(node: NodeThread, api: GatewayThread) -> None:
    digests = set()
    for number in range(230):
        namespace = namespace_of(f"n{number}")
        digests.add(NamespaceDigest(namespace.digest).hex())
        node.call(lambda n=namespace: node.service.catalog.add_namespace(n))  # type: ignore[misc]
    for limit in (1, 99, 100):
        found = [row["id"] for row in rows_of(api, "namespaces", limit)]
        assert found == sorted(digests)


def test_engines_are_listed_with_their_processes(node: NodeThread, api: GatewayThread) -> None:
    with used(node) as engine:
        (row,) = rows_of(api, "engines")
        assert (row["model"], row["world_size"], row["attached_ranks"]) == (MODEL, 2, 2)
        assert row["scheduler_attached"]
        assert row["namespace"] == engine.ranks[0].attach.namespace.hex()
        assert [row[name] for name in ("dtype", "device", "block_tokens")] == [None] * 3
        assert api.get("/inference_info").json["engines"] == [row]
    eventually(lambda: not rows_of(api, "engines"))
    fields = {"device.device_type": "hpu", "cache.block_size": "128"}
    with Engine(node.address, more_fields=fields):
        (row,) = rows_of(api, "engines")
        assert (row["device"], row["block_tokens"], row["chunk_tokens"]) == ("hpu", 128, CHUNK_SIZE)


def test_ranks_with_the_same_shard_save_it_once_and_each_load_it(
    node: NodeThread, api: GatewayThread
) -> None:
    with Engine(node.address, 2, heads=1, model="shared") as engine:
        keys = prompt("a", 3)
        engine.save(keys)
        assert engine.load(keys) == 3

        def told() -> tuple[int, int]:
            (row,) = rows_of(api, "engines")
            return row["saved_bytes"], row["loaded_bytes"]

        eventually(lambda: told() == (3 * SHARD_BYTES, 6 * SHARD_BYTES), 30)


def test_engines_tell_what_they_asked_for_loaded_saved_and_could_not_save(
    node: NodeThread, api: GatewayThread
) -> None:
    def told() -> tuple[int, ...]:
        (row,) = (row for row in rows_of(api, "engines") if row["id"].startswith("engine#"))
        return (
            *(row["asked_tokens"], row["found_tokens"]),
            *(row["loaded_bytes"], row["saved_bytes"], row["skipped_tokens"]),
        )

    chunk = 2 * SHARD_BYTES  # on both ranks together
    with Engine(node.address, 2) as engine, Engine(node.address, engine="idle"):
        assert told() == (0, 0, 0, 0, 0)
        keys = prompt("a", 5)
        engine.save(keys)
        eventually(lambda: told() == (0, 0, 0, 5 * chunk, 0))
        assert engine.load(keys[:3]) == 3
        eventually(lambda: told() == (30, 30, 3 * chunk, 5 * chunk, 0))
        for computed in (0, 20):
            asking = Asking(CHUNK_SIZE * 5 + 3, computed, "r")
            lease = engine.scheduler.acquire(keys[computed // CHUNK_SIZE :], about=asking)
            assert lease is not None
            engine.scheduler.client.release([lease.lease_id])  # nothing is loaded
        eventually(lambda: told() == (136, 130, 3 * chunk, 5 * chunk, 0))
        with connect(node.address) as control:
            control.limit(ANN, 0, None)
        engine.save(prompt("b", 4), tenant=ANN)
        eventually(lambda: told()[2:] == (3 * chunk, 5 * chunk, 4 * CHUNK_SIZE))
        node.service._saves.draining = True
        engine.save(prompt("c", 2))
        eventually(lambda: told()[2:] == (3 * chunk, 5 * chunk, 6 * CHUNK_SIZE))
        (idle,) = (row for row in rows_of(api, "engines") if row["id"].startswith("idle#"))
        assert (idle["asked_tokens"], idle["saved_bytes"], idle["skipped_tokens"]) == (0, 0, 0)


@pytest.mark.parametrize(
    "query",
    ["limit=0", "limit=101", "limit=-1", "limit=x", "limit=٣", f"cursor={'a' * 257}", "cursor=zz"],
)
def test_a_page_that_cannot_be_is_refused_and_the_next_is_served(
    node: NodeThread, api: GatewayThread, query: str
) -> None:
    from urllib.parse import quote

    answer = api.get(f"/v1/tenants?{quote(query, safe='=')}")
    assert answer.status == 400
    assert answer.json["error"].split(":")[0] in {"limit", "cursor", "after"}
    assert api.get("/v1/tenants").status == 200


# --- health ---------------------------------------------------------------------------------


def test_a_killed_service_is_unhealthy_and_healthy_when_it_is_back(short_dir: Path) -> None:
    node = NodeProcess(short_dir / "s.sock", short_dir / "log")
    with GatewayThread(node.address) as api:
        assert api.health() == (503, "degraded")  # nobody has answered yet
        with node:
            eventually(lambda: api.health() == (200, "ok"))
            node.kill()
            eventually(lambda: api.health() == (503, "degraded"))
            for path in ("/livez", "/readyz", "/stats", "/metrics", "/config", "/v1/tenants"):
                assert api.get(path).status == 503, path
            node.start()
            eventually(lambda: api.health() == (200, "ok"))
            assert api.get("/v1/tenants").status == 200
            with node.frozen():
                eventually(lambda: api.health() == (503, "degraded"))
            eventually(lambda: api.health() == (200, "ok"))


def test_a_stopping_service_says_so(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "SILENT_S", 300.0)  # a busy machine may let 3 s pass
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(NodeThread(short_dir / "s.sock"))
        with GatewayThread(node.address) as api:
            eventually(lambda: api.health() == (200, "ok"))
            stack.close()
            assert eventually(lambda: dict([api.health()]).get(503)) == "stopping"
            assert api.get("/livez").status == 200


def test_a_tier_that_is_off_degrades_but_serves(short_dir: Path) -> None:
    with (
        NodeThread(short_dir / "s.sock", local_disk="/proc/none") as node,
        GatewayThread(node.address) as api,
    ):
        eventually(lambda: api.health() == (200, "degraded"))
        failed = [check for check in api.get("/health").json["checks"] if not check["ok"]]
        assert [check["name"] for check in failed] == ["tier disk"]
        assert failed[0]["detail"].startswith("offline")


def test_a_service_without_snapshots_is_told_from_one_that_is_gone(
    node: NodeThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvhaven.service.membership.FEATURES", 0)
    assert OBSERVE
    with GatewayThread(node.address) as api:
        eventually(lambda: "its version has no HTTP API" in api.get("/health").body.decode())
        assert api.health()[0] == 503


def test_a_service_that_cannot_be_steered_is_observed(
    node: NodeThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvhaven.service.membership.FEATURES", OBSERVE)
    with GatewayThread(node.address) as api:
        eventually(lambda: api.health() == (200, "ok"))
        answer = api.get("/config")
        assert answer.status == 503
        assert "its version cannot be steered" in answer.json["error"]


# --- streams --------------------------------------------------------------------------------


def test_a_stream_has_a_new_snapshot_in_each_event(api: GatewayThread) -> None:
    import msgspec

    seen = set()
    for _ in range(3):
        event = first_event(api)
        assert event["event"] == "snapshot"
        assert msgspec.json.decode(event["data"], type=ServiceSnapshot).pid == os.getpid()
        seen.add(event["id"])
        eventually(lambda i=event["id"]: first_event(api)["id"] != i)  # type: ignore[misc]
    assert len(seen) == 3


def test_clients_that_do_not_read_are_dropped_and_others_are_served(api: GatewayThread) -> None:
    with streams(api.url, http_server.MOST_CONNECTIONS + 50) as opened:
        eventually(lambda: served(api))
        for sock in opened:
            eventually(lambda s=sock: hung_up(s))  # type: ignore[misc]
        assert served(api)
    eventually(lambda: api.health() == (200, "ok"))


def served(api: GatewayThread) -> bool:
    try:
        return api.health() == (200, "ok")
    except OSError:  # all connections are taken, for a moment
        return False


def hung_up(sock: socket.socket) -> bool:
    """Return whether the other side has closed the connection, without reading."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return bool(poll.poll(0))


def drained(sock: socket.socket) -> None:
    """Read until the other side has closed the connection."""
    with contextlib.suppress(ConnectionError):
        while sock.recv(1 << 16):
            pass


# --- changes --------------------------------------------------------------------------------


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    return path


def test_quotas_change_with_the_token(node: NodeThread, token_file: Path) -> None:
    with GatewayThread(node.address, api_token_file=str(token_file)) as api, used(node):

        def put(body: str, authorization: str = f"Bearer {TOKEN}", tenant: str = ANN.hex()) -> Any:
            headers = {"Authorization": authorization}
            path = f"/v1/tenants/{tenant}/quota"
            return api.get(path, method="PUT", headers=headers, body=body)

        def quotas() -> Any:
            (row,) = [row for row in rows_of(api, "tenants") if row["id"] == ANN.hex()]
            return row["quotas"]

        assert put('{"memory": 1048576}').json["memory"] == MIB
        assert put('{"disk": 2097152}').json["memory"] == MIB
        assert quotas() == {"memory": MIB, "disk": 2 * MIB}
        assert put('{"memory": null}').json["memory"] is None
        assert quotas() == {"disk": 2 * MIB}
        for wrong in ("", "[]", '{"memory": -1}', '{"memory": "1MiB"}', '{"memori": 1}', "{"):
            assert put(wrong).status == 400
        assert put("{}", tenant="xyz").status == 400
        assert put("x" * (server.MOST_BODY + 1)).status == 413
        for authorization in ("", "Bearer wrong", TOKEN):
            assert put('{"disk": null}', authorization).status == 401
        assert quotas() == {"disk": 2 * MIB}


def test_chunks_are_counted_first_and_dropped_with_the_token(
    node: NodeThread, token_file: Path
) -> None:
    with GatewayThread(node.address, api_token_file=str(token_file)) as api, used(node) as engine:
        eventually(lambda: api.health() == (200, "ok"))
        settled(node.address)

        def delete(query: str, token: str = TOKEN) -> Any:
            headers = {"Authorization": f"Bearer {token}"}
            return api.get(f"/v1/chunks?{query}", method="DELETE", headers=headers)

        namespace = engine.ranks[0].attach.namespace.hex()
        for query, chunks in (
            ("all=true", 18),
            (f"namespace={namespace}", 18),
            (f"namespace={namespace}&tenant={ANN.hex()}", 4),
            (f"tenant={BEN.hex()}&tier=disk", 3),
            ("tier=memory", 9),
        ):
            counted = delete(f"{query}&dry_run=true").json
            assert (counted["chunks"], counted["dry_run"]) == (chunks, True), query
        for wrong in (
            *("", "dry_run=true", "all=false", f"all=true&tenant={ANN.hex()}", "all=1"),
            *("tier=tape", "tier=", "tenant=", "tenant=zz", f"namespace={'0' * 64}", "older=1"),
        ):
            assert delete(wrong).status == 400, wrong
        assert delete("all=true", "wrong").status == 401
        counted = delete(f"tenant={ANN.hex()}&dry_run=true").json
        dropped = delete(f"tenant={ANN.hex()}").json
        assert dropped == counted | {"dry_run": False}
        assert engine.load(prompt(ANN, 2), ANN) == 0
        assert engine.load(prompt(BEN, 3), BEN) == 3
        eventually(lambda: len(rows_of(api, "tenants")) == 1)


def test_a_unix_socket_is_proof_enough_for_a_change(node: NodeThread, short_dir: Path) -> None:
    listen = f"unix:{short_dir / 'api.sock'}"
    with GatewayThread(node.address, api_listen=listen) as api, used(node):
        eventually(lambda: api.health() == (200, "ok"))
        assert api.get("/v1/chunks?tier=memory", method="DELETE").json["chunks"] == 9
