# SPDX-License-Identifier: Apache-2.0
"""Real servers for the tests of remote tiers, each in a process of its own on a free port."""

import contextlib
import datetime
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from examples.demo.processes import free_port
from kvhaven.tiers.base import Tier

REDIS_MISSING = "there is no redis-server: apt-get install redis-tools (or valkey)"
FUSE_MISSING = "a FUSE mount needs root, /dev/fuse and bindfs: apt-get install bindfs"
MOTO_MISSING = "moto's server is not installed: pip install 'moto[server]', or make setup"

KEYS = {
    "AWS_ACCESS_KEY_ID": os.environ.get("AWS_ACCESS_KEY_ID", "a-key-id"),
    "AWS_SECRET_ACCESS_KEY": os.environ.get("AWS_SECRET_ACCESS_KEY", "a-secret-key"),
    "AWS_REGION": "us-east-1",
}
"""What an S3 server for tests takes: anything (moto), or what it was started with (Ceph)."""


class MissingServerError(unittest.SkipTest):
    """A server that is not installed, or cannot run here: a test that needs it is skipped."""


@contextlib.contextmanager
def process(
    command: list[str], port: int, within_s: float = 30, executable: str | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server until the block ends; begin when it takes connections."""
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, executable=executable
    ) as server:
        try:
            wait_for_port(port, server, within_s)
            yield server
        finally:
            server.kill()


def wait_for_port(port: int, server: subprocess.Popen[bytes], within_s: float) -> None:
    end = time.monotonic() + within_s
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError as error:
            if server.poll() is not None:
                raise RuntimeError(f"{server.args!r} ended with {server.returncode}") from error
            if time.monotonic() > end:
                raise RuntimeError(f"{server.args!r}: no answer in {within_s} s") from error
            time.sleep(0.02)
        else:
            return


@contextlib.contextmanager
def moto() -> Iterator[str]:
    """Run moto's S3 server; yield its URL."""
    with moto_process() as (url, _):
        yield url


@contextlib.contextmanager
def moto_process() -> Iterator[tuple[str, "Stoppable"]]:
    """Run moto's S3 server; yield its URL, and what stops it."""
    if importlib.util.find_spec("moto") is None:
        raise MissingServerError(MOTO_MISSING)
    port = free_port()
    with process([sys.executable, "-m", "moto.server", "-p", str(port)], port) as server:
        yield f"http://127.0.0.1:{port}", Stoppable(server)


@contextlib.contextmanager
def fuse_mount(source: Path, mount: Path) -> Iterator["Stoppable"]:
    """Mount `source` at `mount` through a FUSE server, like a file server; yield what stops it.

    While that is stopped, every system call on the mount hangs, and cannot be interrupted.
    """
    program = shutil.which("bindfs")
    if program is None or os.geteuid() != 0 or not Path("/dev/fuse").exists():
        raise MissingServerError(FUSE_MISSING)
    mount.mkdir()
    with subprocess.Popen([program, "-f", str(source), str(mount)]) as server:
        try:
            end = time.monotonic() + 10
            while not mount.is_mount():
                if server.poll() is not None:
                    raise MissingServerError(
                        f"bindfs cannot mount here: it ended with {server.returncode}"
                    )
                if time.monotonic() > end:
                    raise RuntimeError("bindfs did not mount within 10 s")
                time.sleep(0.02)
            yield Stoppable(server)
        finally:
            server.kill()  # what hangs in it then fails
            subprocess.run(["umount", "--lazy", str(mount)], check=False)


class Stoppable:
    """A server's process."""

    def __init__(self, server: subprocess.Popen[bytes]) -> None:
        self._server = server

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop it (SIGSTOP) for a while: it takes connections, or calls, and answers none."""
        self._server.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._server.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def redis(*options: str, port: int = 0) -> Iterator[str]:
    """Run a Redis (or Valkey) server that keeps nothing; yield its URL."""
    names = ("redis-server", "valkey-server", "redis-check-rdb")
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        raise MissingServerError(REDIS_MISSING)
    port = port or free_port()
    keep_nothing = ["--save", "", "--appendonly", "no", "--dir", tempfile.gettempdir()]
    # Debian's redis-tools has the server under another name; it acts by the name it is called.
    command = ["redis-server", "--port", str(port), *keep_nothing, *options]
    with process(command, port, executable=program):
        yield f"redis://127.0.0.1:{port}"


def emptied(url: str) -> str:
    """Remove all that a Redis server, or a cluster of one node, holds; return its URL."""
    from redis import Redis

    with Redis.from_url(url.replace("+cluster", "")) as client:
        client.flushall()
    return url


def process_of(url: str) -> int:
    """Return the process id of a Redis server."""
    from redis import Redis

    with Redis.from_url(url) as client:
        return int(client.info("server")["process_id"])


@contextlib.contextmanager
def redis_cluster() -> Iterator[str]:
    """Run a cluster of one node, which has all slots; yield its URL."""
    from redis import Redis

    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/nodes.conf"
        options = ["--cluster-enabled", "yes", "--cluster-config-file", file]
        with redis(*options, "--cluster-port", str(free_port())) as url:
            with Redis.from_url(url) as client:
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
                while b"cluster_state:ok" not in client.execute_command("CLUSTER", "INFO"):
                    time.sleep(0.02)
            yield url.replace("redis://", "redis+cluster://")


class Bucket:
    """A new bucket of an S3 server, and what a process needs to use it."""

    def __init__(self, url: str) -> None:
        import obstore
        from obstore.store import S3Store

        self.url = url
        self.name = f"test-{uuid.uuid4().hex}"
        self.environment = KEYS
        self._obstore = obstore
        config: dict[str, Any] = {name.lower(): value for name, value in self.environment.items()}
        options: Any = {"allow_http": True, "pool_max_idle_per_host": "0"}  # none stays open
        self._store = S3Store(self.name, endpoint=url, client_options=options, **config)
        url = obstore.sign(self._store, "PUT", "", datetime.timedelta(minutes=1))
        request = urllib.request.Request(url, method="PUT")  # obstore itself makes no buckets
        urllib.request.urlopen(request, timeout=30).close()

    def get(self, name: str) -> bytes:
        return bytes(self._obstore.get(self._store, name).bytes())

    def put(self, name: str, content: bytes) -> None:
        self._obstore.put(self._store, name, content, use_multipart=False)

    def delete(self, name: str) -> None:
        self._obstore.delete(self._store, name)

    def tier(self, prefix: str = "", **settings: Any) -> Tier:
        from kvhaven.tiers.s3.tier import s3_tier

        return s3_tier(f"s3://{self.name}/{prefix}", endpoints=[self.url], **settings)
