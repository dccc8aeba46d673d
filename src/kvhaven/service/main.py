# SPDX-License-Identifier: Apache-2.0
"""Starting, running and ending a node service; `python -m kvhaven.service` is the embedded one."""

import asyncio
import contextlib
import fcntl
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvhaven.catalog.actions import TierName
from kvhaven.config import Settings
from kvhaven.errors import KVHavenError
from kvhaven.service.arena import Arena
from kvhaven.service.connection import listen
from kvhaven.service.server import Service
from kvhaven.tiers.base import Tier
from kvhaven.tiers.disk import DiskTier
from kvhaven.tiers.executor import TierExecutor

logger = logging.getLogger(__name__)

_FIRST_SESSION_S = 120.0
_IDLE_POLL_S = 0.1


class EmbeddedOrder(msgspec.Struct, frozen=True):
    """What a connector tells the service it starts, as JSON on standard input."""

    socket: str
    settings: Settings


def serve(settings: Settings, socket_path: str, *, embedded: bool) -> None:
    """Run a service at `socket_path` until SIGTERM or SIGINT; embedded: or no session is left.

    Raises `OSError` when another service answers there, `ArenaError` when there is no memory.
    """
    if embedded:
        # The CPU worker that starts us is pinned to a core; we may use what the cgroup allows.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
    with _lock_beside(socket_path):
        listener = listen(socket_path)
        try:
            asyncio.run(_run(settings, socket_path, listener, embedded=embedded))
        finally:
            listener.close()
            Path(socket_path).unlink(missing_ok=True)


async def _run(
    settings: Settings, socket_path: str, listener: socket.socket, *, embedded: bool
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    arena = Arena(settings.max_local_cpu_size, strict=settings.arena_strict)
    executor = TierExecutor()
    service = Service(settings, arena, _tiers(settings, executor))
    # Entries have no cycles; a full collection over a million of them would stop the loop.
    gc.collect()
    gc.freeze()
    gc.disable()
    logger.info(
        "node service %s: pid %d, socket %s, arena %d MiB",
        service.id[:8],
        os.getpid(),
        socket_path,
        sum(arena.sizes.values()) >> 20,
    )
    watch = loop.create_task(_stop_when_idle(service, settings, stop)) if embedded else None
    await service.run(listener, stop)
    if watch is not None:
        watch.cancel()
    await executor.close(settings.stop_deadline_s)
    arena.close()
    logger.info("node service %s: ended", service.id[:8])


def _tiers(settings: Settings, executor: TierExecutor) -> dict[TierName, Tier]:
    if settings.local_disk is None:
        return {}
    disk = DiskTier(
        Path(settings.local_disk),
        settings.max_local_disk_size,
        executor=executor,
        direct_io=settings.disk_direct_io,
        retry_s=settings.breaker_pause_s,
    )
    return {TierName(disk.name): disk}


async def _stop_when_idle(service: Service, settings: Settings, stop: asyncio.Event) -> None:
    """Set `stop` once sessions were there and none is left, or none came at all."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _FIRST_SESSION_S
    while loop.time() < deadline:
        await asyncio.sleep(_IDLE_POLL_S)
        if len(service.sessions):
            deadline = loop.time() + settings.embedded_linger_s
    stop.set()


@contextlib.contextmanager
def _lock_beside(socket_path: str) -> Iterator[None]:
    """Hold a lock file while serving, so that two starting services cannot both bind."""
    path = f"{socket_path}.lock"
    Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise KVHavenError(f"another service runs at {socket_path}") from None
        yield
        for left in (path, f"{socket_path}.start"):
            Path(left).unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def embedded_main() -> int:
    """Read an `EmbeddedOrder` from standard input and serve."""
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=EmbeddedOrder)
    logging.basicConfig(
        level=order.settings.log_level, format="%(levelname)s kvhaven-service: %(message)s"
    )
    try:
        serve(order.settings, order.socket, embedded=True)
    except (KVHavenError, OSError) as error:
        logger.critical("the embedded node service ended: %s", error)
        return 1
    return 0
