# SPDX-License-Identifier: Apache-2.0
"""Messages between the service and a NIXL helper process, over a SOCK_SEQPACKET pair.

A packet is one msgpack map with the message's name under `type`. Both processes run the same
version of KVHaven, so the format has no version.
"""

from typing import Final, Literal

import msgspec

PACKET: Final = 1 << 17
"""Longest packet in bytes; the metadata of a host with eight network cards is a few KB."""
PROBE_BYTES: Final = 4 * 4096
"""Size of the buffer that a self-test reads."""

Role = Literal["send", "receive"]


class Order(msgspec.Struct, frozen=True):
    """What a helper is started for, as JSON on its command line.

    It maps the first `usable` bytes of the segment `descriptor`, and locks `lock_byte` of it while
    it does. `protect`: map the segment read-only. `parent` is the pid of the service.
    """

    role: Role
    name: str
    descriptor: int
    size: int
    usable: int
    lock_byte: int
    protect: bool
    parent: int
    backends: list[str]


class HelperMessage(msgspec.Struct, frozen=True, tag_field="type"):
    """Base of all messages; the class name is the tag."""


class Up(HelperMessage, frozen=True, tag=True):
    """First message of a helper: NIXL runs and the arena is registered.

    `metadata` is NIXL's, for helpers that read from this one. The arena begins at the address
    `base`; `probe` is the content of a buffer at `probe_address`.
    """

    metadata: bytes
    base: int
    probe_address: int
    probe: bytes


class Connect(HelperMessage, frozen=True, tag=True):
    """Read another helper's probe buffer and compare it; forget the agent `replaces`."""

    id: int
    metadata: bytes
    probe_address: int
    probe: bytes
    replaces: str = ""


class Read(HelperMessage, frozen=True, tag=True):
    """Read `length` bytes at an address of a connected agent to an offset of the arena."""

    id: int
    agent: str
    address: int
    offset: int
    length: int


class Lending(HelperMessage, frozen=True, tag=True):
    """The number of chunks that other nodes may be reading from this helper now."""

    open: int


class Done(HelperMessage, frozen=True, tag=True):
    """A request has ended well. `agent` is NIXL's name of the agent that was connected."""

    id: int
    agent: str = ""


class Failed(HelperMessage, frozen=True, tag=True):
    """A request, or the start of the helper (id 0), has failed."""

    id: int
    reason: str


ToHelper = Connect | Read | Lending
FromHelper = Up | Done | Failed
TO_HELPER: Final[msgspec.msgpack.Decoder[ToHelper]] = msgspec.msgpack.Decoder(ToHelper)
FROM_HELPER: Final[msgspec.msgpack.Decoder[FromHelper]] = msgspec.msgpack.Decoder(FromHelper)
ENCODER: Final = msgspec.msgpack.Encoder()
