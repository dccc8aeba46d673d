# SPDX-License-Identifier: Apache-2.0
"""One API for all services of a node: what it shows of each, and services that come and go."""

import asyncio
import contextlib
import errno
import os
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvhaven.cli.address import find_socket
from kvhaven.config import Settings
from tests.crash.engine import Engine, prompt
from tests.crash.node import NodeThread, eventually, flush

pytest.importorskip("aiohttp", reason="kvhaven[api] is not installed")

from kvhaven.gateway import app, services
from tests.gateway_kit import GatewayThread, ask, make_certificate, post, steerable, streams

FIRST, OTHER = "service", "engine-0123456789abcdef"
BELOW = f"/services/{OTHER}"


def node_at(folder: Path, name: str) -> NodeThread:
    """Return a service with nothing but memory."""
    return NodeThread(folder / f"{name}.sock", local_disk=None, remote_url=None)


@pytest.fixture
def nodes(short_dir: Path) -> Iterator[tuple[NodeThread, NodeThread]]:
    with node_at(short_dir, FIRST) as first, node_at(short_dir, OTHER) as other:
        yield first, other


@pytest.fixture
def api(nodes: tuple[NodeThread, NodeThread], short_dir: Path) -> Iterator[GatewayThread]:
    with steerable(nodes[0], short_dir) as api:
        eventually(lambda: shown(api) == {FIRST: "ok", OTHER: "ok"})
        yield api


def rows(api: GatewayThread, below: str = "") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = api.get(f"{below}/v1/services").json["rows"]
    return found


def shown(api: GatewayThread) -> dict[str, str]:
    return {row["id"]: row["status"] for row in rows(api)}


def test_every_path_exists_for_each_service(
    nodes: tuple[NodeThread, NodeThread], api: GatewayThread
) -> None:
    assert [(row["path"], row["here"]) for row in rows(api)] == [("/", True), (f"{BELOW}/", False)]
    assert [row["here"] for row in rows(api, BELOW)] == [False, True]
    with Engine(nodes[1].address, model="other") as engine:
        engine.save(prompt(5, 5))
        flush(nodes[1].address)
        eventually(lambda: api.get(f"{BELOW}/stats").json["memory"]["idle"] > 0)
        eventually(lambda: [row["engines"] for row in rows(api)] == [0, 1])
        engines = api.get(f"{BELOW}/inference_info").json["engines"]
        assert [one["model"] for one in engines] == ["other"]
        assert api.get("/inference_info").json["engines"] == []
        assert api.get("/stats").json["memory"]["idle"] == 0
        one, two = (api.get(f"{below}/metrics").body for below in ("", BELOW))
        assert (b"kvhaven_engines 0" in one, b"kvhaven_engines 1" in two) == (True, True)
    assert api.get(f"{BELOW}/").body == api.get("/").body
    assert api.get(f"{BELOW}/dashboard.js").status == 200
    assert api.get(BELOW).status == 404
    for path in ("/services/engine-x/stats", "/services/../stats", f"{BELOW}{BELOW}/stats"):
        assert api.get(path).status == 404


def test_changes_reach_the_service_that_is_named(
    nodes: tuple[NodeThread, NodeThread], api: GatewayThread
) -> None:
    assert nodes
    change = {"promote_deadline_ms": 1234}

    def deadlines() -> list[int]:
        found = []
        for below in ("", BELOW):
            rows = api.get(f"{below}/config").json["settings"]
            found += [row["value"] for row in rows if row["name"] == "promote_deadline_ms"]
        return found

    before = deadlines()
    assert api.get(f"{BELOW}/config", method="POST", body="{}").status == 401
    assert post(api, f"{BELOW}/config", change).status == 200
    assert deadlines() == [before[0], 1234]
    assert before == [before[0]] * 2 != deadlines()


def test_services_come_and_go(
    nodes: tuple[NodeThread, NodeThread],
    api: GatewayThread,
    short_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert nodes
    (short_dir / "engine-stale.sock").write_bytes(b"")
    with node_at(short_dir, "engine-late"):
        eventually(lambda: shown(api).get("engine-late") == "ok")
    eventually(lambda: shown(api).get("engine-late") == "silent")
    assert api.get("/services/engine-late/livez").status == 503
    assert api.health() == (200, "ok")
    with node_at(short_dir, "engine-late"):
        eventually(lambda: shown(api).get("engine-late") == "ok")
    monkeypatch.setattr(services, "_GONE_S", 0.1)
    eventually(lambda: shown(api) == {FIRST: "ok", OTHER: "ok"})
    assert api.get("/services/engine-late/livez").status == 404


def test_the_api_stops_while_it_forgets_a_service(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgetting, run = threading.Event(), services._run

    async def ends_slowly(gateway: app.Gateway) -> None:
        try:
            await run(gateway)
        finally:
            forgetting.set()
            await asyncio.sleep(3600)  # until it is cancelled again

    monkeypatch.setattr(services, "_run", ends_slowly)
    monkeypatch.setattr(services, "_GONE_S", 0.1)
    with node_at(short_dir, FIRST) as first, steerable(first, short_dir) as api:
        with node_at(short_dir, "engine-late"):
            eventually(lambda: shown(api).get("engine-late") == "ok")
        assert forgetting.wait(60)


def test_a_look_around_that_fails_is_repeated(
    nodes: tuple[NodeThread, NodeThread],
    api: GatewayThread,
    short_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert nodes
    failed = threading.Event()

    def fail(_: str) -> bool:
        failed.set()
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    (short_dir / "engine-stale.sock").write_bytes(b"")
    monkeypatch.setattr(services, "listens", fail)
    assert failed.wait(60)
    monkeypatch.undo()
    with node_at(short_dir, "engine-late"):
        eventually(lambda: shown(api).get("engine-late") == "ok")
    assert api.health() == (200, "ok")


def test_streams_of_all_services_share_one_limit(
    nodes: tuple[NodeThread, NodeThread], api: GatewayThread
) -> None:
    assert nodes
    with streams(api.url, app.MOST_STREAMS) as opened:
        assert len(opened) == app.MOST_STREAMS
        eventually(lambda: ask(api.url, f"{BELOW}/events").status == 503)


def test_beyond_loopback_the_token_is_needed_for_every_service(
    nodes: tuple[NodeThread, NodeThread], short_dir: Path
) -> None:
    (short_dir / "token").write_text("0123456789abcdef-token")
    certificate = str(make_certificate(short_dir))
    trusting = ssl.create_default_context(cafile=certificate)
    settings: dict[str, Any] = {
        "api_listen": "0.0.0.0:0",
        "api_token_file": str(short_dir / "token"),
        "api_tls_certificate": certificate,
    }
    token = {"Authorization": "Bearer 0123456789abcdef-token"}
    with GatewayThread(nodes[0].address, **settings) as api:

        def status(path: str, headers: dict[str, str] | None = None) -> int:
            return ask(api.url, path, headers=headers, tls=trusting).status

        eventually(lambda: status(f"{BELOW}/livez") == 200)
        assert [status(f"{BELOW}{path}") for path in ("/", "/stats", "/v1/services")] == [
            200,
            401,
            401,
        ]
        assert status(f"{BELOW}/stats", token) == 200


def test_the_api_of_several_embedded_services_begins_with_one_that_runs(short_dir: Path) -> None:
    settings = Settings(runtime_dir=str(short_dir))
    (short_dir / "engine-0.sock").write_bytes(b"")
    with contextlib.ExitStack() as stack:
        for name in ("engine-1", "engine-2"):
            stack.enter_context(node_at(short_dir, name))
        assert find_socket(settings, None, several=True) == str(short_dir / "engine-1.sock")
        assert find_socket(settings, None) == str(short_dir / "service.sock")
