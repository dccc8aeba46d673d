# SPDX-License-Identifier: Apache-2.0
"""What is not of the wire format closes its connection and changes nothing else."""

import contextlib
import random
import socket
import struct
import time

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhaven.client.control import connect
from kvhaven.protocol import (
    VERSION,
    Acquire,
    Attached,
    AttachScheduler,
    Commit,
    Hello,
    Loaded,
    Message,
    Prefetch,
    Refused,
    Release,
    Reserve,
    Status,
    StatusReply,
    Welcome,
    encode,
)
from kvhaven.service import connection
from tests.crash.engine import Engine, Rank, prompt
from tests.crash.node import NodeThread, eventually, settled
from tests.crash.raw import Raw


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


def test_who_does_not_say_hello_is_disconnected(
    node: NodeThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a thousand of them would use up the descriptors, and keep engines out."""
    monkeypatch.setattr(connection, "_HELLO_S", 1.0)
    with Raw(node) as silent, Raw(node) as slow, Raw(node) as greeted:
        assert isinstance(greeted.say(Hello()).hear(), Welcome)
        slow.raw(encode(Hello())[:-1])
        assert silent.is_closed()
        assert slow.is_closed()
        assert isinstance(greeted.say(Status(1)).hear(), StatusReply)
    eventually(lambda: not node.call(lambda: len(node.service._connections)))


@pytest.mark.parametrize(
    "message",
    [
        Acquire(1, b"", 0),
        Prefetch(b""),
        Reserve(1, b"", b"", 1),
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
        Reserve(1, b"short", bytes(32), 1),
        Reserve(1, b"", bytes(31), 1),
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
    "message", [Reserve(1, b"", bytes(32), 1), Loaded(1, [1]), Acquire(1, bytes(31), 0)], ids=repr
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
            Reserve(1, b"", bytes(64), 1),
            Commit(1, [(bytes(32), 1, [bytes(16)])]),
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
