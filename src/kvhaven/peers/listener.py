# SPDX-License-Identifier: Apache-2.0
"""Listener of the peer plane: sends chunks from this node's memory to other nodes."""

import contextlib
import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Sequence
from typing import Final, Protocol

import msgspec

from kvhaven.catalog.announcer import START, Batch, Cursor
from kvhaven.catalog.loans import Loan
from kvhaven.errors import ConfigError, KVHavenError, ProtocolError
from kvhaven.niceness import lower_thread_priority
from kvhaven.peers.addresses import Address
from kvhaven.peers.certificates import Certificates
from kvhaven.peers.dial import Tickets, encrypt
from kvhaven.peers.nixl import KIND, NixlChannel, TcpOnly
from kvhaven.peers.wire import (
    REQUEST,
    RETURNED,
    Absent,
    Announce,
    Borrow,
    Channel,
    Chunk,
    Describe,
    Described,
    Fetch,
    Following,
    GetTicket,
    Has,
    HasReply,
    Lent,
    NamespaceFields,
    Offer,
    OpenChannel,
    PeerError,
    PeerMessage,
    Ping,
    Pong,
    Probe,
    Probed,
    Progress,
    Pull,
    Request,
    Stale,
    Stream,
    Ticket,
    Watch,
    pack_digests,
    welcome,
)
from kvhaven.protocol import KeyList, tenant_of
from kvhaven.tiers.base import Namespace
from kvhaven.types import (
    NO_TENANT,
    Checksum,
    ChunkKey,
    NamespaceDigest,
    ShardId,
    TenantId,
)

_log = logging.getLogger(__name__)

_MOST_CONNECTIONS: Final = 256
_MOST_UNKNOWN: Final = 64
"""Connections whose node has not proved yet that it knows the token."""
_MOST_UNKNOWN_AT: Final = 16
"""Of these, from one address."""
_HANDSHAKE_S: Final = 3.0
_IDLE_S: Final = 30.0
"""Peers ping every second, so a connection that is silent for this long is dead."""
_MOST_DESCRIBED: Final = 1 << 19
"""Characters of namespaces in an answer."""
_ZEROS: Final = memoryview(bytes(1 << 20))
_PROBE_S: Final = 60.0
_SEND_S: Final = 20.0
"""A peer that does not take a shard within this time is disconnected, so that its pin ends."""


class Lender(Protocol):
    """This node's chunks. Called from the listener's threads."""

    def has(
        self, namespace: NamespaceDigest, keys: Sequence[ChunkKey], tenant: TenantId
    ) -> list[bool]:
        """Return whether each chunk is in memory as this tenant's."""

    def announced(self, cursor: Cursor, wait_s: float) -> Batch:
        """Return what a follower has to hear next; wait for `wait_s` seconds if that is nothing."""

    def lend(self, namespace: NamespaceDigest, key: ChunkKey, tenant: TenantId) -> Loan | None:
        """Pin a chunk, until `returned`; None if it is not here or cannot be pinned now."""

    def memory(self, loan: Loan) -> memoryview:
        """Return the bytes of a loan's extent."""

    def returned(self, loan: Loan) -> None:
        """End a loan: nothing reads its memory any more."""

    def namespaces(self) -> Sequence[Namespace]:
        """Return the namespaces of this node's engines, oldest first."""


class Chains(Protocol):
    """The chains that other nodes offer or ask for. Called from the listener's threads."""

    def offered(self, node: str, offer: Offer) -> Following:
        """Expect a chain that the node computes."""

    def progressed(self, node: str, progress: Progress) -> Following:
        """Read the chunks that have arrived at the node."""

    def pulled(self, node: str, pull: Pull) -> Following:
        """Tell the node which chunks of a chain are here."""


class ListenerStatus(msgspec.Struct, frozen=True):
    """Counters of the listener: open connections of nodes, and those that ended badly.

    `refused`: before the other side had proved to be a node of the cluster, also if it said nothing
    for too long. `protocol_errors`: by a malformed frame or an unexpected message, of anybody.
    `last_refusal` is the last reason of either. `certificates` says why changed files are not used.
    """

    connections: int = 0
    refused: int = 0
    protocol_errors: int = 0
    last_refusal: str = ""
    certificates: str = ""


class PeerListener:
    """TCP listener. Each connection has a thread at nice 10, which serves one request at a time.

    Bytes go from the arena to the socket without a copy in this process. A chunk is pinned while
    one of its shards is being sent, and no longer, whatever becomes of the peer. With
    `certificates`, a connection is encrypted, or has a ticket and only fetches chunks. Without
    `tenants`, chunks of a tenant are not sent, and its chains not expected. Without `chains`, none
    are.
    """

    def __init__(
        self,
        address: Address,
        node: str,
        token: bytes,
        lender: Lender,
        chains: Chains | None = None,
        certificates: Certificates | None = None,
        channel: NixlChannel | TcpOnly | None = None,
        *,
        tenants: bool = True,
    ) -> None:
        self._node = node
        self._token = token
        self._certificates = certificates
        self._tenants = tenants
        self._tickets = Tickets()
        self._lender = lender
        self._chains = chains
        self._channel = channel or TcpOnly("this node has no other channel")
        self._lock = threading.Lock()
        self._streams: set[Stream] = set()
        self._unknown: dict[Stream, str] = {}
        """Connections of the oldest first, with their addresses."""
        self._refused = self._protocol_errors = 0
        self._last_refusal = ""
        self._closed = False
        try:
            family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
            self._socket = socket.create_server((address.host, address.port), family=family)
        except OSError as error:
            raise ConfigError(
                f"peer_listen: cannot listen at {address} ({error.strerror}); expected an address "
                "of this machine and a free port"
            ) from error
        self.port: int = self._socket.getsockname()[1]
        """The port, also where 0 was asked for."""
        self._thread = threading.Thread(target=self._accept, name="kvhaven-peers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close all connections without waiting for their threads, which return their loans."""
        with self._lock:
            self._closed = True
            streams = (*self._streams, *self._unknown)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        for stream in streams:
            stream.shut_down()
        self._thread.join(1)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, peer = self._socket.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.1)  # no descriptors left, for example
                continue
            stream = Stream(sock, f"peer {peer[0]}:{peer[1]}")
            if not self._begin(stream, _network(peer[0])):
                stream.close()
                continue
            try:
                threading.Thread(
                    target=self._serve, args=(stream,), name="kvhaven-peer", daemon=True
                ).start()
            except RuntimeError as error:  # the process may have no more threads
                _log.warning("%s: refused: %s", stream.title, error)
                self._ended(stream)

    def status(self) -> ListenerStatus:
        """Return the counters."""
        certificates = self._certificates
        problem = certificates.problem if certificates is not None else ""
        counts = len(self._streams), self._refused, self._protocol_errors
        return ListenerStatus(*counts, self._last_refusal, problem)

    def _begin(self, stream: Stream, address: str) -> bool:
        """Note a new connection; return False if its address has too many that are not known yet.

        If all together are too many, the oldest one ends: its node had the most time.
        """
        with self._lock:
            same = sum(one == address for one in self._unknown.values())
            if self._closed or same >= _MOST_UNKNOWN_AT:
                self._count_refusal(f"{stream.title}: too many connections of {address} are new")
                return False
            oldest = next(iter(self._unknown)) if len(self._unknown) >= _MOST_UNKNOWN else None
            if oldest is not None:
                del self._unknown[oldest]
            self._unknown[stream] = address
        if oldest is not None:
            oldest.shut_down()
        return True

    def _count_refusal(self, reason: str) -> None:
        self._refused += not self._closed
        self._last_refusal = reason

    def _serve(self, stream: Stream) -> None:
        try:
            lower_thread_priority()
            node = self._welcome(stream, time.monotonic() + _HANDSHAKE_S)
            self._admit(stream)
            _log.info("%s: connected, node %s", stream.title, node[:8])
            while True:
                request = stream.receive(REQUEST, time.monotonic() + _IDLE_S)
                _require_valid(stream)
                self._answer(stream, node, request)
        except (PeerError, ProtocolError) as error:
            with self._lock:
                if isinstance(error, ProtocolError):
                    self._protocol_errors += 1
                    self._last_refusal = str(error)
                if stream not in self._streams:
                    self._count_refusal(str(error))
            _log.log(logging.DEBUG if self._closed else logging.INFO, "%s", error)
        except KVHavenError as error:
            _log.warning("%s: disconnected: %s", stream.title, error)
        except Exception:  # noqa: BLE001  this connection ends, and no other
            _log.exception("%s: disconnected after an unexpected error", stream.title)
        finally:
            self._ended(stream)

    def _welcome(self, stream: Stream, deadline: float) -> str:
        """Do the handshake; return the other node's name. Raises `PeerError`."""
        certificates = self._certificates
        redeem = None
        if certificates is not None:
            encrypt(
                stream, certificates, lambda sock: certificates.listen(sock, deadline), deadline
            )
            redeem = None if stream.encrypted else self._tickets.redeem
        return welcome(stream, self._node, self._token, deadline, redeem)

    def _admit(self, stream: Stream) -> None:
        """Count a connection of a node of the cluster. Raises `PeerError` if there are too many."""
        with self._lock:
            full = self._closed or len(self._streams) >= _MOST_CONNECTIONS
            if not full:
                self._unknown.pop(stream, None)
                self._streams.add(stream)
        if full:
            raise PeerError(f"{stream.title}: refused, {_MOST_CONNECTIONS} connections are open")

    def _ended(self, stream: Stream) -> None:
        stream.close()
        with self._lock:
            self._streams.discard(stream)
            self._unknown.pop(stream, None)
        self._tickets.void(stream)

    def _answer(self, stream: Stream, node: str, request: Request) -> None:
        data_only = self._certificates is not None and not stream.encrypted
        if data_only and not isinstance(request, Fetch):
            raise ProtocolError(f"{stream.title}: {type(request).__name__} needs TLS")
        if isinstance(request, OpenChannel | Borrow | Fetch):
            self._give(stream, request)
        elif isinstance(request, Probe):
            _send_zeros(stream, request.size)
        elif isinstance(request, Watch):
            stream.send(self._announce(request), time.monotonic() + _SEND_S)
        elif isinstance(request, Offer | Pull | Progress):
            stream.send(self._follow(node, request), time.monotonic() + _SEND_S)
        else:
            stream.send(self._reply(stream, request), time.monotonic() + _SEND_S)

    def _reply(self, stream: Stream, request: Ping | Has | GetTicket | Describe) -> PeerMessage:
        if isinstance(request, Has):
            keys, tenant = KeyList(request.keys), tenant_of(request.tenant)
            if not self._may_share(request.tenant):
                return HasReply(bytes(len(keys)))
            there = self._lender.has(NamespaceDigest(request.namespace), keys, tenant)
            return HasReply(bytes(there))
        if isinstance(request, GetTicket):
            closed = self._certificates is None or self._certificates.encrypt_data
            return Ticket(b"", b"") if closed else self._tickets.issue(stream)
        return Pong() if isinstance(request, Ping) else _described(self._lender.namespaces())

    def _announce(self, request: Watch) -> Announce:
        known = request.source == self._node
        cursor = Cursor(request.seq, request.part) if known else START
        batch = self._lender.announced(cursor, request.wait_ms / 1000)
        return Announce(
            self._node,
            *batch.cursor,
            batch.fresh,
            batch.whole,
            pack_digests(batch.added),
            pack_digests(batch.removed),
        )

    def _follow(self, node: str, request: Offer | Pull | Progress) -> Following:
        if not (isinstance(request, Progress) or self._may_share(request.tenant)):
            return Following(yes=False, reason="peer_tenants is off on this node")
        if self._chains is None:
            return Following(yes=False, reason="this node follows no chains")
        if isinstance(request, Progress):
            return self._chains.progressed(node, request)
        if isinstance(request, Offer):
            return self._chains.offered(node, request)
        return self._chains.pulled(node, request)

    def _give(self, stream: Stream, request: OpenChannel | Borrow | Fetch) -> None:
        """Give a shard, or a channel for shards."""
        if isinstance(request, OpenChannel):
            known = request.kind == KIND
            offer = self._channel.offer() if known else Channel(reason="unknown channel")
            stream.send(offer, time.monotonic() + _SEND_S)
        elif isinstance(request, Borrow):
            self._lend_shard(stream, request)
        else:
            self._send_shard(stream, request)

    def _may_share(self, tenant: bytes) -> bool:
        return self._tenants or tenant_of(tenant) == NO_TENANT

    def _loan(self, request: Fetch | Borrow) -> Loan | None:
        namespace, tenant = NamespaceDigest(request.namespace), tenant_of(request.tenant)
        share = self._may_share(request.tenant)
        return self._lender.lend(namespace, ChunkKey(request.key), tenant) if share else None

    def _send_shard(self, stream: Stream, request: Fetch) -> None:
        loan = self._loan(request)
        deadline = time.monotonic() + _SEND_S
        if loan is None:
            stream.send(Absent(), deadline)
            return
        try:
            table = loan.namespace.table
            for shard, offset, checksum in zip(
                table.shards, table.offsets, loan.checksums, strict=True
            ):
                size = loan.namespace.shard_bytes(shard.payload_bytes, loan.tail)
                if (shard.id, size) == (request.shard, request.payload_bytes):
                    chunk = Chunk(request.key, shard.id, checksum)
                    end = offset + request.payload_bytes
                    with self._lender.memory(loan) as memory:
                        stream.send_chunk(chunk, memory[offset:end], deadline)
                    return
        finally:
            self._lender.returned(loan)
        stream.send(Absent(), deadline)

    def _lend_shard(self, stream: Stream, request: Borrow) -> None:
        """Pin a shard while the peer reads it by itself."""
        deadline = time.monotonic() + _SEND_S
        if self._channel.address(request.channel, 0) is None:
            stream.send(Stale(), deadline)
            return
        loan = self._loan(request)
        if loan is None:
            stream.send(Absent(), deadline)
            return
        self._channel.lent(1)
        try:
            place = _place(loan, request.shard, request.payload_bytes)
            if place is None:
                stream.send(Absent(), deadline)
                return
            offset, checksum = place
            address = self._channel.address(request.channel, loan.extent.offset + offset)
            if address is None:
                stream.send(Stale(), deadline)
                return
            stream.send(Lent(request.key, request.shard, checksum, address), deadline)
            stream.receive(RETURNED, deadline)
        finally:
            self._channel.lent(-1)
            self._lender.returned(loan)


def _require_valid(stream: Stream) -> None:
    """Raise `PeerError` if a connection could not be made any more by its certificates."""
    if stream.credential is not None and not stream.credential.valid:
        raise PeerError(f"{stream.title}: its certificate has ended, or others are in use now")


def _network(address: str) -> str:
    """Return an IPv4 address, or the part of an IPv6 address that one network has (64 bits)."""
    if ":" not in address:
        return address
    exploded = ipaddress.IPv6Address(address.partition("%")[0])
    mapped = exploded.ipv4_mapped
    return str(mapped) if mapped is not None else exploded.exploded[:19]


def _place(loan: Loan, shard: ShardId, payload_bytes: int) -> tuple[int, Checksum] | None:
    """Return a shard's offset in its loan's extent, and its checksum; None if there is none."""
    table = loan.namespace.table
    for entry, offset, checksum in zip(table.shards, table.offsets, loan.checksums, strict=True):
        size = loan.namespace.shard_bytes(entry.payload_bytes, loan.tail)
        if (entry.id, size) == (shard, payload_bytes):
            return offset, checksum
    return None


def _send_zeros(stream: Stream, size: int) -> None:
    deadline = time.monotonic() + _PROBE_S
    stream.send(Probed(), deadline)
    while size:
        piece = _ZEROS[: min(size, len(_ZEROS))]
        stream.send_bytes(piece, deadline)
        size -= len(piece)


def _described(namespaces: Sequence[Namespace]) -> Described:
    """Describe the newest namespaces, as many as an answer holds."""
    described: list[NamespaceFields] = []
    left = _MOST_DESCRIBED
    for namespace in reversed(namespaces):
        left -= sum(len(name) + len(value) for name, value in namespace.fields.items())
        if left < 0:
            break
        described.append(NamespaceFields(namespace.digest, dict(namespace.fields)))
    return Described(described)
