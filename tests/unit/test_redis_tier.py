# SPDX-License-Identifier: Apache-2.0
"""The Redis tier on real servers: limits, secrets, and servers that stop, restart or are full."""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.demo.processes import free_port
from kvhaven.errors import ConfigError, TierError, TierMissError
from kvhaven.testing.tiers import (
    content,
    fetch,
    make_namespace,
    make_piece,
    opened,
    page_buffer,
    scanned,
    store,
    until,
)
from kvhaven.tiers.base import Tier
from kvhaven.tiers.shared.store import blob_name
from tests import servers
from tests.tiers import run_or_skip

pytest.importorskip("redis", reason="pip install 'kvhaven[redis]'")
from redis import Redis

from kvhaven.tiers.redis.tier import PREFIX, redis_tier

SPACE = make_namespace("model", (64 << 10,))
PIECE = make_piece(SPACE)
KEY = PREFIX + blob_name(PIECE.shard)
SECRET = "a-very-secret-password"


@pytest.fixture(autouse=True)
def _no_leaked_descriptors(request: pytest.FixtureRequest) -> Iterator[None]:
    if "redis_server" in request.fixturenames:
        request.getfixturevalue("redis_server")
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir()))
    yield
    assert len(list(descriptors.iterdir())) <= before


@contextlib.asynccontextmanager
async def tier_at(url: str, **settings: Any) -> AsyncIterator[Tier]:
    settings = {"retry_s": 0.05, "deadline_s": 30.0} | settings
    async with opened(redis_tier(url, **settings)) as tier:
        await tier.add_namespace(SPACE)
        yield tier


@pytest.fixture
def server() -> Iterator[str]:
    """A server of this test's own, which it may spoil."""
    with servers.redis() as url:
        yield url


async def test_a_shard_goes_when_nobody_reads_it(redis_server: str) -> None:
    other = make_piece(SPACE, 1)
    with Redis.from_url(redis_server) as client:
        async with tier_at(redis_server, ttl_s=2) as tier:
            await store(tier, PIECE, other)
            for _ in range(6):
                await asyncio.sleep(0.5)
                assert await fetch(tier, PIECE.shard) == content(PIECE)
            assert list(await tier.contains([PIECE.shard, other.shard])) == [True, False]
            assert 0 < client.ttl(KEY) <= 2
        async with tier_at(redis_server, ttl_s=0) as tier:
            await store(tier, other)
            assert await fetch(tier, other.shard) == content(other)
            assert client.ttl(PREFIX + blob_name(other.shard)) == -1


@pytest.mark.parametrize("reason", ["too old", "not allowed"])
async def test_a_server_without_getex_keeps_what_is_read_too(reason: str) -> None:
    options = ["--rename-command", "GETEX", ""] if reason == "too old" else []
    with servers.redis(*options) as url, Redis.from_url(url) as client:
        if reason == "not allowed":
            client.execute_command("ACL", "SETUSER", "default", "-getex")
        async with tier_at(url, ttl_s=100) as tier:
            await store(tier, PIECE)
            for _ in range(2):
                client.expire(KEY, 10)
                assert await fetch(tier, PIECE.shard) == content(PIECE)
                assert client.ttl(KEY) > 50
            assert tier.health().errors == 0


async def test_a_shard_that_is_too_large_is_refused_and_no_failure(redis_server: str) -> None:
    async with tier_at(redis_server, most_shard_bytes=10_000) as tier:
        for _ in range(5):
            with pytest.raises(TierError, match="at most 10000 bytes"):
                await store(tier, PIECE)
        assert tier.health().writable
        assert tier.health().errors == 0


async def test_many_small_reads_share_round_trips(redis_server: str) -> None:
    pieces = [make_piece(SPACE, number) for number in range(200)]
    with Redis.from_url(redis_server) as client:
        async with tier_at(redis_server, ttl_s=0) as tier:
            await asyncio.gather(*(store(tier, piece) for piece in pieces))
            before = client.info("stats")
            await tier.contains([piece.shard for piece in pieces])
            for piece, got in zip(
                pieces,
                await asyncio.gather(*(fetch(tier, piece.shard) for piece in pieces)),
                strict=True,
            ):
                assert got == content(piece)
            after = client.info("stats")
    commands = after["total_commands_processed"] - before["total_commands_processed"]
    reads = after["total_reads_processed"] - before["total_reads_processed"]
    assert commands >= 400
    assert reads < commands / 3


@pytest.mark.parametrize("kind", [servers.redis, servers.redis_cluster])
async def test_a_long_answer_comes_without_a_stop(
    kind: Callable[[], contextlib.AbstractContextManager[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream stops its socket when it has twice its limit, and whoever reads starts it again."""
    stops: list[str] = []
    transport: Any = asyncio.selector_events._SelectorSocketTransport  # type: ignore[attr-defined]
    pause = transport.pause_reading

    def note(self: asyncio.ReadTransport) -> None:
        stops.append("stop")
        pause(self)

    space = make_namespace("model", (2 << 20,))
    piece = make_piece(space)
    with kind() as url:
        async with opened(redis_tier(url)) as tier:
            await tier.add_namespace(space)
            await store(tier, piece)
            monkeypatch.setattr(transport, "pause_reading", note)
            assert await fetch(tier, piece.shard) == content(piece)
    assert not stops


async def test_a_wrong_password_is_said_and_never_shown(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    with servers.redis("--requirepass", SECRET) as url:
        wrong = url.replace("redis://", f"redis://:{SECRET}-not@")
        async with tier_at(wrong) as tier:
            error = tier.health().last_error
            assert "password" in error
            assert not tier.health().online
            assert SECRET not in error + caplog.text + repr(tier.__dict__)
        async with tier_at(url) as tier:
            assert "password" in tier.health().last_error
        monkeypatch.setenv("REDIS_PASSWORD", SECRET)
        async with tier_at(url) as tier:
            await store(tier, PIECE)
            assert await fetch(tier, PIECE.shard) == content(PIECE)
        monkeypatch.delenv("REDIS_PASSWORD")
        async with tier_at(url.replace("redis://", f"redis://:{SECRET}@")) as tier:
            assert await fetch(tier, PIECE.shard) == content(PIECE)
    assert SECRET not in caplog.text


async def test_tls_is_used_and_its_certificate_checked(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    run_or_skip(
        *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
        *("-keyout", key, "-out", certificate, *names),
    )
    port = str(free_port())
    options = ["--tls-port", port, "--tls-cert-file", str(certificate)]
    options += ["--tls-key-file", str(key), "--tls-auth-clients", "no"]
    with servers.redis(*options):
        url = f"rediss://localhost:{port}"
        async with tier_at(f"{url}?ssl_ca_certs={certificate}") as tier:
            await store(tier, PIECE)
            assert await fetch(tier, PIECE.shard) == content(PIECE)
        async with tier_at(url) as tier:
            assert not tier.health().online
            assert "certificate" in tier.health().last_error.lower()


async def test_a_full_server_stops_writes_and_serves_reads() -> None:
    options = ("--maxmemory", "8mb", "--maxmemory-policy", "noeviction")
    with servers.redis(*options) as url:
        async with tier_at(url) as tier:
            await store(tier, PIECE)
            number = 0
            while tier.health().writable:
                number += 1
                with contextlib.suppress(TierError):
                    await store(tier, make_piece(SPACE, number))
            assert "maxmemory-policy" in tier.health().last_error
            assert await fetch(tier, PIECE.shard) == content(PIECE)
            with Redis.from_url(url) as client:
                client.config_set("maxmemory", "64mb")
            await until(lambda: tier.health().writable)
            await store(tier, make_piece(SPACE, 1000))


async def test_a_server_that_evicts_costs_a_miss() -> None:
    options = ("--maxmemory", "8mb", "--maxmemory-policy", "allkeys-lru")
    with servers.redis(*options) as url:
        async with tier_at(url) as tier:
            pieces = [make_piece(SPACE, number) for number in range(200)]
            await store(tier, *pieces)
            found = list(await tier.contains([piece.shard for piece in pieces]))
            assert 0 < sum(found) < 150
            right = 0
            for piece in pieces:  # answers take memory too, so reading evicts more
                with contextlib.suppress(TierMissError):
                    assert await fetch(tier, piece.shard) == content(piece)
                    right += 1
            assert right
            assert tier.health().errors == tier.health().rejected == 0


async def test_a_server_without_a_bound_is_named(
    server: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with tier_at(server):
        pass
    (line,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "has no maxmemory" in line


async def test_a_stopped_server_costs_its_deadline_and_then_nothing(server: str) -> None:
    pid = servers.process_of(server)
    async with tier_at(server, deadline_s=1, failures=2) as tier:
        await store(tier, PIECE)
        buffer = page_buffer(PIECE.shard.payload_bytes)
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(TimeoutError):  # the caller's own, shorter one
                async with asyncio.timeout(0.05):
                    await tier.read(PIECE.shard, buffer)
            for _ in range(2):
                with pytest.raises(TierError):
                    await tier.read(PIECE.shard, buffer)
            with pytest.raises(TierError, match="reads off"):
                await tier.read(PIECE.shard, buffer)
        finally:
            os.kill(pid, signal.SIGCONT)
        await until(lambda: bool(tier.health().online))
        assert await fetch(tier, PIECE.shard) == content(PIECE)


async def test_a_server_that_was_restarted_is_used_again() -> None:
    port = free_port()
    async with tier_at(f"redis://127.0.0.1:{port}") as tier:
        assert not tier.health().online
        assert "cannot be reached" in tier.health().last_error
        for _ in range(2):
            with servers.redis(port=port):
                await until(lambda: tier.health().online and tier.health().writable)
                await store(tier, PIECE)
                assert await fetch(tier, PIECE.shard) == content(PIECE)
            while tier.health().online:
                with contextlib.suppress(TierMissError, TierError):
                    await fetch(tier, PIECE.shard)
        assert tier.health().epoch == 1


async def test_callers_that_leave_early_never_get_anothers_answer(redis_server: str) -> None:
    pieces = [make_piece(SPACE, number) for number in range(20)]
    async with tier_at(redis_server) as tier:
        await store(tier, *pieces)

        async def ask(number: int) -> None:
            piece = pieces[number % 20]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.001 * (number % 7) if number % 3 else None):
                    assert await fetch(tier, piece.shard) == content(piece)

        for _ in range(5):
            await asyncio.gather(*(ask(number) for number in range(100)))
        assert tier.health().rejected == 0
        assert tier.health().errors == 0


async def test_connections_are_few_and_end_with_the_tier(server: str) -> None:
    with Redis.from_url(server) as client:
        async with tier_at(server, deadline_s=60.0) as tier:
            pieces = [make_piece(SPACE, number) for number in range(50)]
            await asyncio.gather(*(store(tier, piece) for piece in pieces))
            await asyncio.gather(*(fetch(tier, piece.shard) for piece in pieces))
            assert len(client.client_list()) <= 1 + 6
        await until(lambda: len(client.client_list()) == 1)


async def test_a_replica_says_that_it_takes_no_writes(server: str) -> None:
    port = server.rpartition(":")[2]
    with servers.redis("--replicaof", "127.0.0.1", port) as replica:
        async with opened(redis_tier(replica, retry_s=0.05)) as tier:
            with pytest.raises(TierError, match="replica"):
                await tier.add_namespace(SPACE)


async def test_keys_of_others_are_left_alone(redis_server: str) -> None:
    with Redis.from_url(redis_server) as client:
        client.set("somebody", "else's")
        client.set(f"{PREFIX}notes", "x")
        async with tier_at(redis_server) as tier:
            await store(tier, PIECE)
            assert await scanned(tier) == ({SPACE.digest}, {PIECE.shard})
            assert (await tier.check()).clean
            await tier.delete([PIECE.shard])
        assert client.get("somebody") == b"else's"


@pytest.mark.parametrize("url", ["http://host", "redis://", f"tcp://:{SECRET}@host", "host:6379"])
def test_other_urls_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match="redis://host:port") as caught:
        redis_tier(url)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("redis://h?foo=bar", "foo"),
        ("redis+cluster://h?foo=bar", "foo"),
        ("redis://h?socket_timeout=soon", "socket_timeout"),
        ("redis://h:99999", "[Pp]ort"),
        ("redis+cluster://h:x", "[Pp]ort"),
    ],
)
def test_urls_that_the_client_does_not_take_are_refused(url: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"redis-py rejects the URL .*{reason}"):
        redis_tier(url)
