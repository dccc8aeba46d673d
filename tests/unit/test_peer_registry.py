# SPDX-License-Identifier: Apache-2.0
"""Nodes that find each other through a real Redis."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from examples.demo.processes import free_port
from kvhaven.config import Settings
from kvhaven.errors import ConfigError, TierError
from kvhaven.peers.addresses import Address, parse_peers
from kvhaven.peers.listener import PeerListener
from kvhaven.peers.tier import NodeRegistry, PeerTier
from kvhaven.service.tier_setup import make_tiers
from tests import servers
from tests.unit.test_peers import Held

node_registry = pytest.importorskip(
    "kvhaven.tiers.redis.node_registry", reason="pip install kvhaven[redis]"
)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with servers.redis() as url:
        yield url


@pytest.fixture
def url(server: str) -> str:
    return servers.emptied(server)


def registry(url: str, port: int = 0, host: str = "127.0.0.1") -> NodeRegistry:
    made: NodeRegistry = node_registry.RedisRegistry(url, host, port)
    return made


@pytest.fixture
def listener() -> Iterator[PeerListener]:
    made = PeerListener(Address("127.0.0.1", 0), "there", b"", Held())
    yield made
    made.close()


@contextlib.asynccontextmanager
async def tier_of(*registries: NodeRegistry) -> AsyncIterator[PeerTier]:
    tier = PeerTier([], token=b"", deadline_s=5.0, registries=registries)
    await tier.start()
    try:
        yield tier
    finally:
        await tier.close(5)


async def eventually(there: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not there():  # noqa: ASYNC110  nothing tells a test of it
            await asyncio.sleep(0.02)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvhaven.peers.tier._RESOLVE_S", 0.0)
    monkeypatch.setattr("kvhaven.peers.tier._PING_S", 0.05)


async def test_a_node_that_registers_becomes_a_peer_and_leaves(
    url: str, listener: PeerListener
) -> None:
    there = registry(url, listener.port)
    async with tier_of(registry(url)) as tier:
        assert tier.peers() == []
        assert there.members() == [f"127.0.0.1:{listener.port}"]
        await eventually(lambda: [peer.up for peer in tier.peers()] == [True])
        there.leave()
        await eventually(lambda: tier.peers() == [])


async def test_a_node_that_dies_is_forgotten(
    url: str, listener: PeerListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_registry, "KEEP_S", 2)
    dead = registry(url, listener.port)
    dead.members()
    async with tier_of(registry(url)) as tier:
        await eventually(lambda: [peer.up for peer in tier.peers()] == [True])
        await eventually(lambda: tier.peers() == [])
    dead.leave()


async def test_peers_stay_while_redis_is_away(listener: PeerListener) -> None:
    port = free_port()
    with servers.redis(port=port) as url:
        there = registry(url, listener.port)
        there.members()
        seen = registry(url)
        tier = PeerTier([], token=b"", deadline_s=5.0, registries=[seen])
        await tier.start()
        await eventually(lambda: [peer.up for peer in tier.peers()] == [True])
    with pytest.raises(TierError, match="node registry in Redis"):
        seen.members()
    await eventually(lambda: "node registry" in tier.health().last_error)
    assert [peer.up for peer in tier.peers()] == [True]
    await tier.close(5)
    there.leave()


async def test_nonsense_in_redis_keeps_nobody_away(url: str, listener: PeerListener) -> None:
    there = registry(url, listener.port)
    there.members()
    texts = ("", "dns://x", "a:b:c", "\x1b[2J", "http://x/", ":1", f"x:{'9' * 5000}")
    nonsense = dict.fromkeys((*texts, b"\xff\xfe:7420"), 1 << 40)
    node_registry.Redis.from_url(url).zadd(node_registry.KEY, nonsense)
    async with tier_of(registry(url)) as tier:
        await eventually(lambda: any(peer.up for peer in tier.peers()))
        assert all(peer.address.isprintable() for peer in tier.peers())
    there.leave()


async def test_a_registry_needs_one_connection(url: str) -> None:
    """Checking the options in its URL leaves it that one."""
    assert registry(f"{url}?max_connections=1", 7420).members() == ["127.0.0.1:7420"]


class Failing:
    """A registry that fails in a way that the contract does not allow, and then works."""

    title = "failing"

    def __init__(self, address: str) -> None:
        self._address = address
        self.calls = 0

    def members(self) -> list[str]:
        self.calls += 1
        if self.calls == 1:
            raise RuntimeError("can't start new thread")
        return [self._address]

    def leave(self) -> None:
        pass


async def test_membership_survives_any_error(listener: PeerListener) -> None:
    async with tier_of(Failing(f"127.0.0.1:{listener.port}")) as tier:
        await eventually(lambda: [peer.up for peer in tier.peers()] == [True])


def test_the_address_of_the_interface_towards_redis_is_registered(url: str) -> None:
    anywhere, local6 = registry(url, 7420, "0.0.0.0"), registry(url, 7421, "::1")
    assert anywhere.members() == ["127.0.0.1:7420"]
    assert local6.members() == ["127.0.0.1:7420", "[::1]:7421"]
    anywhere.leave()
    local6.leave()


def test_settings_that_do_not_fit_are_named(url: str) -> None:
    assert parse_peers(f"a:1, dns://b:2 {url}") == (
        [Address("a", 1), Address("b", 2, dynamic=True)],
        [url],
    )
    with pytest.raises(ConfigError, match=r"peer_listen: .* cannot be registered"):
        make_tiers(Settings(peers=url, peer_listen="127.0.0.1:0"))
    with pytest.raises(ConfigError, match="peers: invalid URL") as refused:
        make_tiers(Settings(peers="redis://user:hidden@"))
    assert "hidden" not in str(refused.value)
    tiers = make_tiers(Settings(peers=url, peer_listen="127.0.0.1:0", peer_address="node-a:7420"))
    assert list(tiers) == ["peer"]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ("redis://[::1", "invalid URL"),
        ("redis://h:99999", "invalid URL"),
        ("redis://h?foo=bar", "redis-py rejects the URL .*foo"),
        ("redis://h?socket_timeout=x", "redis-py rejects the URL .*socket_timeout"),
    ],
)
def test_urls_that_cannot_be_right_are_refused(wrong: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"peers: .*{reason}"):
        make_tiers(Settings(peers=wrong))


def test_passwords_are_not_shown() -> None:
    with pytest.raises(TierError) as failed:
        registry("redis://user:hidden@127.0.0.1:1/0").members()
    assert "hidden" not in str(failed.value)
