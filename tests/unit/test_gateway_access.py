# SPDX-License-Identifier: Apache-2.0
"""Who may ask the HTTP API, and for what: names, tokens, TLS, sockets, malformed requests."""

import contextlib
import json
import socket
import ssl
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from kvhaven.config import Settings
from kvhaven.errors import ConfigError
from kvhaven.service.api_process import ApiProcess
from tests.commands import kvhaven
from tests.crash.node import NodeThread, eventually

pytest.importorskip("aiohttp", reason="kvhaven[api] is not installed")

from kvhaven import http_server
from kvhaven.gateway import server
from kvhaven.gateway.access import access_of
from kvhaven.gateway.page import FILES
from tests.gateway_kit import GatewayThread, ask, make_certificate
from tests.unit.test_gateway import ANN, TOKEN, drained, rows_of, used


@pytest.fixture
def api(node: NodeThread) -> Iterator[GatewayThread]:
    with GatewayThread(node.address) as api:
        eventually(lambda: api.health() == (200, "ok"))
        yield api


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LocalHost:8888", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:8888", 200),
        ("kv.example", 200),
        ("evil.example", 421),
        ("localhost.evil.example", 421),
        ("10.0.0.1", 421),
        ("", 421),
        ("[", 421),
    ],
)
def test_only_its_own_names_are_answered(node: NodeThread, host: str, status: int) -> None:
    with GatewayThread(node.address, api_hosts="kv.example") as api:
        eventually(lambda: api.health() == (200, "ok"))
        answer = api.get("/health", headers={"Host": host})
        assert answer.status == status
        assert answer.headers["content-security-policy"].startswith("default-src 'none'")
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert not [name for name in answer.headers if name.startswith("access-control-")]


def test_without_a_token_nothing_can_be_changed(node: NodeThread, api: GatewayThread) -> None:
    with used(node):
        before = rows_of(api, "tenants")
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            for path in ("/stats", "/v1/chunks?all=true", f"/v1/tenants/{ANN.hex()}/quota"):
                assert api.get(path, method=method).status == 403
        assert api.get("/stats", method="OPTIONS").status == 405
        assert rows_of(api, "tenants") == before
    assert api.get("/../etc/passwd").status == 404
    assert api.get("/config", headers={"Content-Length": str(server.MOST_BODY + 1)}).status == 413


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificate(tmp_path_factory.mktemp("tls"))


def test_beyond_loopback_every_request_needs_the_token(
    node: NodeThread, tmp_path: Path, certificate: Path
) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN + "\n")
    files: dict[str, Any] = {"api_token_file": str(token), "api_tls_certificate": str(certificate)}
    tls = ssl.create_default_context(cafile=certificate)

    with GatewayThread(node.address, api_listen="0.0.0.0:0", **files) as api:

        def status(path: str, authorization: str | None, **more: str) -> int:
            given = {} if authorization is None else {"Authorization": authorization}
            return api.get(path, headers=given | more, tls=tls).status

        eventually(lambda: status("/readyz", None) == 200)
        assert api.get("/readyz", tls=tls).json == {"status": "ok", "checks": []}
        for path in ("/health", "/metrics", "/events", "/v1/tenants", "/nothing"):
            for wrong in (None, "", "Bearer ", "Bearer wrong", f"Basic {TOKEN}", TOKEN):
                assert status(path, wrong) == 401, (path, wrong)
        for path in FILES:  # browsers send no token with a page, which has no data
            assert status(path, None) == 200
        assert status("/health", f"Bearer {TOKEN}") == 200
        assert status("/health", f"bearer  {TOKEN} ") == 200
        assert status("/health", "Bearer \xff") == 401
        assert status("/health", f"Bearer {TOKEN}", Host="10.1.2.3") == 200
        assert status("/health", f"Bearer {TOKEN}", Host="evil.example") == 421
        with pytest.raises(OSError, match=r".*"):
            ask(api.url.replace("https", "http").replace("0.0.0.0", "127.0.0.1"), "/health")


def test_the_tokens_for_reading_and_for_metrics_admit_to_nothing_else(
    node: NodeThread, tmp_path: Path, certificate: Path
) -> None:
    files: dict[str, Any] = {"api_tls_certificate": str(certificate)}
    for name in ("api_token_file", "api_read_token_file", "api_metrics_token_file"):
        files[name] = str(tmp_path / name)
        (tmp_path / name).write_text(f"{name}-0123456789")
    tls = ssl.create_default_context(cafile=certificate)
    with GatewayThread(node.address, api_listen="0.0.0.0:0", **files) as api:

        def status(name: str, path: str, method: str = "GET") -> int:
            headers = {"Authorization": f"Bearer {name}-0123456789"}
            return api.get(path, method=method, headers=headers, body="{}", tls=tls).status

        def checks(name: str) -> list[object]:
            headers = {"Authorization": f"Bearer {name}-0123456789"}
            found: list[object] = api.get("/readyz", headers=headers, tls=tls).json["checks"]
            return found

        eventually(lambda: status("api_token_file", "/health") == 200)
        for path in ("/metrics", f"/services/{Path(node.address).stem}/metrics"):
            for name in ("api_token_file", "api_read_token_file", "api_metrics_token_file"):
                assert status(name, path) == 200, (name, path)
        for path in ("/health", "/stats", "/config", "/v1/requests", "/services/x/stats"):
            assert status("api_read_token_file", path) in {200, 404}, path
            assert status("api_metrics_token_file", path) == 401, path
        for name, admitted in (("api_token_file", 202), ("api_read_token_file", 401)):
            assert status(name, "/v1/flush", "POST") == admitted
        for path in ("/v1/flush", "/metrics"):
            assert status("api_metrics_token_file", path, "POST") in {401, 405}
        assert checks("api_read_token_file")
        assert not checks("api_metrics_token_file")


def test_beyond_loopback_without_token_and_tls_it_does_not_start(
    tmp_path: Path, short_dir: Path, certificate: Path
) -> None:
    token, short = tmp_path / "token", tmp_path / "short"
    token.write_text(TOKEN)
    short.write_text("secret")
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "api_token_file and api_tls_certificate are not set"),
        ({"api_token_file": str(token)}, "api_tls_certificate is not set"),
        ({"api_tls_certificate": str(certificate)}, "api_token_file is not set"),
        ({"api_token_file": str(short)}, "holds 6 bytes; expected 16 or more"),
        ({"api_tls_certificate": str(token), "api_token_file": str(token)}, "PEM file"),
    ]
    for settings, words in cases:
        with pytest.raises(ConfigError, match=words) as refused:
            access_of(Settings(api_listen="0.0.0.0:8888", **settings))
        assert "secret" not in str(refused.value)
    for wrong in ("unix:relative", "dns://name:1", "host:port"):
        with pytest.raises(ConfigError, match="api_listen"):
            access_of(Settings(api_listen=wrong))
    for command in (("api",), ("serve",)):
        option = "--listen" if command == ("api",) else "--api-listen"
        socket_path = str(short_dir / "s.sock")
        said = kvhaven(*command, option, "0.0.0.0:8888", "--socket", socket_path, status=2)
        assert said.startswith("kvhaven: api_listen: 0.0.0.0:8888 can be reached by other machines")
        assert said.count("\n") == 1
    assert list(short_dir.iterdir()) == []


def test_without_aiohttp_a_service_with_an_api_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvhaven.service.api_process.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'kvhaven\[api\]'"):
        ApiProcess(Settings(api_listen="127.0.0.1:8888"), "/unused")


def test_a_unix_socket_is_for_its_user_alone(node: NodeThread, short_dir: Path) -> None:
    path = short_dir / "api.sock"
    with GatewayThread(node.address, api_listen=f"unix:{path}") as api:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        eventually(lambda: api.health() == (200, "ok"))
        said = kvhaven(
            "api", "--listen", f"unix:{path}", "--service-address", node.address, status=2
        )
        assert "another process listens" in said
    assert not path.exists()


def test_a_header_that_does_not_come_ends_its_connection(
    node: NodeThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "HEADER_S", 0.2)
    with GatewayThread(node.address) as api:
        eventually(lambda: api.health() == (200, "ok"))
        where = urlsplit(api.url)
        for began in (b"", b"GET /health HTTP/1.1\r\nHost: local"):
            with socket.create_connection((where.hostname or "", where.port or 0), 30) as sock:
                sock.sendall(began)
                drained(sock)


def test_an_address_in_use_is_said_in_one_line(node: NodeThread) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        said = kvhaven("api", "--listen", address, "--socket", node.address, status=2)
    assert said.startswith(f"kvhaven: api_listen: cannot listen at {address}")
    assert said.count("\n") == 1


def test_a_request_that_no_parser_takes_changes_nothing(api: GatewayThread) -> None:
    where = urlsplit(api.url)
    for raw in (
        b"\x00\x01\x02\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 20_000 + b"\r\n\r\n",
        b"GET /v1/tenants?cursor=%ff%00\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ):
        with socket.create_connection((where.hostname or "", where.port or 0), 30) as sock:
            sock.sendall(raw)
            with contextlib.suppress(ConnectionError):
                assert sock.recv(1 << 16).split(b" ")[1:2] == [b"400"]
    assert api.health() == (200, "ok")
    json.loads(api.get("/health").body)
