# SPDX-License-Identifier: Apache-2.0
"""Two nodes that read each other's memory over TCP, with damage, kills, stops and wrong tokens."""

import contextlib
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.demo.processes import free_port
from kvhaven.client.control import connect
from kvhaven.errors import ConfigError
from kvhaven.keys import tenant_id
from kvhaven.peers.addresses import parse_address, read_token, require_secret
from tests.commands import kvhaven
from tests.crash.engine import Engine, prompt
from tests.crash.node import NodeProcess, eventually, settled, status_of
from tests.crash.workload import Work, WorkingEngine, events_of_this_run, seed_of_this_run

pytestmark = pytest.mark.crash

KEYS = prompt("p", 12)
TOKEN = b"0123456789abcdef0123456789abcdef\n"


@pytest.fixture
def token(short_dir: Path) -> Path:
    path = short_dir / "token"
    path.write_bytes(TOKEN)
    return path


def node_of(short_dir: Path, name: str, port: int, *peers: int, **settings: object) -> NodeProcess:
    """Return a node of 4 MiB that listens at a port and reads from others."""
    defaults: dict[str, object] = {
        "max_local_cpu_size": "4MiB",
        "peer_listen": f"127.0.0.1:{port}",
        "peers": " ".join(f"127.0.0.1:{peer}" for peer in peers),
        "remote_lookup_ttl_s": 0.1,
        "peer_deadline_ms": 2000,  # a busy machine is silent for longer than 300
        "pd_stall_ms": 4000,
        "promote_deadline_ms": 20_000,
        "verify_memory": "off",
    }
    return NodeProcess(short_dir / f"{name}.sock", short_dir / f"{name}.log", **defaults | settings)


def connected(node: NodeProcess) -> None:
    """Wait until a node's peers answer."""
    eventually(lambda: status_of(node.address).tiers["peer"].online)


def announced(node: NodeProcess, chunks: int) -> None:
    """Wait until a node has heard of so many chunks of its peer."""

    def heard() -> bool:
        (peer,) = status_of(node.address).peers
        return peer.followed and peer.chunks_announced == chunks

    eventually(heard)


@contextlib.contextmanager
def pair(short_dir: Path, **settings: object) -> Iterator[tuple[NodeProcess, NodeProcess]]:
    """Two nodes, of which each reads the other's memory."""
    with pair_at(short_dir, free_port(), free_port(), **settings) as nodes:
        yield nodes


@contextlib.contextmanager
def pair_at(
    short_dir: Path, one: int, two: int, **settings: object
) -> Iterator[tuple[NodeProcess, NodeProcess]]:
    """Two nodes that listen at these ports."""
    a, b = (
        node_of(short_dir, "a", one, two, **settings),
        node_of(short_dir, "b", two, one, **settings),
    )
    with contextlib.ExitStack() as stack:
        for node in (a, b):
            node.launch()
            stack.callback(node.kill)
        for node in (a, b):
            stack.enter_context(node)
        connected(a)
        connected(b)
        yield a, b


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_node_loads_what_is_in_anothers_memory(
    short_dir: Path, token: Path, world_size: int
) -> None:
    with pair(short_dir, peer_token_file=token) as (a, b):
        with Engine(a.address, world_size) as engine:
            assert engine.save(KEYS) == len(KEYS)
        announced(b, len(KEYS))
        with Engine(b.address, world_size) as engine:
            assert engine.load([*KEYS, *prompt("unknown", 4)]) == len(KEYS)
            assert engine.load(KEYS) == len(KEYS)
        peer = status_of(b.address).tiers["peer"]
        assert (peer.reads, peer.writes, peer.rejected) == (len(KEYS) * world_size, 0, 0)
        assert status_of(b.address).catalog.failed_promotions == 0
        (shown,) = status_of(b.address).peers
        assert shown.up
        assert (shown.chunks_found, shown.shards_read) == (len(KEYS), len(KEYS) * world_size)
        assert "connected" in kvhaven("peers", "--socket", b.address)
        for node in (a, b):
            settled(node.address, members=0)
            node.stop()


def test_lookups_need_no_questions_and_follow_what_is_evicted_cleared_and_restarted(
    short_dir: Path,
) -> None:
    with pair(short_dir, remote_lookup_ttl_s=0.1) as (a, b):
        announced(b, 0)

        def questions() -> int:
            (peer,) = status_of(b.address).peers
            return peer.questions

        with Engine(a.address) as engine, Engine(b.address) as other:
            assert other.load(prompt("unknown", 4)) == 0
            assert engine.save(KEYS) == len(KEYS)
            announced(b, len(KEYS))
            assert other.load(KEYS) == len(KEYS)
            assert questions() == 0
            kvhaven("clear", "--all", "--socket", b.address)
            # Of a chain of which it has announced a part, a peer is asked for the rest.
            assert other.load([*KEYS, *prompt("more", 2)]) == len(KEYS)
            before = questions()
            assert before > 0
            for node in (b, a):
                kvhaven("clear", "--all", "--socket", node.address)
            announced(b, 0)
            assert other.load(KEYS) == 0
            assert questions() == before
            assert engine.save(KEYS[:3]) == 3
            announced(b, 3)
        a.stop()
        eventually(lambda: not status_of(b.address).tiers["peer"].online)
        a.start()
        announced(b, 0)
        with Engine(a.address) as engine:
            assert engine.save(KEYS[:2]) == 2
            announced(b, 2)


def test_what_a_peer_computes_after_a_miss_is_soon_a_hit(short_dir: Path) -> None:
    with pair(short_dir, remote_lookup_ttl_s=3600) as (a, b):
        announced(b, 0)
        with Engine(a.address) as engine, Engine(b.address) as other:
            assert other.load(KEYS) == 0
            assert engine.save(KEYS) == len(KEYS)
            eventually(lambda: other.load(KEYS) == len(KEYS), 60)


def test_a_chunk_is_lent_to_its_tenant_only(short_dir: Path) -> None:
    ann, ben = tenant_id("ann"), tenant_id("ben")
    with pair(short_dir) as (a, b):
        with Engine(a.address) as engine:
            assert engine.save(KEYS, tenant=ann) == len(KEYS)
        announced(b, len(KEYS))
        with Engine(b.address) as engine:
            assert engine.load(KEYS, tenant=ben) == 0
            assert engine.load(KEYS) == 0
            assert engine.load(KEYS, tenant=ann) == len(KEYS)


def test_what_was_cleared_is_not_lent(short_dir: Path) -> None:
    with pair(short_dir) as (a, b):
        with Engine(a.address) as engine:
            assert engine.save(KEYS) == len(KEYS)
        announced(b, len(KEYS))
        with connect(a.address) as control:
            control.clear()
        with Engine(b.address) as engine:
            assert engine.load(KEYS) == 0


def test_two_nodes_with_unlike_tokens_share_nothing_and_say_why(
    short_dir: Path, token: Path
) -> None:
    other = short_dir / "other"
    other.write_bytes(TOKEN[::-1])
    one, two = free_port(), free_port()
    with (
        node_of(short_dir, "a", one, two, peer_token_file=token) as a,
        node_of(short_dir, "b", two, one, peer_token_file=other) as b,
    ):
        with Engine(a.address) as engine:
            assert engine.save(KEYS) == len(KEYS)
        eventually(lambda: "peer_token_file" in status_of(b.address).tiers["peer"].last_error)
        with Engine(b.address) as engine:
            assert engine.load(KEYS) == 0
        assert not status_of(b.address).tiers["peer"].online
        assert "away: peer 127.0.0.1" in b.log.read_text()
        listener = status_of(a.address).listener
        assert (listener.connections, listener.protocol_errors) == (0, 0)
        assert listener.refused > 0
        said = kvhaven("peers", "--socket", a.address, status=1, whole=True)
        assert listener.last_refusal.startswith("peer 127.0.0.1:")
        assert "last one: peer 127.0.0.1:" in said  # of another port, if it has tried again


def test_a_node_that_is_its_own_peer_asks_nobody(short_dir: Path) -> None:
    port = free_port()
    with node_of(short_dir, "a", port, port) as a, Engine(a.address) as engine:
        eventually(lambda: "connected, node" in a.log.read_text())
        assert engine.load(KEYS) == 0
        assert not status_of(a.address).tiers["peer"].online


def test_a_peer_that_is_killed_is_a_miss_and_is_found_again(short_dir: Path) -> None:
    with pair(short_dir) as (a, b):
        with Engine(a.address) as engine:
            assert engine.save(KEYS) == len(KEYS)
        announced(b, len(KEYS))
        with Engine(b.address) as engine:
            assert engine.load(KEYS[:4]) == 4
            a.kill()
            assert engine.load(KEYS) == 4
            eventually(lambda: not status_of(b.address).tiers["peer"].online)
            a.start()
            with Engine(a.address) as other:
                assert other.save(KEYS) == len(KEYS)
            eventually(lambda: engine.load(KEYS) == len(KEYS), 60)
        settled(b.address, members=0)


def test_a_peer_that_is_stopped_costs_misses_and_is_found_again(short_dir: Path) -> None:
    with pair(short_dir) as (a, b):
        with Engine(a.address) as engine:
            assert engine.save(KEYS) == len(KEYS)
        announced(b, len(KEYS))
        with Engine(b.address) as engine:
            with a.frozen():
                assert engine.load(KEYS) == 0
                eventually(lambda: not status_of(b.address).tiers["peer"].online)
                assert engine.load(KEYS) == 0
            eventually(lambda: engine.load(KEYS) == len(KEYS), 60)
        settled(b.address, members=0)
        eventually(lambda: status_of(a.address).catalog.leased_bytes == 0)


class Relay:
    """A TCP relay that may damage, cut or hold back what the listening side sends."""

    def __init__(self, target: int) -> None:
        self.mode = ""
        self._target = target
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._dice = random.Random(seed_of_this_run())
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                near, _ = self._server.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                threading.Thread(target=self._pump, args=(near, far, False), daemon=True).start()
                threading.Thread(target=self._pump, args=(far, near, True), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError), source, sink:
            while data := bytearray(source.recv(1 << 16)):
                if answers and len(data) > 1000:  # payloads are, other answers are not
                    if self.mode == "flip":
                        data[self._dice.randrange(500, len(data))] ^= 1 << self._dice.randrange(8)
                    elif self.mode == "cut":
                        sink.sendall(data[: len(data) // 2])
                        return
                    elif self.mode == "hold":
                        time.sleep(3600)
                sink.sendall(data)


@pytest.mark.parametrize("mode", ["flip", "cut", "hold"])
def test_damage_on_the_way_is_a_miss(short_dir: Path, mode: str) -> None:
    port = free_port()
    relay = Relay(port)
    with (
        node_of(short_dir, "a", port, free_port()) as a,
        node_of(short_dir, "b", free_port(), relay.port) as b,
    ):
        connected(b)
        with Engine(a.address) as engine:
            assert engine.save(KEYS) == len(KEYS)
        announced(b, len(KEYS))
        relay.mode = mode
        with Engine(b.address) as engine:

            def read() -> bool:  # on a slow machine, a lookup may end before anything is read
                assert engine.load(KEYS) == 0
                return status_of(b.address).tiers["peer"].errors > 0

            eventually(read)
            peer = status_of(b.address).tiers["peer"]
            assert (peer.rejected > 0) == (mode == "flip")
            relay.mode = ""
            eventually(lambda: engine.load(KEYS) == len(KEYS), 90)
        settled(b.address, members=0)
        eventually(lambda: status_of(a.address).catalog.leased_bytes == 0, 60)


def test_nonsense_at_the_listener_ends_its_connection_only(short_dir: Path) -> None:
    dice = random.Random(seed_of_this_run())
    with pair(short_dir) as (a, b):
        port = int(a._environment["KVHAVEN_PEER_LISTEN"].rpartition(":")[2])
        for number in range(200):
            with (
                socket.create_connection(("127.0.0.1", port)) as sock,
                contextlib.suppress(OSError),
            ):
                length = (1 << 32) - 1 if number % 5 == 0 else dice.randrange(200)
                sock.sendall(struct.pack("<I", length) + dice.randbytes(dice.randrange(300)))
                if number % 3 == 0:
                    sock.settimeout(0.01)
                    sock.recv(100)
        with Engine(a.address) as engine:
            assert engine.save(KEYS) == len(KEYS)
        announced(b, len(KEYS))
        with Engine(b.address) as engine:
            assert engine.load(KEYS) == len(KEYS)
        assert "Traceback" not in a.log.read_text()


def test_nodes_at_work_read_each_other_right_while_nodes_are_killed(short_dir: Path) -> None:
    seed, events = seed_of_this_run(), events_of_this_run(6)
    dice = random.Random(seed)
    one, two = free_port(), free_port()
    small = {"max_local_cpu_size": "2MiB"}
    read = 0
    with node_of(short_dir, "b", two, one, **small) as b:
        for event in range(events):
            with node_of(short_dir, f"a{event}", one, two, **small) as a:
                connected(b)
                works = [Work(n.address, "engine", 1, seed + event, 8, 12) for n in (a, b)]
                with contextlib.ExitStack() as stack:
                    engines = [WorkingEngine(work).wait_ready() for work in works]
                    for engine in engines:
                        stack.callback(engine.kill)
                    time.sleep(0.5 + dice.random())
                    read += status_of(b.address).tiers["peer"].reads
                    read += status_of(a.address).tiers["peer"].reads
                    a.kill()
                    time.sleep(dice.random() * 0.5)
                    for engine in engines:
                        engine.check()
            settled(b.address, members=0)
        b.stop()
    assert read > 0


def test_a_listener_that_others_reach_needs_a_token(token: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no token is set; set peer_token_file"):
        require_secret(parse_address("0.0.0.0:7420", "peer_listen"), secret=False)
    require_secret(
        parse_address("0.0.0.0:7420", "peer_listen"), secret=bool(read_token(str(token)))
    )
    for loopback in ("127.0.0.1:1", "[::1]:1", "localhost"):
        require_secret(parse_address(loopback, "peer_listen"), secret=False)
    (tmp_path / "short").write_text("abc\n")
    with pytest.raises(ConfigError, match="holds 3 bytes; expected 16 or more"):
        read_token(str(tmp_path / "short"))
    with pytest.raises(ConfigError, match="cannot read"):
        read_token(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("host", "host:7420"),
        ("host:1", "host:1"),
        ("[::1]:2", "[::1]:2"),
        ("::1", "[::1]:7420"),
        ("dns://kv.default:3", "dns://kv.default:3"),
    ],
)
def test_addresses_are_read_as_people_write_them(text: str, shown: str) -> None:
    assert str(parse_address(text, "peers")) == shown


@pytest.mark.parametrize("text", ["", ":1", "host:x", "host:70000", "http://host:1", "[::1", "a:"])
def test_what_is_no_address_is_refused(text: str) -> None:
    if text == "a:":
        assert parse_address(text, "peers").port == 7420
        return
    with pytest.raises(ConfigError, match="peers: invalid address"):
        parse_address(text, "peers")


def test_the_port_in_use_is_refused(short_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        node = node_of(short_dir, "a", port, free_port())
        with pytest.raises(AssertionError, match=f"cannot listen at 127.0.0.1:{port}"), node:
            pass
        assert node.process.returncode == 2
