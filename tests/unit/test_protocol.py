# SPDX-License-Identifier: Apache-2.0
"""Frames and messages by themselves."""

import contextlib
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhaven.errors import ProtocolError
from kvhaven.protocol import (
    FRAME_LIMIT,
    MOST_ADAPTERS,
    MOST_FIELDS,
    MOST_HELD,
    MOST_SHARDS,
    Abort,
    Acquire,
    Acquired,
    AdapterVersion,
    Attached,
    AttachRank,
    Clear,
    Commit,
    Flush,
    FrameReader,
    Granted,
    Grown,
    Hello,
    KeyList,
    Message,
    ModelChanged,
    ModelState,
    Ready,
    Release,
    Reserve,
    SegmentInfo,
    StatusReply,
    decode_client,
    decode_service,
    encode,
)
from kvhaven.types import Shard, ShardId, ShardTable

KEY = bytes(range(32))
SUM = bytes(16)
SHARD = Shard(ShardId(0, (0, 8), (0, 2)), 4096)
OTHER = Shard(ShardId(0, (0, 8), (2, 4)), 4096)

FROM_CLIENTS: Sequence[Message] = (
    Hello(),
    AttachRank(1, "e", "m", 0, 2, KEY, {"model": "m"}, (SHARD, OTHER), (7, 9), True),
    Acquire(3, KEY * 2, 100),
    Release(4, [1, 2]),
    Ready(5, 0, 7, 1 << 40),
    Reserve(5, b"", KEY, 17),
    Commit(6, [(KEY, 12, [SUM, SUM]), (KEY, 13, [])]),
    Abort(7, [(KEY, 1 << 60)]),
    Clear(8, b"", "disk"),
    Flush(9, 0),
)
FROM_THE_SERVICE: Sequence[Message] = (
    Attached(1, (SegmentInfo(0, 1 << 40, 7, 1 << 30),), KEY, ShardTable((SHARD, OTHER)), (0, 4096)),
    Grown(0, 1 << 40),
    Acquired(2, True, [(0, 1 << 33)], b"\1"),
    Granted(3, [None, (0, 8192, 5, True), (0, 0, 6, False)]),
    StatusReply(4, b"{}"),
)


@pytest.mark.parametrize("message", FROM_CLIENTS)
def test_what_a_client_says_arrives(message: Message) -> None:
    (body,) = FrameReader().feed(encode(message))
    assert decode_client(body) == message


@pytest.mark.parametrize("message", FROM_THE_SERVICE)
def test_what_the_service_says_arrives(message: Message) -> None:
    (body,) = FrameReader().feed(encode(message))
    assert decode_service(body) == message


def test_unknown_fields_are_ignored() -> None:
    body = {"type": "Release", "seq": 1, "lease_ids": [2], "reason": "of a newer client"}
    assert decode_client(msgspec.msgpack.encode(body)) == Release(1, [2])


def test_fields_that_came_later_have_defaults() -> None:
    old = msgspec.to_builtins(FROM_CLIENTS[1], builtin_types=(bytes,))
    del old["holding"], old["shared"]
    decoded = decode_client(msgspec.msgpack.encode(old))
    assert isinstance(decoded, AttachRank)
    assert (decoded.holding, decoded.shared) == ((), False)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"type": "Nonsense"}),
        msgspec.msgpack.encode({"type": "Welcome", "service": "s", "pid": 1}),
        msgspec.msgpack.encode({"type": "Release", "seq": "one", "lease_ids": []}),
        msgspec.msgpack.encode({"type": "Commit", "seq": 1, "chunks": [(b"short", 1, [SUM])]}),
        msgspec.msgpack.encode({"type": "Commit", "seq": 1, "chunks": [(KEY, 1, [b"short"])]}),
        msgspec.msgpack.encode({"type": "Commit", "seq": 1, "chunks": [(KEY, 1, SUM)]}),
        msgspec.msgpack.encode({"type": "Acquire", "lease_id": 1, "keys": KEY, "wait_ms": -1}),
    ],
)
def test_what_is_no_message_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="malformed message"):
        decode_client(body)


def test_a_frame_over_the_limit_is_neither_sent_nor_taken() -> None:
    with pytest.raises(ProtocolError, match="at most"):
        encode(Acquire(1, bytes(FRAME_LIMIT), 0))
    with pytest.raises(ProtocolError, match="announced"):
        FrameReader().feed(struct.pack("<I", FRAME_LIMIT + 1))


@given(st.lists(st.sampled_from(FROM_CLIENTS), max_size=8), st.data())
def test_frames_are_found_however_the_stream_is_cut(
    messages: list[Message], data: st.DataObject
) -> None:
    stream = b"".join(encode(message) for message in messages)
    reader, bodies, at = FrameReader(), [], 0
    while at < len(stream):
        size = data.draw(st.integers(1, len(stream) - at))
        bodies += reader.feed(stream[at : at + size])
        at += size
    assert [decode_client(body) for body in bodies] == messages


@given(st.binary(max_size=200))
def test_garbage_is_a_protocol_error_or_a_message(garbage: bytes) -> None:
    for decode in (decode_client, decode_service):
        with contextlib.suppress(ProtocolError):
            decode(garbage)


def test_keys_are_whole() -> None:
    assert list(KeyList(KEY + KEY[::-1])) == [KEY, KEY[::-1]]
    with pytest.raises(ProtocolError, match="whole number"):
        KeyList(KEY + b"x")


@pytest.mark.parametrize("beyond", [0, 1])
@pytest.mark.parametrize(
    ("most", "message"),
    [
        (MOST_FIELDS, lambda n: attach(fields={str(number): "" for number in range(n)})),
        (4096, lambda n: attach(fields={"model": "m" * n})),
        (4096, lambda n: attach(fields={"m" * n: "model"})),
        (MOST_SHARDS, lambda n: attach(shards=(SHARD,) * n)),
        (MOST_HELD, lambda n: attach(holding=(1,) * n)),
        (MOST_ADAPTERS, lambda n: attach(model=with_adapters(n))),
        (MOST_ADAPTERS, lambda n: ModelChanged(1, with_adapters(n))),
        (MOST_SHARDS, lambda n: Commit(1, [(KEY, 1, [SUM] * n)])),
    ],
    ids=["fields", "value", "name", "shards", "holding", "adapters", "changed", "sums"],
)
def test_a_message_says_a_bounded_number_of_things(
    most: int, message: Callable[[int], Message], beyond: int
) -> None:
    """Else one frame of 4 MiB would hold the service's loop for a second and more."""
    said = message(most + beyond)
    refused = pytest.raises(ProtocolError) if beyond else contextlib.nullcontext()
    with refused:
        assert decode_client(encode(said)[4:]) == said


def attach(**fields: Any) -> Message:
    return msgspec.structs.replace(FROM_CLIENTS[1], **fields)


def with_adapters(count: int) -> ModelState:
    return ModelState(1, (AdapterVersion(1, KEY, 1),) * count)
