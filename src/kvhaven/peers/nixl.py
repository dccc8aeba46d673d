# SPDX-License-Identifier: Apache-2.0
"""NIXL channel: this node's two helper processes, and the routes by which it reads from peers."""

import asyncio
import ctypes
import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec
import xxhash

from kvhaven.errors import KVHavenError, ProtocolError, TierError
from kvhaven.niceness import lower_thread_priority
from kvhaven.peers.nixl_messages import Role, Up
from kvhaven.peers.nixl_process import PROGRAM, ArenaMemory, HelperError, HelperProcess
from kvhaven.peers.wire import (
    CHANNEL,
    LENT,
    Absent,
    Borrow,
    Channel,
    Lent,
    OpenChannel,
    Returned,
    Stale,
    Stream,
)
from kvhaven.tiers.base import StoredShard
from kvhaven.tiers.format.codec import DamagedShardError
from kvhaven.types import Checksum

_log = logging.getLogger(__name__)

KIND: Final = "nixl"

_START_S: Final = 60.0
"""Time for a helper to start: it imports for a second of CPU, at low priority."""
_TEST_S: Final = 10.0
"""Deadline of a self-test, which takes milliseconds."""
_RETRY_S: Final = 60.0
_LONGEST_RETRY_S: Final = 3600.0
_RESTART_S: Final = 1.0
_REFUSED_S: Final = 10.0
"""Pause before a peer without this channel is asked for it again."""
_ALLOCATION_POLL_S: Final = 0.2
_SLOWEST: Final = 4 << 20
"""Bytes per second; a transfer that is slower by more than the peer's deadline counts as hung."""
_LONGEST: Final = 10
"""A transfer may take this many times the peer's deadline at most."""
_GONE_S: Final = 1.0
"""How long a thread waits for the end of a helper, which takes 5 ms."""
_MOST_REASON: Final = 200
_AGAIN: Final = "a helper of NIXL is starting again"


class TcpOnly:
    """The channel of a node that reads over TCP alone."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def start(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def offer(self) -> Channel:
        """Refuse the channel to a peer."""
        return Channel(reason=self.reason[:_MOST_REASON])

    def address(self, channel: str, offset: int) -> int | None:
        """Return None: this node has no agent."""
        del channel, offset
        return None

    def lent(self, change: int) -> None:
        """Do nothing."""

    def route(self, title: str) -> None:
        """Return None: peers are read over TCP."""
        del title


class NixlChannel:
    """Two helpers of one node: one that reads from peers, and one that peers read from.

    A thread starts them when the arena is allocated completely, tests them by a read from one to
    the other, and starts a helper again when it has ended. A receiving helper is killed when a
    request to it fails, since NIXL cannot say whether the transfer goes on. The sending one writes
    nothing, and is not killed for what happens to others, so a failure does not spread from node to
    node. With `protect` it maps the arena read-only: then no peer can write there.
    """

    def __init__(
        self,
        memory: ArenaMemory,
        backends: Sequence[str],
        environment: Mapping[str, str],
        *,
        protect: bool = True,
        retry_s: float = _RETRY_S,
        program: Sequence[str] = PROGRAM,
    ) -> None:
        self.retry_s = retry_s
        self.reason = "NIXL is starting"
        """Why the channel is not ready; empty if it is."""
        self.receiver: HelperProcess | None = None
        """The helper that reads, while it can be used."""
        self._memory = memory
        self._backends = backends
        self._environment = environment
        self._protect = protect
        self._program = program
        self._lock = threading.Lock()
        self._sender: tuple[HelperProcess, Up] | None = None
        self._starting: HelperProcess | None = None
        self._open = 0
        self._closing = threading.Event()
        self._changed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvhaven-nixl", daemon=True)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closing.is_set()

    @property
    def pids(self) -> list[int]:
        """Process ids of the helpers that can be used: the sending and the receiving one."""
        with self._lock:
            sender = self._sender
        helpers = (sender[0] if sender is not None else None, self.receiver)
        return [helper.pid for helper in helpers if helper is not None]

    def start(self) -> None:
        """Start the helpers in the background."""
        self._thread.start()

    def close(self) -> None:
        """Kill the helpers."""
        self._closing.set()
        self._changed.set()
        starting = self._starting
        if starting is not None:
            starting.kill()
        if self._thread.is_alive():
            self._thread.join(2 * _GONE_S)

    # For the listener's threads

    def offer(self) -> Channel:
        """Describe the sending helper to a peer, or say why it cannot be used."""
        with self._lock:
            sender = self._sender
        if sender is None or self.reason:
            return Channel(reason=(self.reason or _AGAIN)[:_MOST_REASON])
        helper, up = sender
        self.lent(0)  # the peer will test it
        return Channel(helper.name, up.metadata, up.probe_address, up.probe)

    def address(self, channel: str, offset: int) -> int | None:
        """Return the address of an offset of the arena in an agent; None if it has ended."""
        with self._lock:
            sender = self._sender
        if sender is None or sender[0].name != channel or sender[0].ended.is_set():
            return None
        return sender[1].base + offset

    def lent(self, change: int) -> None:
        """Count the chunks that peers may be reading, and tell the sending helper."""
        with self._lock:
            before, self._open = self._open, self._open + change
            # It stays attentive for a while after the last one, so most changes are no news to it.
            if self._sender is not None and not (before and self._open):
                self._sender[0].lending(self._open)

    # For readers

    def route(self, title: str) -> "NixlRoute":
        """Return the way to read from one peer."""
        return NixlRoute(self, title)

    def offset_of(self, buffer: memoryview) -> int | None:
        """Return where a buffer lies in the arena; None if it does not."""
        start = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        offset = start - self._memory.address
        return offset if 0 <= offset <= self._memory.usable - len(buffer) else None

    # In the thread

    def _run(self) -> None:
        lower_thread_priority()
        while self._memory.allocating:
            if self._closing.wait(_ALLOCATION_POLL_S):
                return
        pause_s = self.retry_s
        while not self._closing.is_set():
            self._changed.clear()
            try:
                self._start_and_test()
            except HelperError as error:
                self._end()
                self.reason = f"NIXL failed its self-test: {error}"
                if self._closing.is_set():
                    break
                _log.warning("peers: %s; TCP is used, next test in %.0f s", self.reason, pause_s)
                self._closing.wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_RETRY_S)
                continue
            pause_s = self.retry_s
            _log.info("peers: NIXL passed its self-test (%s)", ", ".join(self._backends))
            self.reason = ""
            self._changed.wait()
            self.reason = _AGAIN
            self._drop_ended()
            self._closing.wait(_RESTART_S)
        self._end()

    def _start_and_test(self) -> None:
        """Start the helpers that are not running, and read from one to the other."""
        if self._sender is None:
            helper = self._helper("send")
            up = helper.up(_START_S)
            with self._lock:
                self._sender = (helper, up)
        helper, up = self._sender
        receiver = self._helper("receive") if self.receiver is None else self.receiver
        self._starting = receiver
        receiver.up(_START_S)
        helper.lending(self._open)
        receiver.connect(up.metadata, up.probe_address, up.probe, _TEST_S, "")
        self.receiver, self._starting = receiver, None

    def _helper(self, role: Role) -> HelperProcess:
        if self._closing.is_set():
            raise HelperError("closed")
        self._starting = HelperProcess(
            role,
            uuid.uuid4().hex,
            self._memory,
            self._backends,
            self._environment,
            protect=self._protect and role == "send",
            on_ended=self._changed.set,
            program=self._program,
        )
        return self._starting

    def _drop_ended(self) -> None:
        if self.receiver is not None and self.receiver.ended.is_set():
            self.receiver.kill()
            self.receiver = None
        with self._lock:
            if self._sender is not None and self._sender[0].ended.is_set():
                self._sender[0].kill()
                self._sender = None

    def _end(self) -> None:
        with self._lock:
            sender, self._sender = self._sender, None
        receiver, self.receiver = self.receiver, None
        starting, self._starting = self._starting, None
        for helper in (receiver, sender[0] if sender else None, starting):
            if helper is not None:
                helper.kill()
                wait_until_gone(helper, _GONE_S)


class Hold:
    """Memory of one read, which a helper that was killed may still be able to write."""

    def __init__(self) -> None:
        self.helper: HelperProcess | None = None

    async def ended(self, is_closed: Callable[[], bool]) -> None:
        """Wait until the memory is free, regardless of cancellations.

        Raises `TierError` if the channel is closed before: then the process must exit.
        """
        cancelled = False
        while self.helper is not None and not self.helper.gone:
            if is_closed():
                raise TierError("closed while a NIXL helper still had the memory")
            try:
                await asyncio.sleep(_GONE_S / 20)
            except asyncio.CancelledError:
                cancelled = True
        if cancelled:
            raise asyncio.CancelledError


class ChannelError(KVHavenError):
    """A shard was not read over NIXL; its memory is free, and TCP may be tried."""


class HeldError(TierError):
    """A shard was not read over NIXL, and the helper may still write its memory: see `Hold`."""


class _Remote(msgspec.Struct, frozen=True):
    """A peer's agent `id`, to which our `receiver` is connected under the name `agent`."""

    id: str
    agent: str
    receiver: HelperProcess


class NixlRoute:
    """The way to read from one peer over NIXL, after both nodes agreed and a test read passed.

    Methods run in the threads of the peer, a stream each. A failure closes the route for a
    while, a minute first and then twice as long each time: the peer is read over TCP.
    """

    def __init__(self, channel: NixlChannel, title: str) -> None:
        self._channel = channel
        self._title = title
        self._remote: _Remote | None = None
        self._usable = False
        self._retry_at = 0.0
        self._pause_s = channel.retry_s
        self._reason = "not agreed upon yet"

    @property
    def open(self) -> bool:
        """Whether shards are read over NIXL."""
        remote = self._remote
        if remote is None or not self._usable:
            return False
        return remote.receiver is self._channel.receiver

    @property
    def reason(self) -> str:
        """Why the peer is read over TCP; empty if it is not."""
        if self.open:
            return ""
        paused = time.monotonic() < self._retry_at
        return self._reason if paused else self._channel.reason or self._reason

    @property
    def due(self) -> bool:
        """Whether the peer should be asked for the channel."""
        ready = not self._channel.reason and self._channel.receiver is not None
        return ready and not self.open and time.monotonic() >= self._retry_at

    def is_closed(self) -> bool:
        """Return whether the channel was closed."""
        return self._channel.closed

    def negotiate(self, stream: Stream, deadline_s: float) -> None:
        """Ask the peer for the channel and test it. Raises `PeerError` if the peer fails."""
        receiver = self._channel.receiver
        if receiver is None:
            return
        stream.send(OpenChannel(KIND), time.monotonic() + deadline_s)
        offer = stream.receive(CHANNEL, time.monotonic() + deadline_s)
        if offer.reason:
            self._retry_at = time.monotonic() + _REFUSED_S
            self._note(f"the peer says: {offer.reason!r}")
            return
        before = self._remote
        replaces = before.agent if before is not None and before.receiver is receiver else ""
        try:
            agent = receiver.connect(
                offer.metadata, offer.probe_address, offer.probe, _TEST_S, replaces
            )
        except HelperError as error:
            self._failed(receiver, f"a test read from the peer failed: {error}")
            return
        self._remote = _Remote(offer.id, agent, receiver)
        self._usable = True
        _log.info("%s: read over NIXL", self._title)

    def read(
        self, stream: Stream, shard: StoredShard, into: memoryview, deadline_s: float, hold: Hold
    ) -> Checksum | None:
        """Read a shard's payload; None if the peer does not have it.

        Raises `ChannelError` if TCP may be tried, `HeldError` if the memory is not free, and like
        `Peer.fetch`.
        """
        remote = self._remote
        offset = self._channel.offset_of(into)
        if remote is None or not self.open or offset is None:
            raise ChannelError(f"{self._title}: the channel is closed")
        size = shard.payload_bytes
        request = Borrow(remote.id, shard.namespace, shard.key, shard.shard, size, shard.tenant)
        stream.send(request, time.monotonic() + deadline_s)
        lent = stream.receive(LENT, time.monotonic() + deadline_s)
        if isinstance(lent, Absent):
            return None
        if isinstance(lent, Stale):
            self._usable = False
            raise ChannelError(f"{self._title}: its helper has ended")
        if (lent.key, lent.shard) != (shard.key, shard.shard):
            raise ProtocolError(f"{self._title}: an answer to another request")
        self._transfer(remote, lent, offset, size, deadline_s, hold)
        stream.send(Returned(), time.monotonic() + deadline_s)
        digest = xxhash.xxh3_128_digest(into[:size])
        if digest != lent.checksum:
            raise DamagedShardError(f"{self._title}: wrong bytes arrived", digest)
        self._pause_s = self._channel.retry_s
        return Checksum(lent.checksum)

    def _transfer(
        self, remote: _Remote, lent: Lent, offset: int, size: int, deadline_s: float, hold: Hold
    ) -> None:
        timeout_s = min(_LONGEST * deadline_s, deadline_s + size / _SLOWEST)
        try:
            remote.receiver.read(remote.agent, lent.address, offset, size, timeout_s)
        except HelperError as error:
            self._failed(remote.receiver, f"a transfer failed: {error}")
            if not wait_until_gone(remote.receiver, _GONE_S):
                hold.helper = remote.receiver
                raise HeldError(f"{self._title}: a NIXL helper does not end") from error
            raise ChannelError(f"{self._title}: {error}") from error

    def _failed(self, receiver: HelperProcess, why: str) -> None:
        """Kill the helper; unless it ended for another peer, close the route for a while."""
        self._usable = False
        if not receiver.kill():
            return
        self._retry_at = time.monotonic() + self._pause_s
        self._note(f"{why}; NIXL is tried again in {self._pause_s:.0f} s")
        self._pause_s = min(2 * self._pause_s, _LONGEST_RETRY_S)

    def _note(self, reason: str) -> None:
        if reason != self._reason:
            _log.warning("%s: read over TCP: %s", self._title, reason)
        self._reason = reason


def wait_until_gone(helper: HelperProcess, timeout_s: float) -> bool:
    """Wait until a killed helper cannot write any more; return whether it is so."""
    end = time.monotonic() + timeout_s
    while not helper.gone:
        if time.monotonic() >= end:
            return False
        time.sleep(0.001)
    return True
