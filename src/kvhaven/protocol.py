# SPDX-License-Identifier: Apache-2.0
"""The wire between engines and the node service: msgpack frames on a unix socket.

A frame is a little-endian uint32 (the body's length in bytes) and a msgpack map with the
message's name under `type`. Unknown fields are ignored, so either side may be newer.
`docs/formats.md` lists every message.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import Annotated, Final, TypeVar, overload

import msgspec

from kvhaven.errors import ProtocolError
from kvhaven.types import (
    CHECKSUM_BYTES,
    KEY_BYTES,
    TENANT_BYTES,
    ChunkKey,
    Shard,
    ShardTable,
    TenantId,
)

T = TypeVar("T")

VERSION: Final = 4
TENANTS: Final = 1
"""The feature bit of a service that tells tenants apart."""
FRAME_LIMIT: Final = 4 << 20
"""Largest body in bytes; a longer one is malformed."""
MOST_KEYS: Final = 1 << 15
"""Chunks that an `Acquire` or a `Prefetch` may ask for."""
MOST_ITEMS: Final = 1 << 12
"""Chunks, or leases, that any other message may name."""
MOST_HELD: Final = 1 << 15
"""Grants that a rank may hold; the catalog gives half as many (`reservations.MOST_OPEN`)."""
MOST_SHARDS: Final = 1 << 10
"""Shards of a rank: in the format portable, its KV heads times the groups of a hybrid model."""
MOST_FIELDS: Final = 1 << 12
"""Fields of a namespace; our connector has 1024 settings at most (130 of vLLM), and files."""
MOST_ADAPTERS: Final = 1 << 12
"""LoRA adapters of a rank; our connector remembers as many, vLLM has hundreds."""

_LENGTH: Final = struct.Struct("<I")

Key = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Keys = Annotated[bytes, msgspec.Meta(max_length=MOST_KEYS * KEY_BYTES)]
FewKeys = Annotated[bytes, msgspec.Meta(max_length=MOST_ITEMS * KEY_BYTES)]
_FEW: Final = msgspec.Meta(max_length=MOST_ITEMS)
Sum = Annotated[bytes, msgspec.Meta(min_length=CHECKSUM_BYTES, max_length=CHECKSUM_BYTES)]
Sums = Annotated[Sequence[Sum], msgspec.Meta(max_length=MOST_SHARDS)]
Tenant = Annotated[bytes, msgspec.Meta(max_length=TENANT_BYTES)]
"""`TENANT_BYTES` bytes, or none."""
NO_LIMIT: Final = -1
MOST_QUOTA: Final = 1 << 50
Quota = Annotated[int, msgspec.Meta(ge=NO_LIMIT, le=MOST_QUOTA)]
_Text = Annotated[str, msgspec.Meta(max_length=1 << 12)]  # as long as a path
Fields = Annotated[dict[_Text, _Text], msgspec.Meta(max_length=MOST_FIELDS)]
Milliseconds = Annotated[int, msgspec.Meta(ge=0, le=3_600_000)]


class Message(msgspec.Struct, frozen=True, tag_field="type"):
    """Base of all messages; the class name is the tag."""


# --- said once per connection ---------------------------------------------------------------


class Hello(Message, frozen=True, tag=True):
    """First message of a client."""

    version: int = VERSION
    features: int = 0
    frame_limit: int = FRAME_LIMIT


class Welcome(Message, frozen=True, tag=True):
    """First message of the service. `service` is new each time the service starts."""

    service: str
    pid: int
    version: int = VERSION
    features: int = 0
    frame_limit: int = FRAME_LIMIT


class AdapterVersion(msgspec.Struct, frozen=True):
    """The LoRA adapter that a rank's model has loaded under a number.

    `digest` is SHA-256 of what was loaded; `generation` counts the different contents that the
    rank has loaded under this number, from 1 on.
    """

    adapter: int
    digest: Key
    generation: int


class ModelState(msgspec.Struct, frozen=True):
    """What a rank's model holds besides the weights that it started with.

    `weights` counts the changes of its weights since then.
    """

    weights: int = 0
    adapters: Annotated[tuple[AdapterVersion, ...], msgspec.Meta(max_length=MOST_ADAPTERS)] = ()


class AttachRank(Message, frozen=True, tag=True):
    """A worker says who it is. `member` names its process; `fields` are its namespace's.

    `shards` are those it holds, in the order of their ids; two ranks of a session hold the
    same ones or none in common. The same ones only if `shared` says that their bytes are
    equal on every rank that holds them: then one rank writes them for all.

    `holding` are the generations of grants it got on earlier connections and has neither
    committed nor aborted. All others that the service remembers never arrived: they end.
    """

    id: int
    session: str
    member: str
    rank: int
    world_size: int
    namespace: Key
    fields: Fields
    shards: Annotated[tuple[Shard, ...], msgspec.Meta(max_length=MOST_SHARDS)]
    holding: Annotated[tuple[int, ...], msgspec.Meta(max_length=MOST_HELD)] = ()
    shared: bool = False
    model: ModelState = ModelState()


class AttachScheduler(Message, frozen=True, tag=True):
    """A scheduler joins the session its ranks opened; waits `wait_ms` for them."""

    id: int
    session: str
    member: str
    world_size: int
    wait_ms: Milliseconds


class SegmentInfo(msgspec.Struct, frozen=True):
    """A segment of the arena; `lock_byte` is the one that this member locks while it maps it.

    Its first `usable` bytes are allocated; the others must not be touched before `Grown`.
    """

    index: int
    size: int
    lock_byte: int
    usable: int


class Attached(Message, frozen=True, tag=True):
    """Answer to both. A rank gets the segments, their descriptors come with the frame.

    The scheduler gets the namespace, the shard table on which all ranks agree, and for each
    rank where the first of its shards lies in an extent; its others follow.
    """

    id: int
    segments: tuple[SegmentInfo, ...] = ()
    namespace: bytes = b""
    table: ShardTable | None = None
    offsets: tuple[int, ...] = ()


class Grown(Message, frozen=True, tag=True):
    """Tells a rank that the first `usable` bytes of a segment are allocated."""

    segment: int
    usable: int


class Refused(Message, frozen=True, tag=True):
    """The request `id` (0: the connection) cannot be served; `reason` is for people.

    `passing`: no setting is wrong, so an engine need not end; trying again may help.
    """

    id: int
    reason: str
    passing: bool = False


# --- the scheduler's ------------------------------------------------------------------------


class Prefetch(Message, frozen=True, tag=True):
    """Promote what is stored below memory and mark the chain as used; no lease, no answer."""

    keys: Keys
    tenant: Tenant = b""


class Acquire(Message, frozen=True, tag=True):
    """Lease the longest prefix of `keys`; promotions are waited for, `wait_ms` at most."""

    lease_id: int
    keys: Keys
    wait_ms: Milliseconds
    tenant: Tenant = b""


class Acquired(Message, frozen=True, tag=True):
    """The lease's state: `(segment, offset)` of each chunk's extent, one source byte each.

    `final=False` says that promotions are under way and another answer follows.
    """

    lease_id: int
    final: bool
    extents: list[tuple[int, int]]
    sources: bytes


class Release(Message, frozen=True, tag=True):
    """These leases were not handed to any rank and end now. Reliable."""

    seq: int
    lease_ids: Annotated[Sequence[int], _FEW]


class RankModel(Message, frozen=True, tag=True):
    """Tells a scheduler what the model of one of its ranks holds: when it attaches, and anew."""

    rank: int
    model: ModelState


# --- a rank's -------------------------------------------------------------------------------


class Ready(Message, frozen=True, tag=True):
    """The rank can copy to and from the first `usable` bytes of a segment. Reliable.

    It is true of the mapping that holds `lock_byte`, and of no other.
    """

    seq: int
    segment: int
    lock_byte: int
    usable: int


class ModelChanged(Message, frozen=True, tag=True):
    """The rank's model holds this from now on. Reliable."""

    seq: int
    model: ModelState


class Loaded(Message, frozen=True, tag=True):
    """The rank's copies for these leases have ended. Reliable."""

    seq: int
    lease_ids: Annotated[Sequence[int], _FEW]


class Reserve(Message, frozen=True, tag=True):
    """Space for consecutive chunks; `parent` is the key before them (empty: none).

    `save` is the number of the save, the same on all ranks of the engine and used for no
    other: all shards of a chunk come from one save.
    """

    id: int
    parent: bytes
    keys: FewKeys
    save: int
    tenant: Tenant = b""


class Granted(Message, frozen=True, tag=True):
    """Answer to `Reserve`: `(segment, offset, generation, writes)` for each chunk, or nothing.

    `offset` is that of the rank's first shard. It writes all its shards, or, where `writes` is
    false, none: another rank of its engine writes the same ones. It commits or aborts either way.
    """

    id: int
    grants: list[tuple[int, int, int, bool] | None]


class Commit(Message, frozen=True, tag=True):
    """A rank has done its part of these chunks: `(key, generation, checksums)`. Reliable.

    The checksums are those of the shards it was to write, in order.
    """

    seq: int
    chunks: Annotated[Sequence[tuple[Key, int, Sums]], _FEW]


class Abort(Message, frozen=True, tag=True):
    """Chunks given up: `(key, generation)`; no copy into them is running. Reliable."""

    seq: int
    chunks: Annotated[Sequence[tuple[Key, int]], _FEW]


class Ack(Message, frozen=True, tag=True):
    """All reliable messages of this member up to `seq` were handled."""

    seq: int


# --- people's -------------------------------------------------------------------------------


class Status(Message, frozen=True, tag=True):
    """Ask for everything `kvhaven status` shows."""

    id: int


class StatusReply(Message, frozen=True, tag=True):
    """The answer, as JSON (its shape is `service.status.ServiceStatus`)."""

    id: int
    status: bytes


class Clear(Message, frozen=True, tag=True):
    """Drop a namespace (its digest, empty: all) from a tier (empty: from all and memory).

    With `tenant`, only what is that tenant's.
    """

    id: int
    namespace: bytes
    tier: str
    tenant: Tenant = b""


class Cleared(Message, frozen=True, tag=True):
    """What `Clear` dropped."""

    id: int
    chunks: int
    bytes: int


class Limit(Message, frozen=True, tag=True):
    """Give a tenant other quotas, in bytes; `NO_LIMIT`: none at all, nil: as it is."""

    id: int
    tenant: Tenant
    memory: Quota | None = None
    disk: Quota | None = None


class Limited(Message, frozen=True, tag=True):
    """The quotas of a tenant that count now (nil: none), and what it has."""

    id: int
    memory: int | None
    disk: int | None
    memory_bytes: int
    disk_bytes: int


class Flush(Message, frozen=True, tag=True):
    """Wait until everything resident is written to the tiers, `wait_ms` at most."""

    id: int
    wait_ms: Milliseconds


class Flushed(Message, frozen=True, tag=True):
    """Answer to `Flush`: writes still outstanding (0: all is stored)."""

    id: int
    outstanding: int


ClientMessage = (
    Hello
    | AttachRank
    | AttachScheduler
    | Prefetch
    | Acquire
    | Release
    | Ready
    | Loaded
    | Reserve
    | Commit
    | Abort
    | ModelChanged
    | Status
    | Clear
    | Limit
    | Flush
)
ServiceMessage = (
    Welcome
    | Attached
    | Grown
    | Refused
    | Acquired
    | RankModel
    | Granted
    | Ack
    | StatusReply
    | Cleared
    | Limited
    | Flushed
)
Reliable = Release | Ready | Loaded | Commit | Abort | ModelChanged

_encoder: Final = msgspec.msgpack.Encoder()
_client_decoder: Final[msgspec.msgpack.Decoder[ClientMessage]] = msgspec.msgpack.Decoder(
    ClientMessage
)
_service_decoder: Final[msgspec.msgpack.Decoder[ServiceMessage]] = msgspec.msgpack.Decoder(
    ServiceMessage
)


def encode(message: Message) -> bytes:
    """Return the message as one frame. Raises `ProtocolError` when it is over the limit."""
    body = _encoder.encode(message)
    if len(body) > FRAME_LIMIT:
        raise ProtocolError(
            f"{type(message).__name__} of {len(body)} bytes; a frame has {FRAME_LIMIT} at most"
        )
    return _LENGTH.pack(len(body)) + body


def decode_client(body: bytes | bytearray | memoryview) -> ClientMessage:
    """Return what a client said. Raises `ProtocolError`."""
    try:
        return _client_decoder.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ProtocolError(f"malformed message of {len(body)} bytes: {error}") from error


def decode_service(body: bytes | bytearray | memoryview) -> ServiceMessage:
    """Return what the service said. Raises `ProtocolError`."""
    try:
        return _service_decoder.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ProtocolError(f"malformed message of {len(body)} bytes: {error}") from error


class FrameReader:
    """Cuts a byte stream into frames' bodies."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._wanted = _LENGTH.size  # bytes by which there is more to know

    def feed(self, data: bytes) -> list[memoryview]:
        """Add received bytes; return the bodies that are complete now, in order.

        Raises `ProtocolError` for a length over the limit.
        """
        self._buffer += data
        if len(self._buffer) < self._wanted:
            return []
        received = memoryview(self._buffer)  # it belongs to the bodies now
        bodies, at = [], 0
        while (length := _length_at(received, at)) is not None:
            end = at + _LENGTH.size + length
            if len(received) < end:
                break
            bodies.append(received[at + _LENGTH.size : end])
            at = end
        self._buffer = bytearray(received[at:])
        self._wanted = _LENGTH.size + (length or 0)
        return bodies


def _length_at(received: memoryview, at: int) -> int | None:
    """Return the length that a frame announces; None if that has not come yet."""
    if len(received) - at < _LENGTH.size:
        return None
    length: int = _LENGTH.unpack_from(received, at)[0]
    if length > FRAME_LIMIT:
        raise ProtocolError(f"a frame of {length} bytes was announced; {FRAME_LIMIT} are allowed")
    return length


class KeyList(Sequence[ChunkKey]):
    """The keys in a blob of 32 bytes each. There may be many, so it makes them when asked for.

    Raises `ProtocolError` for a blob that ends within a key.
    """

    __slots__ = ("_blob",)

    def __init__(self, blob: bytes) -> None:
        if len(blob) % KEY_BYTES:
            raise ProtocolError(
                f"{len(blob)} bytes are not a whole number of {KEY_BYTES}-byte keys"
            )
        self._blob = blob

    def __len__(self) -> int:
        return len(self._blob) // KEY_BYTES

    @overload
    def __getitem__(self, at: int) -> ChunkKey: ...

    @overload
    def __getitem__(self, at: slice) -> list[ChunkKey]: ...

    def __getitem__(self, at: int | slice) -> ChunkKey | list[ChunkKey]:
        starts = range(0, len(self._blob), KEY_BYTES)[at]
        if isinstance(starts, range):
            return [ChunkKey(self._blob[start : start + KEY_BYTES]) for start in starts]
        return ChunkKey(self._blob[starts : starts + KEY_BYTES])


def batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Yield items in order, `size` at a time."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def tenant_of(raw: bytes) -> TenantId:
    """Return whom a message names, if anybody. Raises `ProtocolError` for half a name."""
    if len(raw) not in {0, TENANT_BYTES}:
        raise ProtocolError(f"{len(raw)} bytes name no tenant; {TENANT_BYTES} are needed")
    return TenantId(raw)
