# SPDX-License-Identifier: Apache-2.0
"""Messages between nodes, their frames, and the handshake that proves the cluster's token.

A frame is a little-endian uint32 (the body's length in bytes) and a msgpack map with the message's
name under `type`. The payload follows a `Chunk` as raw bytes. `docs/formats.md` lists all messages.
"""

import contextlib
import hashlib
import hmac
import math
import os
import socket
import ssl
import struct
import time
from collections.abc import Callable, Collection
from typing import Annotated, Final, NoReturn, Protocol, TypeVar

import msgspec

from kvhaven.errors import KVHavenError, ProtocolError
from kvhaven.protocol import Key, MaybeKey, Sum, Tenant
from kvhaven.types import KEY_BYTES, ShardId

VERSION: Final = 6
FRAME_LIMIT: Final = 1 << 20
HANDSHAKE_LIMIT: Final = 1 << 10
"""Longest frame in bytes before the other side has proved that it knows the token."""
MOST_KEYS: Final = 1 << 10
"""Keys in a `Has`."""
MOST_ANNOUNCED: Final = 1 << 15
"""Digests in an `Announce`, of each kind."""
DIGEST_BYTES: Final = 8
MOST_WATCH_MS: Final = 10_000
MOST_PROBED: Final = 1 << 30
MOST_OFFERED: Final = 1 << 13
"""Keys in an `Offer`."""
NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
TICKET_BYTES: Final = 16

_ALERT: Final = "_ALERT_"
"""In the reasons of TLS errors that the other side has told."""
_LENGTH: Final = struct.Struct("<I")
_ALIGNMENT: Final = 64
"""A `Chunk` frame, with its length field, is a multiple of this in bytes, so that the payload
behind it is aligned: an EPYC copies to unaligned memory at half the speed."""
_MOST_UNSENT: Final = 1 << 20
"""Most bytes in the socket's buffer that are not sent yet. With more, they have left the
processor's cache when the kernel sends them."""
_MOST_SAID: Final = 200
"""Characters of an error that are shown, since the other side may have chosen them."""
_RECEIVE: Final = 1 << 20
"""Largest piece in bytes that is received before the deadline is checked again."""

M = TypeVar("M")
Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Proof = Annotated[bytes, msgspec.Meta(min_length=PROOF_BYTES, max_length=PROOF_BYTES)]
TicketId = Annotated[bytes, msgspec.Meta(max_length=TICKET_BYTES)]
Keys = Annotated[bytes, msgspec.Meta(max_length=MOST_KEYS * KEY_BYTES)]
Name = Annotated[str, msgspec.Meta(max_length=256)]
Metadata = Annotated[bytes, msgspec.Meta(max_length=1 << 16)]
OfferedKeys = Annotated[bytes, msgspec.Meta(max_length=MOST_OFFERED * KEY_BYTES)]
Padding = Annotated[bytes, msgspec.Meta(max_length=_ALIGNMENT)]
Digests = Annotated[bytes, msgspec.Meta(max_length=MOST_ANNOUNCED * DIGEST_BYTES)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Index = Annotated[int, msgspec.Meta(ge=0, lt=MOST_OFFERED)]


class PeerError(KVHavenError):
    """A peer cannot be reached, refused this node, broke the protocol, or was too slow."""


class SilentPeerError(PeerError):
    """A peer did not answer in time."""


class PeerMessage(msgspec.Struct, frozen=True, tag_field="type"):
    """Base of all messages between nodes; the class name is the tag."""


class PeerHello(PeerMessage, frozen=True, tag=True):
    """First message of the node that connects. `node` differs for each start of a service.

    With `ticket`, the secret of that ticket takes the place of the token.
    """

    node: Name
    nonce: Nonce
    version: int = VERSION
    ticket: TicketId = b""


class PeerWelcome(PeerMessage, frozen=True, tag=True):
    """First message of the node that listens, with its proof that it knows the token."""

    node: Name
    nonce: Nonce
    proof: Proof
    version: int = VERSION


class PeerProof(PeerMessage, frozen=True, tag=True):
    """Proof of the node that connects."""

    proof: Proof


class PeerReady(PeerMessage, frozen=True, tag=True):
    """The proof was accepted: requests may follow."""


class PeerRefused(PeerMessage, frozen=True, tag=True):
    """The connection is closed; `reason` is for people."""

    reason: Name


class Ping(PeerMessage, frozen=True, tag=True):
    """Ask for a `Pong`."""


class Pong(PeerMessage, frozen=True, tag=True):
    """Answer to a `Ping`."""


class Has(PeerMessage, frozen=True, tag=True):
    """Ask which of the chunks are in the peer's memory, as this tenant's."""

    namespace: Key
    keys: Keys
    tenant: Tenant = b""


class HasReply(PeerMessage, frozen=True, tag=True):
    """Answer to `Has`: a byte for each key, 1 if the chunk is there."""

    there: bytes


class Watch(PeerMessage, frozen=True, tag=True):
    """Ask for what has changed in the peer's memory since its last `Announce`.

    `source`, `seq` and `part` are those of that `Announce`; `source` is empty at first. If nothing
    has changed, the peer waits for `wait_ms` before it says so.
    """

    source: Name = ""
    seq: Count = 0
    part: Count = 0
    wait_ms: Annotated[int, msgspec.Meta(ge=0, le=MOST_WATCH_MS)] = 0


class Announce(PeerMessage, frozen=True, tag=True):
    """Answer to `Watch`: digests of chunks (`keys.announced_digest`), 8 bytes each, little-endian.

    `fresh`: it is the beginning of a snapshot, so all that was announced before is void. `whole`:
    with it, all chunks have been announced. No digest is in both lists.
    """

    source: Name
    seq: Count
    part: Count
    fresh: bool
    whole: bool
    added: Digests = b""
    removed: Digests = b""


class Fetch(PeerMessage, frozen=True, tag=True):
    """Ask for the payload of a shard of `payload_bytes` bytes."""

    namespace: Key
    key: Key
    shard: ShardId
    payload_bytes: int
    tenant: Tenant = b""


class Chunk(PeerMessage, frozen=True, tag=True):
    """Answer to `Fetch`: `payload_bytes` bytes follow, which have this xxh3-128.

    `key` and `shard` are those of the request, so that an answer to another one is recognized.
    `padding` has no meaning.
    """

    key: Key
    shard: ShardId
    checksum: Sum
    padding: Padding = b""


class Absent(PeerMessage, frozen=True, tag=True):
    """Answer to `Fetch`: the peer does not have the shard, or cannot pin it now."""


class OpenChannel(PeerMessage, frozen=True, tag=True):
    """Ask whether shards can be read over another channel than TCP."""

    kind: Name


class Channel(PeerMessage, frozen=True, tag=True):
    """Answer to `OpenChannel`: NIXL's metadata of the agent `id`, or the reason why there is none.

    `probe` is the content of a buffer at `probe_address`, with which the channel is tested.
    """

    id: Name = ""
    metadata: Metadata = b""
    probe_address: Annotated[int, msgspec.Meta(ge=0)] = 0
    probe: Metadata = b""
    reason: Name = ""


class Borrow(PeerMessage, frozen=True, tag=True):
    """Ask for a shard's address in the agent `channel`, and pin it until `Returned`."""

    channel: Name
    namespace: Key
    key: Key
    shard: ShardId
    payload_bytes: int
    tenant: Tenant = b""


class Lent(PeerMessage, frozen=True, tag=True):
    """Answer to `Borrow`: the shard is pinned at this address, and has this xxh3-128."""

    key: Key
    shard: ShardId
    checksum: Sum
    address: Annotated[int, msgspec.Meta(ge=0)]


class Stale(PeerMessage, frozen=True, tag=True):
    """Answer to `Borrow`: that agent has ended. Ask for another channel."""


class Returned(PeerMessage, frozen=True, tag=True):
    """Follows `Lent`: the shard was read, or will not be. Without an answer."""


class Offer(PeerMessage, frozen=True, tag=True):
    """Announce a chain that this node's engine is computing, so that the peer reads it meanwhile.

    `id` names the chain among those of this node. `tail` is the key of the tail behind all of
    `keys` (empty: none).
    """

    id: Name
    namespace: Key
    keys: OfferedKeys
    tenant: Tenant = b""
    tail: MaybeKey = b""


class Pull(PeerMessage, frozen=True, tag=True):
    """Ask the peer for a chain that its engine has computed; it answers by `Progress` messages.

    `id` names the chain among those of the peer's. The other fields are those of `Offer`.
    """

    id: Name
    namespace: Key
    keys: OfferedKeys
    tenant: Tenant = b""
    tail: MaybeKey = b""


class Progress(PeerMessage, frozen=True, tag=True):
    """Name the chunks of an offered chain that can be read now, by their index in `Offer.keys`.

    Sent at least every 0.25 s. `ended`: the other chunks will not come. `tail`: the offered tail
    can be read now, too; so many of its tokens are stored.
    """

    id: Name
    arrived: Annotated[list[Index], msgspec.Meta(max_length=MOST_OFFERED)]
    ended: bool = False
    tail: Annotated[int, msgspec.Meta(ge=0)] = 0


class Following(PeerMessage, frozen=True, tag=True):
    """Answer to `Offer`, `Pull` and `Progress`: whether the peer does its part, or why not."""

    yes: bool
    reason: Name = ""


class Probe(PeerMessage, frozen=True, tag=True):
    """Ask for `size` bytes without meaning, to measure the connection."""

    size: Annotated[int, msgspec.Meta(ge=1, le=MOST_PROBED)]


class Probed(PeerMessage, frozen=True, tag=True):
    """Answer to `Probe`: the bytes follow."""


class GetTicket(PeerMessage, frozen=True, tag=True):
    """Ask, over TLS, for a ticket with which one connection without TLS is accepted."""


class Ticket(PeerMessage, frozen=True, tag=True):
    """Answer to `GetTicket`: valid once, for 10 s. Both empty: only TLS is accepted."""

    id: TicketId
    secret: Annotated[bytes, msgspec.Meta(max_length=PROOF_BYTES)]


class NamespaceFields(msgspec.Struct, frozen=True):
    """A namespace of a node's engines."""

    digest: Key
    fields: dict[str, str]


class Describe(PeerMessage, frozen=True, tag=True):
    """Ask for the namespaces of the peer's engines."""


class Described(PeerMessage, frozen=True, tag=True):
    """Answer to `Describe`: the newest namespaces first, as many as a frame holds."""

    namespaces: list[NamespaceFields]


Request = (
    Ping
    | Has
    | Watch
    | Fetch
    | OpenChannel
    | Borrow
    | Offer
    | Pull
    | Progress
    | Probe
    | GetTicket
    | Describe
)
REQUEST: Final[msgspec.msgpack.Decoder[Request]] = msgspec.msgpack.Decoder(Request)
PONG: Final = msgspec.msgpack.Decoder(Pong)
HAS_REPLY: Final = msgspec.msgpack.Decoder(HasReply)
ANNOUNCE: Final = msgspec.msgpack.Decoder(Announce)
FETCHED: Final[msgspec.msgpack.Decoder[Chunk | Absent]] = msgspec.msgpack.Decoder(Chunk | Absent)
CHANNEL: Final = msgspec.msgpack.Decoder(Channel)
LENT: Final[msgspec.msgpack.Decoder[Lent | Absent | Stale]] = msgspec.msgpack.Decoder(
    Lent | Absent | Stale
)
RETURNED: Final = msgspec.msgpack.Decoder(Returned)
PROBED: Final = msgspec.msgpack.Decoder(Probed)
DESCRIBED: Final = msgspec.msgpack.Decoder(Described)
TICKET: Final = msgspec.msgpack.Decoder(Ticket)
FOLLOWING: Final = msgspec.msgpack.Decoder(Following)
_HELLO: Final = msgspec.msgpack.Decoder(PeerHello)
_PROOF: Final = msgspec.msgpack.Decoder(PeerProof)
_WELCOME: Final[msgspec.msgpack.Decoder[PeerWelcome | PeerRefused]] = msgspec.msgpack.Decoder(
    PeerWelcome | PeerRefused
)
_READY: Final[msgspec.msgpack.Decoder[PeerReady | PeerRefused]] = msgspec.msgpack.Decoder(
    PeerReady | PeerRefused
)
_encoder: Final = msgspec.msgpack.Encoder()


class Credential(Protocol):
    """Certificates by which a connection was made, which may end or be replaced."""

    @property
    def valid(self) -> bool:
        """Whether a connection could be made with them now."""


def tls_refusal(error: OSError) -> str:
    """Return why a TLS connection was not made, for people."""
    reason = getattr(error, "verify_message", None) or error.strerror or str(error)
    told = getattr(error, "reason", None) or ""
    if _ALERT in told:
        reason = f"the other node refused this node's certificate: {told.replace('_', ' ').lower()}"
    return (
        f"no TLS connection ({reason}): both nodes need peer_cert, peer_key and peer_ca, with "
        "certificates of one authority"
    )


def pack_digests(digests: Collection[int]) -> bytes:
    """Return digests as they are in an `Announce`."""
    return struct.pack(f"<{len(digests)}Q", *digests)


def unpack_digests(packed: bytes) -> tuple[int, ...]:
    """Return the digests of an `Announce`. Raises `ProtocolError` for a part of one."""
    if len(packed) % DIGEST_BYTES:
        raise ProtocolError(f"{len(packed)} bytes are not a number of digests of 8 bytes")
    return struct.unpack(f"<{len(packed) // DIGEST_BYTES}Q", packed)


class Stream:
    """Frames over a connected, blocking socket. Every call ends within its deadline.

    Deadlines are of `time.monotonic`. All methods raise `PeerError` if the connection ends or the
    deadline passes, and `ProtocolError` for a malformed frame. The connection is unusable then.
    """

    def __init__(self, sock: socket.socket, title: str) -> None:
        self.title = title
        self.limit = HANDSHAKE_LIMIT
        self._socket = sock
        self._down = False
        self.credential: Credential | None = None
        """By which certificates the other node was let in; None without any."""
        self._waits: dict[int, float] = {}
        """The socket's timeouts in seconds, by option; 0 is that of all calls."""
        # The kernel's timeouts: with Python's, each call would be preceded by a poll.
        sock.settimeout(None)
        # A reset connection may take no options, and a sandbox may lack some.
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _MOST_UNSENT)

    @property
    def encrypted(self) -> bool:
        """Whether it is a TLS connection."""
        return isinstance(self._socket, ssl.SSLSocket)

    def secure(
        self,
        wrap: Callable[[socket.socket], socket.socket],
        shake_hands: Callable[[ssl.SSLSocket], "Credential"],
    ) -> None:
        """Replace the socket by what `wrap` makes of it, before anything is sent or received.

        If that is TLS, `shake_hands` does the handshake; `shut_down` in another thread ends it.
        """
        self._socket = wrap(self._socket)
        if self._down:
            self.shut_down()
        if isinstance(self._socket, ssl.SSLSocket):
            self.credential = shake_hands(self._socket)
        self._socket.settimeout(None)

    def send(self, message: PeerMessage, deadline: float) -> None:
        """Send a message."""
        self.send_bytes(_frame(message), deadline)

    def send_chunk(self, message: Chunk, payload: memoryview, deadline: float) -> None:
        """Send a message and the payload that follows it.

        In two system calls; the kernel holds the message back until the payload follows, so that
        the other node wakes once.
        """
        missing = -len(_frame(message)) % _ALIGNMENT
        padded = msgspec.structs.replace(message, padding=bytes(missing))
        self.send_bytes(_frame(padded), deadline, more=True)
        self.send_bytes(payload, deadline)

    def receive(self, expected: "msgspec.msgpack.Decoder[M]", deadline: float) -> M:
        """Return the next message, which must be one that the decoder accepts."""
        (length,) = _LENGTH.unpack(self._take(_LENGTH.size, deadline))
        if length > self.limit:
            raise ProtocolError(f"{self.title}: a frame of {length} bytes; at most {self.limit}")
        body = self._take(length, deadline)
        try:
            return expected.decode(body)
        except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            said = repr(str(error))[:_MOST_SAID]
            raise ProtocolError(f"{self.title}: malformed message: {said}") from error

    def send_bytes(self, data: memoryview, deadline: float, *, more: bool = False) -> None:
        """Send raw bytes; `more`: others follow, and the kernel may wait for them.

        In one call of the kernel: in pieces of 1 MiB it takes 1.4 times as much CPU time.
        """
        sent = 0
        flags = socket.MSG_MORE if more and not self.encrypted else 0  # TLS takes no flags
        while sent < len(data):
            # The timeout is that of the whole call, however often it waits for space.
            self._wait_at_most(deadline - time.monotonic(), socket.SO_SNDTIMEO)
            try:
                sent += self._socket.send(data[sent:], flags)
            except OSError as error:
                if not self._may_be_early(error):
                    raise self._failed(error) from error

    def receive_into(
        self,
        into: memoryview,
        deadline: float,
        *,
        silence_s: float = math.inf,
        each: Callable[[memoryview], object] = len,
    ) -> None:
        """Fill `into` with raw bytes, and call `each` with every part while it is in the cache.

        Raises `PeerError` also if no byte comes for `silence_s` seconds.
        """
        got, heard = 0, time.monotonic()
        now = heard
        while got < len(into):
            self._wait_at_most(min(deadline, heard + silence_s) - now, socket.SO_RCVTIMEO)
            try:
                count = self._socket.recv_into(into[got : got + _RECEIVE])
            except OSError as error:
                if not self._may_be_early(error):
                    raise self._failed(error) from error
                now = time.monotonic()
                continue
            if not count:
                raise PeerError(f"{self.title}: the connection was closed")
            each(into[got : got + count])
            got += count
            now = heard = time.monotonic()

    def shut_down(self) -> None:
        """End the connection; a call in another thread ends. That thread then calls `close`."""
        self._down = True
        with contextlib.suppress(OSError):  # the other side was first
            # That of a TLS socket would let a call in another thread go on without TLS.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection. Called by the thread that uses it, or if none does."""
        self.shut_down()
        self._socket.close()

    def _take(self, size: int, deadline: float) -> bytearray:
        body = bytearray(size)
        self.receive_into(memoryview(body), deadline)
        return body

    def _wait_at_most(self, seconds: float, option: int) -> None:
        """Limit the next call to `seconds`, or to less: see `_may_be_early`.

        A timeout that is somewhat shorter stays, so that a shard does not cost eight more calls.
        """
        if seconds <= 0:
            raise SilentPeerError(f"{self.title}: no answer in time")
        if self.encrypted:  # TLS tries again for ever when one of the kernel's timeouts has passed
            option = 0
        known = self._waits.get(option, 0.0)
        if known == seconds or (not self.encrypted and seconds / 2 <= known < seconds):
            return
        try:
            if self.encrypted:
                self._socket.settimeout(seconds)
            else:
                self._socket.setsockopt(socket.SOL_SOCKET, option, _timeval(seconds))
        except OSError as error:  # closed by another thread
            raise self._failed(error) from error
        self._waits[option] = seconds

    def _may_be_early(self, error: OSError) -> bool:
        """Whether a timeout of the kernel has passed, which may be shorter than the caller's.

        The call is then repeated: there, `_wait_at_most` sees whether the caller's has passed.
        """
        return isinstance(error, BlockingIOError) and not self.encrypted

    def _failed(self, error: OSError) -> PeerError:
        if isinstance(error, TimeoutError | BlockingIOError):
            return SilentPeerError(f"{self.title}: no answer in time")
        if isinstance(error, ssl.SSLError) and _ALERT in (error.reason or ""):
            # In TLS 1.3, a refused certificate shows with the first message that is received.
            return PeerError(f"{self.title}: {tls_refusal(error)}")
        return PeerError(f"{self.title}: {error.strerror or error}")


def _frame(message: PeerMessage) -> memoryview:
    body = _encoder.encode(message)
    return memoryview(_LENGTH.pack(len(body)) + body)


def _timeval(seconds: float) -> bytes:
    """Return a `struct timeval` of at least a millisecond: zero would mean no timeout."""
    micros = max(1000, int(seconds * 1e6))
    return struct.pack("@ll", micros // 1_000_000, micros % 1_000_000)


def greet(stream: Stream, node: str, token: bytes, deadline: float, ticket: bytes = b"") -> str:
    """Do the part of the handshake of the node that connects; return the other node's name.

    With the id of a ticket, `token` is its secret. Raises `PeerError` if the other node refuses,
    speaks another version or does not know the token.
    """
    hello = PeerHello(node, os.urandom(NONCE_BYTES), ticket=ticket)
    stream.send(hello, deadline)
    answer = stream.receive(_WELCOME, deadline)
    if isinstance(answer, PeerRefused):
        raise PeerError(f"{stream.title} refused this node: {answer.reason!r}")
    expected = _proof(token, "listens", answer.node, hello.nonce, answer.nonce)
    if not hmac.compare_digest(answer.proof, expected):
        raise PeerError(f"{stream.title} has another token: set the same peer_token_file on both")
    stream.send(PeerProof(_proof(token, "connects", node, hello.nonce, answer.nonce)), deadline)
    last = stream.receive(_READY, deadline)
    if isinstance(last, PeerRefused):
        raise PeerError(f"{stream.title} refused this node: {last.reason!r}")
    stream.limit = FRAME_LIMIT
    return answer.node


def welcome(
    stream: Stream,
    node: str,
    token: bytes,
    deadline: float,
    redeem: Callable[[bytes], tuple[bytes, Credential | None] | None] | None = None,
) -> str:
    """Do the part of the handshake of the node that listens; return the other node's name.

    With `redeem`, the other node must have a ticket: it returns the secret of a ticket, which it
    does once, and the credential for it. Raises `PeerError` after telling the other node why it is
    refused.
    """
    hello = stream.receive(_HELLO, deadline)
    if hello.version != VERSION:
        reason = f"peer protocol version {hello.version} was offered; this node has {VERSION}"
        refuse(stream, f"{reason}: install the same KVHaven on all nodes", deadline)
    if redeem is not None:
        redeemed = redeem(hello.ticket)
        if redeemed is None:
            reason = "this node requires TLS: set peer_cert, peer_key and peer_ca on all nodes"
            refuse(stream, reason, deadline)
        token, stream.credential = redeemed
    nonce = os.urandom(NONCE_BYTES)
    proof = _proof(token, "listens", node, hello.nonce, nonce)
    stream.send(PeerWelcome(node, nonce, proof), deadline)
    given = stream.receive(_PROOF, deadline).proof
    expected = _proof(token, "connects", hello.node, hello.nonce, nonce)
    if not hmac.compare_digest(given, expected):
        refuse(stream, "another token: set the same peer_token_file on all nodes", deadline)
    stream.send(PeerReady(), deadline)
    stream.limit = FRAME_LIMIT
    return hello.node


def refuse(stream: Stream, reason: str, deadline: float) -> NoReturn:
    """Tell the other node why it is refused. Raises `PeerError` with the same reason."""
    stream.send(PeerRefused(reason), deadline)
    raise PeerError(f"{stream.title}: {reason}")


def _proof(token: bytes, side: str, node: str, theirs: bytes, ours: bytes) -> bytes:
    """Return the proof of one side. Both nonces are in it, and the sides differ: no replay."""
    text = b"\0".join((b"kvhaven-peer-1", side.encode(), node.encode(), theirs + ours))
    return hmac.digest(token, text, hashlib.sha256)
