# SPDX-License-Identifier: Apache-2.0
"""For tests of the HTTP API: a real gateway in a thread, and plain clients of it."""

import asyncio
import contextlib
import http.client
import json
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import msgspec
import pytest

from kvhaven.catalog.actions import TierName
from kvhaven.config import Settings
from kvhaven.gateway.access import access_of
from kvhaven.gateway.main import serving
from kvhaven.gateway.observer import Observer
from kvhaven.gateway.plugins import PluginSettings
from kvhaven.keys import Extras, KeyChain
from kvhaven.service.tier_setup import make_tiers
from kvhaven.testing.faulty_tier import Faults, FaultyTier
from kvhaven.tiers.base import Tier
from kvhaven.types import ChunkKey
from tests.crash.engine import CHUNK_SIZE, Engine
from tests.crash.node import NodeProcess, NodeThread, eventually
from tests.metrics_kit import check_metrics

TOKEN = "0123456789abcdef-token"
_DISK = TierName("disk")


@contextlib.contextmanager
def tiered_node(short_dir: Path) -> Iterator[NodeThread]:
    """Run a service with a disk and a shared directory; verify its counters at the end."""
    share = short_dir / "share"
    share.mkdir()
    settings = {"local_disk": str(short_dir / "disk"), "remote_url": f"file://{share}"}
    with NodeThread(short_dir / "s.sock", **settings) as node:
        yield node
        node.check()


class FaultyNode(NodeThread):
    """One whose disk has these faults; `faults` may be changed while it runs."""

    def __init__(self, socket: Path, **settings: Any) -> None:
        super().__init__(socket, **settings)
        self.disk: FaultyTier

        def tiers(settings: Settings) -> dict[TierName, Tier]:
            self.disk = FaultyTier(make_tiers(settings)[_DISK], 1, Faults())
            return {_DISK: self.disk}

        self.make_tiers = tiers


@dataclass
class Answer:
    """An answer, with the names of its headers in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class UnixConnection(http.client.HTTPConnection):
    """A connection to an API on a unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=30)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(30)
        self.sock.connect(self._path)


def connect(url: str, tls: ssl.SSLContext | None = None) -> http.client.HTTPConnection:
    """Return a connection to an API at `http://...`, `https://...` or `unix:/...`."""
    if url.startswith("unix:"):
        return UnixConnection(url.removeprefix("unix:"))
    where = urlsplit(url)
    assert where.hostname is not None
    if where.scheme == "https":
        return http.client.HTTPSConnection("127.0.0.1", where.port, timeout=30, context=tls)
    return http.client.HTTPConnection(where.hostname, where.port, timeout=30)


def ask(
    url: str,
    path: str,
    *,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    body: str | None = None,
    tls: ssl.SSLContext | None = None,
) -> Answer:
    """Send a request on a connection of its own, and return the answer."""
    with contextlib.closing(connect(url, tls)) as connection:
        connection.request(method, path, body, dict(headers or {}))
        answer = connection.getresponse()
        named = {name.lower(): value for name, value in answer.getheaders()}
        found = Answer(answer.status, named, answer.read())
    if path == "/metrics" and found.status == 200:
        check_metrics(found.body.decode())
    return found


class GatewayThread:
    """A gateway for the service at `address`, in a thread; it looks every `interval_s` seconds."""

    def __init__(
        self,
        address: str,
        *,
        interval_s: float = 0.02,
        plugins: PluginSettings | None = None,
        **settings: Any,
    ) -> None:
        self._plugins = plugins or PluginSettings()
        self._access = access_of(Settings(**({"api_listen": "127.0.0.1:0"} | settings)))
        self._address = address
        self._interval_s = interval_s
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._ready = threading.Event()
        self.url = ""

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(120)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def get(self, path: str, **how: Any) -> Answer:
        """Return the answer to a request."""
        return ask(self.url, path, **how)

    def health(self) -> tuple[int, str]:
        """Return the status of the answer, and the state it tells."""
        answer = self.get("/health")
        return answer.status, answer.json["status"]

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        observer = Observer(self._address, self._interval_s, sample=True)
        async with serving(observer, self._access, self._plugins) as url:
            self.url = url
            self._ready.set()
            await self._stop.wait()


@contextlib.contextmanager
def steerable(
    node: NodeThread | NodeProcess, short_dir: Path, **options: Any
) -> Iterator[GatewayThread]:
    """Run an API that takes changes with `TOKEN`, and wait until it is well."""
    token = short_dir / "token"
    token.write_text(TOKEN)
    with GatewayThread(node.address, api_token_file=str(token), **options) as api:
        eventually(lambda: api.health() == (200, "ok"))
        yield api


def make_certificate(folder: Path) -> Path:
    """Return a new file with a key and a certificate for localhost."""
    key, cert = folder / "key.pem", folder / "cert.pem"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    try:
        subprocess.run(
            [*command, "-keyout", key, "-out", cert, *names], check=True, capture_output=True
        )
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    both = folder / "both.pem"
    both.write_bytes(key.read_bytes() + cert.read_bytes())
    return both


@contextlib.contextmanager
def streams(url: str, count: int) -> Iterator[list[socket.socket]]:
    """Open streams of events that are never read, with the smallest buffers."""
    where = urlsplit(url)
    with contextlib.ExitStack() as stack:
        opened = []
        for _ in range(count):
            sock = stack.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            sock.settimeout(30)
            sock.connect((where.hostname, where.port))
            with contextlib.suppress(OSError):  # above the limit of connections
                sock.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            opened.append(sock)
        yield opened


def send(api: GatewayThread, method: str, path: str, body: object = None, **headers: str) -> Answer:
    """Send a change with the token."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return api.get(
        path,
        method=method,
        headers={"Authorization": f"Bearer {TOKEN}"} | named,
        body=None if body is None else json.dumps(body),
    )


def post(api: GatewayThread, path: str, body: object = None, **headers: str) -> Answer:
    return send(api, "POST", path, body, **headers)


def tokens_of(name: int, chunks: int, more: int = 0) -> list[int]:
    return [name * 1000 + at for at in range(chunks * CHUNK_SIZE + more)]


def keys_of(engine: Engine, tokens: list[int], salt: str = "") -> list[ChunkKey]:
    """Return the keys that an engine computes for a prompt."""
    chain = KeyChain(engine.ranks[0].attach.namespace, CHUNK_SIZE, Extras(salt=salt))
    chain.extend(tokens)
    return chain.keys


def state_of(node: NodeThread) -> dict[str, Any]:
    """Return all that a change can change in a service, its counters included."""
    service = node.service
    return node.call(
        lambda: {
            "totals": msgspec.structs.replace(service.catalog.totals(), oldest_lease_s=0),
            "tenants": list(service.catalog.tenants_after(b"")),
            "namespaces": list(service.catalog.namespaces_after(b"")),
            "settings": service.settings.config(),
            "tiers": dict(service.runner.states),
            "pins": service.pins.rows(),
            "jobs": service.jobs.rows(),
            "draining": (service._membership.draining, service._saves.draining),
        }
    )


def state_at_rest(node: NodeThread) -> dict[str, Any]:
    """Return the state of a service that does nothing of its own, except for writes to tiers."""

    def at_rest() -> bool:
        tiers = node.service.catalog.totals().tiers.values()
        return node.service.driver.idle and all(tier.scanned for tier in tiers)

    eventually(lambda: node.call(at_rest))
    return state_of(node)


def state_at(url: str) -> str:
    """Return the state that an API tells; empty if none answers."""
    try:
        status: str = ask(url, "/health").json["status"]
    except OSError:
        return ""
    return status


class Loading:
    """An engine that loads the same chunks over and over, in a thread; `failed` counts misses."""

    def __init__(self, engine: Engine, keys: Sequence[ChunkKey]) -> None:
        self._engine = engine
        engine.scheduler.client.configure(60.0, 60.0)  # late answers on a busy machine are misses
        self._keys = keys
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.loads = self.failed = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.001):
            self.failed += self._engine.load(self._keys) != len(self._keys)
            self.loads += 1


def children_of(pid: int) -> list[int]:
    """Return the processes that a process, or a thread of it, has started."""
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for file in files for child in file.read_text().split()]


@contextlib.contextmanager
def engine_server(tokens: object) -> Iterator["EngineServer"]:
    """Run a server that tokenizes every text to the same tokens, and computes prompts.

    It stands for the HTTP server of an engine.
    """
    server = EngineServer(tokens)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class EngineServer(ThreadingHTTPServer):
    """Server that remembers what it was asked."""

    def __init__(self, tokens: object) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.tokens = tokens
        self.status = 200
        self.location = ""
        self.texts: list[str] = []
        self.computed: list[dict[str, Any]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: EngineServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.texts.append(str(body["prompt"]))
        answer: dict[str, Any] = {"tokens": self.server.tokens}
        if self.path == "/v1/completions":
            self.server.computed.append(body)
            answer = {"choices": []}
        raw = json.dumps(answer).encode()
        self.send_response(self.server.status)
        if self.server.location:
            self.send_header("Location", self.server.location)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: object) -> None:
        pass
