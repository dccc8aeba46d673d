# SPDX-License-Identifier: Apache-2.0
"""Who may attach, who is refused and why, and what a broken connection changes: nothing else."""

import contextlib
import os
import random
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import hypothesis
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhaven.client.control import connect
from kvhaven.client.unix import prepare_directory
from kvhaven.errors import KVHavenError, ServiceUnavailableError
from kvhaven.protocol import (
    VERSION,
    Acquire,
    Attached,
    AttachScheduler,
    Commit,
    FrameReader,
    Hello,
    Loaded,
    Message,
    Prefetch,
    Refused,
    Release,
    Reserve,
    ServiceMessage,
    Status,
    Welcome,
    decode_service,
    encode,
)
from tests.crash.engine import EXTENT_BYTES, Engine, Rank, Scheduler, prompt
from tests.crash.node import NodeThread, eventually, settled


@pytest.fixture
def node(short_dir: Path) -> Iterator[NodeThread]:
    with NodeThread(short_dir / "s.sock") as node:
        yield node
        node.check()


class Raw:
    """A client that says what it likes."""

    def __init__(self, node: NodeThread) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(10)
        self.socket.connect(node.address)
        self._reader = FrameReader()
        self._messages: list[ServiceMessage] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def say(self, *messages: Message) -> "Raw":
        self.raw(b"".join(encode(message) for message in messages))
        return self

    def raw(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(data)

    def hear(self) -> ServiceMessage | None:
        """Return the next message; None when the connection is closed."""
        while not self._messages:
            try:
                data = self.socket.recv(65536)
            except ConnectionResetError:
                data = b""
            if not data:
                return None
            self._messages += [decode_service(body) for body in self._reader.feed(data)]
        return self._messages.pop(0)

    def is_closed(self) -> bool:
        while self.hear() is not None:
            pass
        return True


# --- engines ----------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3])
def test_what_all_ranks_saved_is_loaded_byte_for_byte(node: NodeThread, world: int) -> None:
    keys = prompt("p", 12)
    with Engine(node.address, world) as engine:
        assert engine.load(keys) == 0
        assert engine.save(keys) == 12
        assert eventually(lambda: engine.load(keys)) == 12
        assert engine.load(keys[:5]) == 5
        assert engine.load([*keys, *prompt("other", 3)]) == 12
        assert node.status().catalog.resident_chunks == 12
        settled(node.address, members=world + 1)
    settled(node.address, members=0)


def test_a_chunk_that_one_rank_has_not_written_is_not_offered(node: NodeThread) -> None:
    keys = prompt("p", 4)
    with Engine(node.address, 2) as engine:
        engine.ranks[0].save(keys)
        assert engine.load(keys) == 0
        engine.ranks[1].save(keys[:2])
        assert eventually(lambda: engine.load(keys)) == 2


def test_the_scheduler_waits_for_its_ranks(node: NodeThread) -> None:
    scheduler = Scheduler(node.address, 2)
    thread = threading.Thread(target=scheduler.start)
    thread.start()
    ranks = [Rank(node.address, n, 2).start() for n in (1, 0)]
    thread.join(5)
    assert scheduler.client.responsive
    assert scheduler.client.namespace == ranks[0].attach.namespace
    scheduler.close()
    for rank in ranks:
        rank.close()


def test_ranks_that_never_come_are_a_refusal(node: NodeThread) -> None:
    rank = Rank(node.address, 0, 2).start()
    with pytest.raises(KVHavenError, match=r"not all 2 ranks of engine engine .* within 0\.2 s"):
        Scheduler(node.address, 2, wait_ms=200).start()
    rank.close()


def test_ranks_that_disagree_are_refused_with_what_differs(node: NodeThread) -> None:
    first = Rank(node.address, 0, 2).start()
    with pytest.raises(KVHavenError, match=r"rank 1 computes another KV .* differ in model"):
        Rank(node.address, 1, 2, model="another").start()
    with pytest.raises(KVHavenError, match="rank 1 says the engine has 3 ranks, the others say 2"):
        Rank(node.address, 1, 3).start()
    with pytest.raises(KVHavenError, match="rank 0 of engine engine is attached already"):
        Rank(node.address, 0, 2).start()
    with pytest.raises(KVHavenError, match=r"rank 2 is not in 0\.\.1"):
        Rank(node.address, 2, 2).start()
    # The right one is still welcome.
    second = Rank(node.address, 1, 2).start()
    first.close()
    second.close()


def test_a_shard_without_bytes_is_refused(node: NodeThread) -> None:
    with pytest.raises(KVHavenError, match="must be more than none"):
        Rank(node.address, shard_bytes=0).start()
    assert not node.status().members


def test_a_namespace_with_another_shard_table_is_refused_and_leaves_nothing(
    node: NodeThread,
) -> None:
    with Engine(node.address, engine="a"):
        rank = Rank(node.address, engine="b")
        other = Rank(node.address, engine="b", shard_bytes=5000)
        other.client._attach = msgspec.structs.replace(
            other.client._attach, namespace=rank.attach.namespace
        )
        with pytest.raises(KVHavenError, match="the digest must name the geometry too"):
            other.start()
        # The engine's name is not blocked by the attempt.
        rank.start()
        rank.close()


def test_two_schedulers_over_one_set_of_ranks_are_refused(node: NodeThread) -> None:
    with Engine(node.address), pytest.raises(KVHavenError, match="has a scheduler already"):
        Scheduler(node.address).start()
    with (
        contextlib.closing(Rank(node.address).start()),
        pytest.raises(KVHavenError, match="expects 2 ranks, they say they are 1"),
    ):
        Scheduler(node.address, 2).start()


def test_an_engine_that_restarts_under_its_name_is_a_new_session(node: NodeThread) -> None:
    keys = prompt("p", 3)
    for _ in range(3):
        with Engine(node.address, 2) as engine:
            engine.save(keys)
            assert eventually(lambda: engine.load(keys)) == 3
    settled(node.address, members=0)


def test_a_restarted_engine_does_not_join_the_zombies_of_the_old_one(node: NodeThread) -> None:
    """The old engine's rank 1 still maps the arena; its rank 0 and scheduler are gone."""
    with Engine(node.address, 2) as old:
        old.scheduler.close()
        old.ranks[0].close()
        eventually(lambda: len(node.status().members) == 1)
        with Engine(node.address, 2) as new:
            sessions = [member.session for member in node.status().members]
            assert sorted(sessions) == ["engine#1", "engine#2", "engine#2", "engine#2"]
            assert new.save(prompt("p", 2)) == 2
            assert eventually(lambda: new.load(prompt("p", 2))) == 2
    settled(node.address, members=0)


def test_several_engines_share_what_one_has_saved(node: NodeThread) -> None:
    keys = prompt("p", 6)
    with Engine(node.address, engine="a") as first, Engine(node.address, engine="b") as second:
        assert first.save(keys) == 6
        assert eventually(lambda: second.load(keys)) == 6
        assert second.save(keys) == 0
        assert second.save([*prompt("q", 2)]) == 2


def test_models_do_not_share(node: NodeThread) -> None:
    keys = prompt("p", 6)
    with Engine(node.address, engine="a") as first:
        first.save(keys)
        assert eventually(lambda: first.load(keys)) == 6
        with Engine(node.address, engine="b", model="another") as second:
            assert second.load(keys) == 0


# --- what is not of the wire format -----------------------------------------------------------


def test_another_wire_version_is_refused_with_the_reason(node: NodeThread) -> None:
    with Raw(node) as raw:
        answer = raw.say(Hello(version=VERSION + 1)).hear()
        assert isinstance(answer, Refused)
        assert f"wire version {VERSION + 1}" in answer.reason
        assert raw.is_closed()


@pytest.mark.parametrize(
    "first", [Status(1), Release(1, [1]), AttachScheduler(1, "e", "m", 1, 0)], ids=repr
)
def test_the_first_message_is_hello(node: NodeThread, first: Message) -> None:
    with Raw(node) as raw:
        assert raw.say(first).is_closed()


@pytest.mark.parametrize(
    "message",
    [
        Acquire(1, b"", 0),
        Prefetch(b""),
        Reserve(1, b"", b""),
        Commit(1, []),
        Loaded(1, [1]),
        Release(1, [1]),
        Hello(),
    ],
    ids=repr,
)
def test_who_has_not_attached_has_nothing_to_say(node: NodeThread, message: Message) -> None:
    with Raw(node) as raw:
        assert raw.say(Hello(), message).is_closed()


def attached(node: NodeThread, role: str) -> Raw:
    raw = Raw(node)
    if role == "rank":
        raw.say(Hello(), Rank(node.address, engine="raw").attach)
    else:
        raw.say(Hello(), AttachScheduler(1, "engine", "another-process", 1, 0))
    assert isinstance(raw.hear(), Welcome)
    assert isinstance(raw.hear(), Attached)
    return raw


@pytest.mark.parametrize(
    "message",
    [
        Acquire(1, bytes(32), 0),
        Prefetch(bytes(32)),
        Release(1, [1]),
        Reserve(1, b"short", bytes(32)),
        Reserve(1, b"", bytes(31)),
        AttachScheduler(2, "engine", "m", 1, 0),
        Hello(),
    ],
    ids=repr,
)
def test_a_rank_that_says_what_is_not_its_business_is_closed(
    node: NodeThread, message: Message
) -> None:
    with attached(node, "rank") as raw:
        assert raw.say(message).is_closed()
    settled(node.address, members=0)


@pytest.mark.parametrize(
    "message", [Reserve(1, b"", bytes(32)), Loaded(1, [1]), Acquire(1, bytes(31), 0)], ids=repr
)
def test_a_scheduler_that_says_what_is_not_its_business_is_closed(
    node: NodeThread, message: Message
) -> None:
    with contextlib.closing(Rank(node.address).start()):
        with attached(node, "scheduler") as raw:
            assert raw.say(message).is_closed()
        settled(node.address, members=1)


def test_a_scheduler_that_leaves_while_it_waits_is_forgotten(node: NodeThread) -> None:
    with Raw(node) as raw:
        raw.say(Hello(), AttachScheduler(1, "engine", "m", 1, 10_000))
        assert isinstance(raw.hear(), Welcome)
    time.sleep(0.05)
    with Engine(node.address) as engine:
        assert engine.load(prompt("p", 1)) == 0


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        struct.pack("<I", 0xFFFFFFFF),
        struct.pack("<I", 5) + b"\xc1\xc1\xc1\xc1\xc1",
        struct.pack("<I", 0),
    ],
)
def test_garbage_closes_its_connection_and_changes_nothing_else(
    node: NodeThread, garbage: bytes
) -> None:
    keys = prompt("p", 4)
    with Engine(node.address) as engine:
        engine.save(keys)
        before = eventually(lambda: engine.load(keys))
        for greeting in (b"", encode(Hello())):
            with Raw(node) as raw:
                raw.raw(greeting + garbage)
                assert raw.is_closed()
        assert engine.load(keys) == before == 4
        assert engine.scheduler.client.responsive


def test_a_truncated_frame_is_just_a_closed_connection(node: NodeThread) -> None:
    with Raw(node) as raw:
        raw.say(Hello()).raw(encode(Status(1))[:-3])
        assert isinstance(raw.hear(), Welcome)
    with connect(node.address) as control:
        assert control.status()


FRAMES = st.one_of(
    st.binary(max_size=300),
    st.binary(max_size=100).map(lambda body: struct.pack("<I", len(body)) + body),
    st.sampled_from(
        [
            Hello(),
            Status(1),
            Release(1, [1]),
            Acquire(1, bytes(64), 10),
            Reserve(1, b"", bytes(64)),
            Commit(1, [(bytes(32), 1, bytes(16))]),
            AttachScheduler(1, "engine", "fuzz", 1, 0),
            Rank("nowhere", engine="fuzz").attach,
        ]
    ).map(encode),
)


@hypothesis.settings(
    max_examples=60, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
@given(frames=st.lists(FRAMES, max_size=6), cut=st.integers(0, 40))
def test_fuzzed_streams_change_nothing_for_others(
    node: NodeThread, frames: list[bytes], cut: int
) -> None:
    stream = encode(Hello()) + b"".join(frames)
    with Raw(node) as raw:
        raw.raw(stream[: len(stream) - cut])
        raw.socket.shutdown(socket.SHUT_WR)
        raw.is_closed()
    node.check()
    settled(node.address, members=0)


def test_an_engine_serves_on_beside_a_storm_of_broken_clients(node: NodeThread) -> None:
    dice = random.Random(4)
    keys = prompt("p", 8)
    with Engine(node.address) as engine:
        engine.save(keys)
        for _ in range(40):
            with Raw(node) as raw:
                raw.raw(encode(Hello()) + dice.randbytes(dice.randrange(60)))
            assert engine.load(keys) in {0, 8}
        assert engine.load(keys) == 8
    settled(node.address, members=0)


# --- users and files --------------------------------------------------------------------------


def test_the_socket_is_for_its_user_alone(node: NodeThread, short_dir: Path) -> None:
    mode = stat.S_IMODE(Path(node.address).stat().st_mode)
    assert mode == 0o600
    prepare_directory(str(short_dir / "a" / "b" / "s.sock"))
    assert stat.S_IMODE((short_dir / "a" / "b").stat().st_mode) == 0o700


def test_a_directory_of_somebody_else_is_refused(short_dir: Path) -> None:
    theirs = short_dir / "theirs"
    theirs.mkdir()
    theirs.chmod(0o777)
    with pytest.raises(KVHavenError, match="others could answer there in our place"):
        prepare_directory(str(theirs / "s.sock"))
    theirs.chmod(0o700)
    prepare_directory(str(theirs / "s.sock"))
    if os.geteuid() == 0:
        os.chown(theirs, 12345, 12345)
        with pytest.raises(KVHavenError, match="belongs to user 12345"):
            prepare_directory(str(theirs / "s.sock"))
    prepare_directory("/tmp/s.sock")  # sticky: nobody can put a socket in our socket's place


def test_an_address_that_is_too_long_is_refused(short_dir: Path) -> None:
    with pytest.raises(KVHavenError, match="set runtime_dir to a shorter path"):
        prepare_directory(str(short_dir / ("x" * 120) / "s.sock"))


ANOTHER_USER = """
import encodings.idna, os, socket, sys
from kvhaven.client.handshake import shake_hands
from kvhaven.protocol import AttachScheduler, FrameReader, Hello, encode
os.setgroups([]); os.setgid(65534); os.setuid(65534)
sock = socket.socket(socket.AF_UNIX)
sock.settimeout(5)
sock.connect(sys.argv[1])
try:
    sock.sendall(encode(Hello()))
    print("said", sock.recv(100))
except OSError as error:
    print("said b''")
other = socket.socket(socket.AF_UNIX)
other.connect(sys.argv[1])
try:
    shake_hands(other, AttachScheduler(1, "e", "m", 1, 0), FrameReader())
except Exception as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused_even_where_the_socket_is_open(
    node: NodeThread, short_dir: Path
) -> None:
    short_dir.chmod(0o755)
    Path(node.address).chmod(0o666)
    done = subprocess.run(
        [sys.executable, "-c", ANOTHER_USER, node.address],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert done.stdout.splitlines() == [
        "said b''",
        "the service there runs as user 0, this process as 65534: run both as the same user",
    ], done.stderr
    assert node.status().members == []


def test_nobody_listening_is_said_with_what_to_do(short_dir: Path) -> None:
    with (
        pytest.raises(ServiceUnavailableError, match="kvhaven serve"),
        connect(str(short_dir / "none.sock")),
    ):
        pass


# --- connections that break -------------------------------------------------------------------


def test_a_member_that_comes_back_before_it_was_lost_stays_connected(node: NodeThread) -> None:
    """The old connection is closed, and its end does not count as the member's."""
    attach = Rank(node.address, engine="raw").attach
    with Raw(node) as old, Raw(node) as new:
        old.say(Hello(), attach)
        assert isinstance(old.hear(), Welcome)
        first = old.hear()
        new.say(Hello(), attach)
        assert isinstance(new.hear(), Welcome)
        second = new.hear()
        assert isinstance(first, Attached)
        assert isinstance(second, Attached)
        assert first.segments == second.segments
        assert old.is_closed()
        (member,) = node.status().members
        assert member.connected
        assert new.say(Reserve(1, b"", bytes(32))).hear() is not None


def test_grants_that_never_arrived_end_when_the_rank_is_back(node: NodeThread) -> None:
    with contextlib.closing(Rank(node.address).start()) as rank:
        (kept,) = rank.reserve(prompt("kept", 1))
        rank.reserve(prompt("lost", 3))
        rank.client._holding = {kept.generation}  # as if the answer had not come
        node.cut()
        # What is still used is the kept one's: it may be written at this moment.
        eventually(lambda: node.status().catalog.used_bytes == EXTENT_BYTES)
        assert node.status().catalog.doomed_bytes == EXTENT_BYTES
        rank.client.commit([rank.write(kept)])
        settled(node.address)
        assert node.status().arena_used_bytes == 0  # lost before its commit: discarded


def test_a_client_that_does_not_read_is_disconnected(node: NodeThread) -> None:
    with Raw(node) as raw:
        raw.say(Hello())
        frame = encode(Status(1))
        raw.socket.settimeout(5)
        with contextlib.suppress(OSError):
            for _ in range(2000):
                raw.raw(frame * 200)
                if not node.call(lambda: node.service._connections):
                    break
        eventually(lambda: not node.call(lambda: node.service._connections))
    assert node.status().members == []
