# SPDX-License-Identifier: Apache-2.0
"""Observer of a node service: a snapshot once a second, and lists on request."""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar

import msgspec

from kvhaven.errors import KVHavenError, ProtocolError, ServiceUnavailableError
from kvhaven.protocol import (
    MOST_ROWS,
    OBSERVE,
    STEER,
    Clear,
    Cleared,
    FrameReader,
    Hello,
    List,
    Listed,
    ListKind,
    Message,
    Observe,
    Refused,
    ServiceMessage,
    Snapshot,
    Steer,
    Steered,
    Welcome,
    decode_service,
    encode,
)
from kvhaven.service.snapshot import ServiceSnapshot
from kvhaven.service.steering_messages import Request
from kvhaven.types import TenantId

M = TypeVar("M", bound=Message)

SILENT_S: Final = 3.0
"""A service that has not answered for this long counts as silent."""
STEER_S: Final = 10.0
"""Time for a request of an operator; a pin waits 5 s for promotions."""
_CONNECT_PAUSE_S: Final = 0.25
_ANSWER_S: Final = 10.0
"""After this long without an answer, the observer connects again."""
_REFRESH_S: Final = 1.0
"""Longest time that the answer to a change waits until the change can be seen."""
_LIST_PAUSE_S: Final = 0.02
"""Pause between two lists. A page takes a millisecond of the service, so all clients of the API
together take at most a twentieth of its time."""
_READ_BYTES: Final = 1 << 16

logger = logging.getLogger(__name__)


class Seen(NamedTuple):
    """A snapshot: as JSON and decoded, an id that is new each time, and when it arrived.

    `at` is a time of the event loop, in seconds.
    """

    id: str
    raw: bytes
    snapshot: ServiceSnapshot
    at: float
    sample: bytes = b""
    """Sampled requests since the last snapshot, see `service.reuse`."""


class Observer:
    """Connection to the service at `address`, restored whenever it is lost.

    It requests the next snapshot `interval_s` seconds after the last one, so a slow service is not
    asked more often than it answers. With `sample`, it also requests a sample of the requests that
    engines send.
    """

    def __init__(self, address: str, interval_s: float = 1.0, *, sample: bool = False) -> None:
        self._sample = 0 if sample else -1
        self.address = address
        self.seen: Seen | None = None
        self.error = f"no service has answered at {address} yet"
        """Why there is no newer snapshot."""
        self.listeners: list[Callable[[Seen], None]] = []
        """Functions that are called with each new snapshot."""
        self.interval_s = interval_s
        self._writer: asyncio.StreamWriter | None = None
        self._features = 0
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[ServiceMessage]] = {}
        self._news = asyncio.Event()
        self._wanted = asyncio.Event()
        """Set to have the next snapshot requested at once."""
        self._next_seen = asyncio.Event()
        """Set when the snapshot that is requested next is here; each snapshot has its own."""
        self._listing = asyncio.Lock()
        self._next_list = 0.0
        self._numbers = itertools.count(1)

    @property
    def silent_s(self) -> float:
        """Seconds since the last answer; infinite before the first one."""
        return float("inf") if self.seen is None else _now() - self.seen.at

    async def run(self) -> None:
        """Observe until cancelled."""
        while True:
            try:
                await self._observe()
            except (OSError, KVHavenError) as error:
                self.error = f"no service answers at {self.address}: {_reason(error)}"
            except Exception:  # the observer must continue
                logger.exception("api: observing the service failed")
                self.error = f"observing the service at {self.address} failed; see the log"
            self._writer = None
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(ServiceUnavailableError(self.error))
            self._waiting.clear()
            await asyncio.sleep(_CONNECT_PAUSE_S)

    async def newer(self, id_: str) -> Seen:
        """Return the first snapshot with another id than `id_`."""
        while self.seen is None or self.seen.id == id_:
            await self._news.wait()
        return self.seen

    async def rows(
        self, kind: ListKind, after: str = "", limit: int = MOST_ROWS
    ) -> tuple[msgspec.Raw, str]:
        """Return a page of rows as JSON, and the id to continue behind (empty: the last page).

        Raises `ServiceUnavailableError` if the service does not answer within 3 s, and
        `KVHavenError` with its reason if it refuses.
        """
        async with self._listing:
            await asyncio.sleep(self._next_list - _now())
            listed = await self._ask(List(next(self._ids), kind, after, limit), Listed, SILENT_S)
            self._next_list = _now() + _LIST_PAUSE_S
        return msgspec.Raw(listed.rows), listed.next

    async def clear(
        self, namespace: bytes, tier: str, tenant: TenantId, *, dry_run: bool
    ) -> Cleared:
        """Drop chunks, or count them; see `Clear`. Raises as `rows` does."""
        request = Clear(next(self._ids), namespace, tier, tenant, dry_run)
        return await self._ask(request, Cleared, SILENT_S)

    async def steer(self, request: Request, timeout_s: float = STEER_S) -> Steered:
        """Have the service answer a request of an operator. Raises as `rows` does."""
        if self._writer is not None and not self._features & STEER:
            raise ServiceUnavailableError(
                f"the service at {self.address}: its version cannot be steered; restart it with "
                "this version"
            )
        message = Steer(next(self._ids), msgspec.json.encode(request))
        return await self._ask(message, Steered, timeout_s)

    async def refresh(self) -> None:
        """Wait until `seen` shows all that the service has answered so far, at most 1 s."""
        seen = self._next_seen
        self._wanted.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REFRESH_S):
                await seen.wait()

    async def _observe(self) -> None:
        """Connect, and observe until the connection is lost. Raises `OSError`, `KVHavenError`."""
        deadline = asyncio.timeout(_ANSWER_S)
        try:
            async with deadline:
                await self._observe_within(deadline)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise ServiceUnavailableError(
                f"it sent no first message within {_ANSWER_S:g} s"
            ) from error

    async def _observe_within(self, deadline: asyncio.Timeout) -> None:
        """Observe as `_observe` does; the first message of the service removes the deadline."""
        reader, writer = await asyncio.open_unix_connection(self.address)
        asking: asyncio.Task[None] | None = None
        try:
            frames = FrameReader()
            writer.write(encode(Hello()))
            while data := await reader.read(_READ_BYTES):
                for body in frames.feed(data):
                    message = decode_service(body)
                    if isinstance(message, Welcome):
                        _require_observable(message)
                        deadline.reschedule(None)
                        self._features = message.features
                        self._writer = writer
                        asking = asyncio.create_task(self._ask_repeatedly(writer))
                    else:
                        self._on_message(message)
            raise ServiceUnavailableError("it closed the connection")
        finally:
            if asking is not None:
                asking.cancel()
            writer.close()

    async def _ask_repeatedly(self, writer: asyncio.StreamWriter) -> None:
        """Request snapshots, one after another: each sample of requests continues the last one."""
        with contextlib.suppress(KVHavenError):  # `run` connects again
            while True:
                self._wanted.clear()
                seen, self._next_seen = self._next_seen, asyncio.Event()
                await self._ask(Observe(next(self._ids), self._sample), Snapshot, _ANSWER_S)
                seen.set()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.interval_s):
                        await self._wanted.wait()
        self.error = f"the service at {self.address} did not answer within {_ANSWER_S:g} s"
        writer.close()

    async def _ask(
        self, request: Observe | List | Clear | Steer, wanted: type[M], timeout_s: float
    ) -> M:
        writer = self._writer
        if writer is None:
            raise ServiceUnavailableError(self.error)
        answer = asyncio.get_running_loop().create_future()
        self._waiting[request.id] = answer
        try:
            writer.write(encode(request))
            async with asyncio.timeout(timeout_s):
                message = await answer
        except TimeoutError as error:
            raise ServiceUnavailableError(
                f"the service at {self.address} did not answer within {timeout_s:g} s"
            ) from error
        finally:
            self._waiting.pop(request.id, None)
        if isinstance(message, Refused):
            raise KVHavenError(message.reason)
        if not isinstance(message, wanted):
            raise ProtocolError(f"the service sent {type(message).__name__}")
        return message

    def _on_message(self, message: ServiceMessage) -> None:
        if isinstance(message, Snapshot):
            self._note(message)
        elif isinstance(message, Refused) and not message.id:
            raise KVHavenError(message.reason)
        waiting = self._waiting.get(getattr(message, "id", 0))
        if waiting is not None and not waiting.done():
            waiting.set_result(message)

    def _note(self, message: Snapshot) -> None:
        try:
            snapshot = msgspec.json.decode(message.snapshot, type=ServiceSnapshot)
        except msgspec.ValidationError as error:
            raise KVHavenError(
                f"its snapshot is not valid ({error}); run the same KVHaven on both sides"
            ) from error
        id_ = f"{snapshot.service[:8]}-{next(self._numbers)}"
        self.seen = Seen(id_, message.snapshot, snapshot, _now(), message.sample)
        if self._sample >= 0 and message.id:
            self._sample = message.next_sample
        for listener in self.listeners:
            listener(self.seen)
        self._news.set()
        self._news = asyncio.Event()


def _require_observable(welcome: Welcome) -> None:
    if not welcome.features & OBSERVE:
        raise KVHavenError("its version has no HTTP API; restart it with this version")


def _now() -> float:
    return asyncio.get_running_loop().time()


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
