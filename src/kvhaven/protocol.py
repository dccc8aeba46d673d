# SPDX-License-Identifier: Apache-2.0
"""Wire protocol between engines and the node service: msgpack frames on a unix socket.

A frame is a little-endian uint32 (the body's length in bytes) and a msgpack map with the
message's name under `type`. Receivers ignore unknown fields, so either side may be newer.
`docs/formats.md` lists every message.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import Annotated, Final, Literal, TypeVar, overload

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

VERSION: Final = 7
TENANTS: Final = 1
"""Feature bit of a service that supports tenants."""
OBSERVE: Final = 2
"""Feature bit of a service that answers `Observe` and `List`."""
STEER: Final = 4
"""Feature bit of a service that answers `Steer`."""
MOST_ROWS: Final = 100
"""Maximum number of rows in a `Listed`."""
FRAME_LIMIT: Final = 4 << 20
"""Maximum length of a body in bytes; a longer one is malformed."""
MOST_KEYS: Final = 1 << 15
"""Maximum number of chunks in an `Acquire` or a `Prefetch`."""
MOST_ITEMS: Final = 1 << 12
"""Maximum number of chunks, or leases, in any other message."""
MOST_HELD: Final = 1 << 15
"""Maximum number of grants of a rank; the catalog issues half (`reservations.MOST_OPEN`)."""
MOST_SHARDS: Final = 1 << 10
"""Maximum number of shards of a rank: in the portable format, KV heads times KV groups."""
MOST_FIELDS: Final = 1 << 12
"""Maximum number of fields of a namespace; the connector sends at most 1024, and files."""
MOST_ADAPTERS: Final = 1 << 12
"""Maximum number of LoRA adapters of a rank, also in the connector; vLLM has hundreds."""

_LENGTH: Final = struct.Struct("<I")

Key = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
MaybeKey = Annotated[bytes, msgspec.Meta(max_length=KEY_BYTES)]
"""`KEY_BYTES` bytes, or empty."""
Keys = Annotated[bytes, msgspec.Meta(max_length=MOST_KEYS * KEY_BYTES)]
FewKeys = Annotated[bytes, msgspec.Meta(max_length=MOST_ITEMS * KEY_BYTES)]
_FEW: Final = msgspec.Meta(max_length=MOST_ITEMS)
Sum = Annotated[bytes, msgspec.Meta(min_length=CHECKSUM_BYTES, max_length=CHECKSUM_BYTES)]
Sums = Annotated[Sequence[Sum], msgspec.Meta(max_length=MOST_SHARDS)]
Tenant = Annotated[bytes, msgspec.Meta(max_length=TENANT_BYTES)]
"""`TENANT_BYTES` bytes, or empty."""
NO_LIMIT: Final = -1
MOST_QUOTA: Final = 1 << 50
Quota = Annotated[int, msgspec.Meta(ge=NO_LIMIT, le=MOST_QUOTA)]
_Text = Annotated[str, msgspec.Meta(max_length=1 << 12)]  # the length of a path
Fields = Annotated[dict[_Text, _Text], msgspec.Meta(max_length=MOST_FIELDS)]
MOST_NODE_NAME: Final = 64
NodeName = Annotated[str, msgspec.Meta(min_length=1, max_length=MOST_NODE_NAME)]
MOST_ADDRESS: Final = 256
"""Maximum length of a node's address (host:port) in characters."""
MOST_NAME: Final = 128
RequestName = Annotated[str, msgspec.Meta(min_length=1, max_length=MOST_NAME)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
ListKind = Literal["engines", "jobs", "namespaces", "pins", "requests", "settings", "tenants"]
Rows = Annotated[int, msgspec.Meta(ge=1, le=MOST_ROWS)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=3600)]
Milliseconds = Annotated[int, msgspec.Meta(ge=0, le=3_600_000)]


class Message(msgspec.Struct, frozen=True, tag_field="type"):
    """Base class of all messages; the class name is the tag."""


# --- once per connection --------------------------------------------------------------------


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
    """A LoRA adapter that a rank's model has loaded, by its number in the engine.

    `digest` is the SHA-256 of the loaded content. `generation` counts the different contents that
    the rank has loaded under this number, from 1 on.
    """

    adapter: int
    digest: Key
    generation: int


class ModelState(msgspec.Struct, frozen=True):
    """Changes of a rank's model since its start: updates of its weights, and LoRA adapters.

    `weights` counts the updates of the weights.
    """

    weights: int = 0
    adapters: Annotated[tuple[AdapterVersion, ...], msgspec.Meta(max_length=MOST_ADAPTERS)] = ()


class AttachRank(Message, frozen=True, tag=True):
    """Attaches a rank. `member` identifies its process; `fields` are its namespace's fields.

    `shards` are the shards that it holds, ordered by id. Two ranks of a session hold the same
    shards or disjoint ones. They may hold the same shards only if `shared` is set, which declares
    that their bytes are equal on all these ranks; then one rank writes them for all.

    `holding` are the generations of grants from earlier connections that the rank has neither
    committed nor aborted. The service ends all its other grants, because they never arrived.
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
    """Attaches a scheduler to its ranks' session; the service waits `wait_ms` for the ranks."""

    id: int
    session: str
    member: str
    world_size: int
    wait_ms: Milliseconds


class SegmentInfo(msgspec.Struct, frozen=True):
    """A segment of the arena. The member locks `lock_byte` while it maps the segment.

    The first `usable` bytes are allocated; the others must not be accessed before `Grown`.
    """

    index: int
    size: int
    lock_byte: int
    usable: int


class Attached(Message, frozen=True, tag=True):
    """Answer to `AttachRank` and `AttachScheduler`.

    Ranks receive the segments; the descriptors come with the frame. The scheduler receives the
    namespace, the shard table that all ranks share, and for each rank the offset of its first
    shard in an extent; its other shards follow.
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
    """Refusal of the request `id` (0: of the connection); `reason` is text for users.

    `passing`: no setting is wrong and a retry may succeed, so the engine need not exit.
    """

    id: int
    reason: str
    passing: bool = False


# --- scheduler ------------------------------------------------------------------------------


class Prefetch(Message, frozen=True, tag=True):
    """Promote chunks from tiers and mark the chain as used; without lease and answer."""

    keys: Keys
    tenant: Tenant = b""


class Acquire(Message, frozen=True, tag=True):
    """Lease the longest prefix of `keys`; the service waits up to `wait_ms` for promotions.

    `tail` is the key of the tail behind all of `keys` (empty: none); it is leased if they are.
    The first lookup of a request has its `prompt_tokens` and the `computed_tokens` of these that
    the engine's own cache has; `keys` begin with the chunk that contains the next one. With 0, the
    lookup does not count in statistics. `request` is the engine's id of the request, for display.

    The engine computes the first of `keys` in `compute_s` seconds, and each further one in
    `growth_s` more than the one before. Then the wait for promotions also ends when the chunks from
    tiers could have been computed, and chunks of tiers slower than that are skipped. 0: unknown.
    `limited`: the request's own limit on loaded tokens ends `keys`.
    """

    lease_id: int
    keys: Keys
    wait_ms: Milliseconds
    tenant: Tenant = b""
    tail: MaybeKey = b""
    prompt_tokens: Tokens = 0
    computed_tokens: Tokens = 0
    request: Annotated[str, msgspec.Meta(max_length=MOST_NAME)] = ""
    compute_s: Seconds = 0.0
    growth_s: Seconds = 0.0
    limited: bool = False


class Acquired(Message, frozen=True, tag=True):
    """State of a lease: `(segment, offset)` of each chunk's extent, and a source byte for each.

    With one more chunk than there were keys in the `Acquire`, the last one is the tail.
    A source is 0 for memory, else the number of the tier below, from 1 on. `final=False`:
    promotions are in progress and another answer follows. `slow` counts chunks in tiers that were
    skipped because computing them is faster, `late` those that were not read in time.
    """

    lease_id: int
    final: bool
    extents: list[tuple[int, int]]
    sources: bytes
    slow: int = 0
    late: int = 0


class Locate(Message, frozen=True, tag=True):
    """Asks which of these chunks are in memory or in a tier. Nothing is leased or promoted."""

    id: int
    keys: Keys
    tenant: Tenant = b""


class Located(Message, frozen=True, tag=True):
    """Answer to `Locate`: a byte for each chunk.

    1: known to be in memory or in a tier. 2: a shared tier, which was not asked, may have it. 0:
    nowhere.
    """

    id: int
    places: bytes


class Release(Message, frozen=True, tag=True):
    """Ends leases that were not passed to any rank. Reliable."""

    seq: int
    lease_ids: Annotated[Sequence[int], _FEW]


class OfferChain(Message, frozen=True, tag=True):
    """Announces the chain of a request to the node at `to` (host:port), which reads it meanwhile.

    `id` names the request, in this session. `tail` is the key of the tail behind all of `keys`
    (empty: none).
    """

    id: RequestName
    to: Annotated[str, msgspec.Meta(max_length=MOST_ADDRESS)]
    keys: Keys
    tenant: Tenant = b""
    tail: MaybeKey = b""


class EndChain(Message, frozen=True, tag=True):
    """The request of an `OfferChain` has ended: the engine computes no more chunks for it."""

    id: RequestName


UNKNOWN_NODE = "?"
"""`PullChain.source` if another node has prefilled the request, and its name is unknown."""


class PullChain(Message, frozen=True, tag=True):
    """Another node has prefilled the request of the next `Acquire`: ask it for these chunks.

    `source` is that node's name, or `UNKNOWN_NODE`: then the chunks may have been offered, or are
    being written to a shared tier. `tail` is the key of the tail behind `keys` (empty: none).
    """

    source: NodeName
    keys: Keys
    tenant: Tenant = b""
    tail: MaybeKey = b""


class EngineSettings(Message, frozen=True, tag=True):
    """Settings that were changed in the running service, as a JSON object of parsed values.

    They apply to the scheduler's next request, in place of its own. Each message has all of them,
    and replaces the one before. Sent after `Attached` if there are any, and after each change.
    """

    generation: int
    values: bytes


class SettingsTaken(Message, frozen=True, tag=True):
    """The scheduler applies the `EngineSettings` with this generation from now on."""

    generation: int


class RankModel(Message, frozen=True, tag=True):
    """Model state of a rank, sent to its scheduler at attach and after each change."""

    rank: int
    model: ModelState


# --- ranks ----------------------------------------------------------------------------------


class Ready(Message, frozen=True, tag=True):
    """The rank can copy to and from the first `usable` bytes of a segment. Reliable.

    It applies only to the mapping that holds `lock_byte`.
    """

    seq: int
    segment: int
    lock_byte: int
    usable: int


class ModelChanged(Message, frozen=True, tag=True):
    """New state of the rank's model. Reliable."""

    seq: int
    model: ModelState


class Loaded(Message, frozen=True, tag=True):
    """The rank's copies for these leases have ended. Reliable."""

    seq: int
    lease_ids: Annotated[Sequence[int], _FEW]


class Reserve(Message, frozen=True, tag=True):
    """Reserve space for consecutive chunks; `parent` is the preceding key (empty: none).

    `save` is the number of the save: the same on all ranks, and never reused by the engine. All
    shards of a chunk come from one save. With `tail`, the chunks are tails, of which so many tokens
    are stored.
    """

    id: int
    parent: bytes
    keys: FewKeys
    save: int
    tenant: Tenant = b""
    tail: Annotated[int, msgspec.Meta(ge=0)] = 0


class Granted(Message, frozen=True, tag=True):
    """Answer to `Reserve`: `(segment, offset, generation, writes)` or None for each chunk.

    `offset` is that of the rank's first shard. The rank writes all its shards, or none if `writes`
    is false: then another rank of its engine writes the same shards. In both cases it commits or
    aborts.
    """

    id: int
    grants: list[tuple[int, int, int, bool] | None]


class Commit(Message, frozen=True, tag=True):
    """Commits the rank's part of chunks: `(key, generation, checksums)`. Reliable.

    The checksums are those of the shards that the rank wrote, in order.
    """

    seq: int
    chunks: Annotated[Sequence[tuple[Key, int, Sums]], _FEW]


class Abort(Message, frozen=True, tag=True):
    """Aborts chunks, `(key, generation)`, into which no copy is running. Reliable."""

    seq: int
    chunks: Annotated[Sequence[tuple[Key, int]], _FEW]


class Ack(Message, frozen=True, tag=True):
    """Acknowledges all reliable messages of this member up to `seq`."""

    seq: int


# --- command line ---------------------------------------------------------------------------


class Status(Message, frozen=True, tag=True):
    """Requests the data of `kvhaven status`."""

    id: int


class StatusReply(Message, frozen=True, tag=True):
    """Answer to `Status`, as JSON of a `service.status.ServiceStatus`."""

    id: int
    status: bytes


class Clear(Message, frozen=True, tag=True):
    """Drop a namespace (digest; empty: all) from a tier (empty: memory and the local disk).

    With `tenant`, drop only chunks of that tenant. With `dry_run`, drop nothing and count them; a
    service without the feature `OBSERVE` would drop them.
    """

    id: int
    namespace: bytes
    tier: str
    tenant: Tenant = b""
    dry_run: bool = False


class Cleared(Message, frozen=True, tag=True):
    """Answer to `Clear`: the dropped chunks and their bytes."""

    id: int
    chunks: int
    bytes: int


class Limit(Message, frozen=True, tag=True):
    """Set the quotas of a tenant in bytes; `NO_LIMIT`: no quota, None: unchanged."""

    id: int
    tenant: Tenant
    memory: Quota | None = None
    disk: Quota | None = None


class Limited(Message, frozen=True, tag=True):
    """Answer to `Limit`: the tenant's quotas in bytes (None: no quota), and its usage."""

    id: int
    memory: int | None
    disk: int | None
    memory_bytes: int
    disk_bytes: int


class Flush(Message, frozen=True, tag=True):
    """Wait up to `wait_ms` until all resident chunks are written to the tiers."""

    id: int
    wait_ms: Milliseconds


class Flushed(Message, frozen=True, tag=True):
    """Answer to `Flush`: the number of outstanding writes (0: everything is stored)."""

    id: int
    outstanding: int


class Steer(Message, frozen=True, tag=True):
    """Requests a change, or what an operator asks.

    `request` is a `service.steering_messages.Request` as JSON.
    """

    id: int
    request: Annotated[bytes, msgspec.Meta(max_length=MOST_KEYS * KEY_BYTES * 2)]


class Steered(Message, frozen=True, tag=True):
    """Answer to `Steer`, as JSON, with the status that HTTP clients get."""

    id: int
    status: int
    answer: bytes


class Observe(Message, frozen=True, tag=True):
    """Requests a `Snapshot`. The connection counts as an observer from now on.

    `sample`: also the sampled requests from this number on, for an estimate of reuse; below 0:
    none.
    """

    id: int
    sample: int = -1


class Snapshot(Message, frozen=True, tag=True):
    """Answer to `Observe`, as JSON of a `service.snapshot.ServiceSnapshot`.

    With the id 0, it is no answer: the service sends it to every observer when it stops.
    """

    id: int
    snapshot: bytes
    sample: bytes = b""
    """Sampled requests, see `service.reuse`."""
    next_sample: int = 0
    """Number of the request behind them."""


class List(Message, frozen=True, tag=True):
    """Requests up to `limit` rows of a kind that follow the row `after` (empty: from the first)."""

    id: int
    kind: ListKind
    after: Annotated[str, msgspec.Meta(max_length=256)] = ""
    limit: Rows = MOST_ROWS


class Listed(Message, frozen=True, tag=True):
    """Answer to `List`: rows as a JSON list, in ascending order of their ids.

    Requests are in descending order: the newest first.

    `next` continues behind them (empty: there are no more). It is the last row's id, so it stays
    valid when rows come and go.
    """

    id: int
    rows: bytes
    next: str = ""


ClientMessage = (
    Hello
    | AttachRank
    | AttachScheduler
    | Prefetch
    | Acquire
    | Locate
    | Release
    | OfferChain
    | EndChain
    | PullChain
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
    | Observe
    | List
    | Steer
    | SettingsTaken
)
ServiceMessage = (
    Welcome
    | Attached
    | Grown
    | Refused
    | Acquired
    | Located
    | RankModel
    | EngineSettings
    | Granted
    | Ack
    | StatusReply
    | Cleared
    | Limited
    | Flushed
    | Snapshot
    | Listed
    | Steered
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
    """Return a message as one frame. Raises `ProtocolError` if it exceeds `FRAME_LIMIT`."""
    body = _encoder.encode(message)
    if len(body) > FRAME_LIMIT:
        raise ProtocolError(
            f"{type(message).__name__}: the message is too long (got {len(body)} bytes); "
            f"expected at most {FRAME_LIMIT}"
        )
    return _LENGTH.pack(len(body)) + body


def decode_client(body: bytes | bytearray | memoryview) -> ClientMessage:
    """Return the message of a client. Raises `ProtocolError` if it is malformed."""
    try:
        return _client_decoder.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ProtocolError(f"malformed message of {len(body)} bytes: {error}") from error


def decode_service(body: bytes | bytearray | memoryview) -> ServiceMessage:
    """Return the message of the service. Raises `ProtocolError` if it is malformed."""
    try:
        return _service_decoder.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ProtocolError(f"malformed message of {len(body)} bytes: {error}") from error


class FrameReader:
    """Splitter of a byte stream into the bodies of frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._wanted = _LENGTH.size  # buffered bytes needed for the next step

    def feed(self, data: bytes) -> list[memoryview]:
        """Add received bytes; return the bodies that they complete, in order.

        Raises `ProtocolError` if a length exceeds `FRAME_LIMIT`.
        """
        self._buffer += data
        if len(self._buffer) < self._wanted:
            return []
        received = memoryview(self._buffer)  # the bodies own it from here on
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
    """Return the length field of a frame; None if it has not arrived yet."""
    if len(received) - at < _LENGTH.size:
        return None
    length: int = _LENGTH.unpack_from(received, at)[0]
    if length > FRAME_LIMIT:
        raise ProtocolError(
            f"frame: too long (announced {length} bytes); expected at most {FRAME_LIMIT}"
        )
    return length


class KeyList(Sequence[ChunkKey]):
    """Sequence of the 32-byte keys in a blob. Keys are created on access, as there may be many.

    Raises `ProtocolError` if the blob ends within a key.
    """

    __slots__ = ("_blob",)

    def __init__(self, blob: bytes) -> None:
        if len(blob) % KEY_BYTES:
            raise ProtocolError(
                f"keys: {len(blob)} bytes are not a whole number of {KEY_BYTES}-byte keys"
            )
        self._blob = blob

    @property
    def raw(self) -> bytes:
        """The blob."""
        return self._blob

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


def tail_of(raw: bytes) -> ChunkKey | None:
    """Return the tail's key of a message, None if it has none.

    Raises `ProtocolError` if the key has a wrong length.
    """
    if len(raw) not in {0, KEY_BYTES}:
        raise ProtocolError(f"tail: not a key (got {len(raw)} bytes); expected 0 or {KEY_BYTES}")
    return ChunkKey(raw) if raw else None


def tenant_of(raw: bytes) -> TenantId:
    """Return the tenant of a message, possibly none.

    Raises `ProtocolError` if the name has a wrong length.
    """
    if len(raw) not in {0, TENANT_BYTES}:
        raise ProtocolError(
            f"tenant: malformed name (got {len(raw)} bytes); expected 0 or {TENANT_BYTES}"
        )
    return TenantId(raw)
