# SPDX-License-Identifier: Apache-2.0
"""Life cycle of a node service; `python -m kvhaven.service` runs the embedded one."""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from kvhaven.client.unix import lock_file, prepare_directory
from kvhaven.config import Settings
from kvhaven.descriptors import allow_descriptors
from kvhaven.errors import KVHavenError
from kvhaven.niceness import run_soon_after_waking
from kvhaven.service.api_process import ApiProcess, api_for
from kvhaven.service.arena import Arena
from kvhaven.service.connection import Listener
from kvhaven.service.server import Service
from kvhaven.service.tier_setup import make_tiers

logger = logging.getLogger(__name__)

_FIRST_SESSION_S = 120.0
_SWITCH_S = 0.0005
_IDLE_POLL_S = 0.1
_LOCK_WAIT_S = 2.0
_COLLECT_S = 0.1
_BUSY = 50
"""Pieces of jobs in that time, above which a collection would take too long."""


class EmbeddedOrder(msgspec.Struct, frozen=True):
    """The connector's order to the service that it starts, as JSON on standard input."""

    socket: str
    settings: Settings


class EmbeddedReply(msgspec.Struct, frozen=True):
    """The service's answer on standard output. `error` is empty if it listens, else the reason.

    `passing` means that a retry may succeed.
    """

    error: str = ""
    passing: bool = False


class AlreadyRunningError(KVHavenError):
    """Refusal to start because another service holds the lock of the socket."""


def serve(
    settings: Settings,
    socket_path: str,
    *,
    embedded: bool = False,
    on_listening: Callable[[], None] = lambda: None,
    origins: Mapping[str, str] | None = None,
    file: Path | None = None,
    api_by_default: bool = False,
) -> None:
    """Run a service at `socket_path` until SIGTERM or SIGINT; embedded: or until it is idle.

    `origins` tell observers where settings come from, and `file` may be written by the API's
    changes. With `api_listen`, the HTTP API runs as a
    child process; with `api_by_default`, also without it, if its address is free.

    Raises `KVHavenError` if it cannot start: another service runs there (`AlreadyRunningError`),
    the arena cannot be created, or a setting is not valid.
    """
    api = api_for(settings, socket_path, by_default=api_by_default)
    prepare_directory(socket_path)
    allow_descriptors()
    # A service that is stopping still writes to its tiers and holds the lock of the disk tier.
    wait_s = _LOCK_WAIT_S + (settings.stop_deadline_s if embedded else 0)
    with lock_file(f"{socket_path}.lock", wait_s) as held:
        if not held:
            raise AlreadyRunningError(f"another service runs at {socket_path}")
        run = _run(settings, socket_path, api, origins or {}, file, embedded, on_listening)
        asyncio.run(run)


async def _run(
    settings: Settings,
    socket_path: str,
    api: ApiProcess | None,
    origins: Mapping[str, str],
    file: Path | None,
    embedded: bool,
    on_listening: Callable[[], None],
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    with contextlib.ExitStack() as undo:
        arena = Arena(settings.max_local_cpu_size, strict=settings.arena_strict)
        undo.callback(arena.close)
        service = Service(settings, arena, make_tiers(settings), origins, file)
        # From now on, clients can connect, and wait until the service accepts them.
        listener = Listener(socket_path)
        undo.callback(listener.close)
        tame_collector()
        favour_the_loop()
        logger.info(
            "node service %s: pid %d, socket %s, arena %d MiB%s",
            service.id[:8],
            os.getpid(),
            socket_path,
            arena.size >> 20,
            ", allocated in the background" if arena.allocating else "",
        )
        on_listening()
        if api is not None:
            api.start()
            undo.callback(api.close)
        background = [loop.create_task(collect_young(service))]
        if embedded:
            background.append(loop.create_task(_stop_when_idle(service, settings, stop)))
        await service.run(listener, stop)
        for task in background:
            task.cancel()
    logger.info("node service %s: ended", service.id[:8])


def favour_the_loop() -> None:
    """Let the event loop, in this thread, run soon after it was woken, also on a busy machine.

    A thread of low priority must pass the interpreter to it sooner: with Python's default of 5 ms,
    such a thread, preempted on a busy machine, delayed lookups by 60 ms and more; with 0.5 ms, by
    3 ms. And Linux runs the loop before other processes that had a core longer.
    """
    sys.setswitchinterval(_SWITCH_S)
    run_soon_after_waking()


def tame_collector() -> None:
    """Disable full collections: with a million catalog entries, one stops the service for 0.2 s."""
    gc.collect()
    gc.freeze()
    gc.disable()


async def collect_young(service: Service) -> None:
    """Collect the objects of the last 0.1 to 0.2 s forever, because failures leave cycles behind.

    If so many objects are new that a collection would take milliseconds, they are excluded from all
    collections instead. Objects that survive are not examined again either, so the cost does not
    grow.
    """
    before = 0
    while True:
        await asyncio.sleep(_COLLECT_S)
        pieces, before = service.driver.turns.pieces - before, service.driver.turns.pieces
        if pieces > _BUSY:
            gc.freeze()
        else:
            gc.collect(1)


async def _stop_when_idle(service: Service, settings: Settings, stop: asyncio.Event) -> None:
    """Set `stop` a while after the last session ended, or if none began within 120 s."""
    loop = asyncio.get_running_loop()
    busy = loop.time()
    while not stop.is_set():
        await asyncio.sleep(_IDLE_POLL_S)
        patience = settings.embedded_linger_s if service.sessions.ever else _FIRST_SESSION_S
        if len(service.sessions):
            busy = loop.time()
        elif loop.time() - busy >= patience:
            stop.set()


def embedded_main() -> int:
    """Read an `EmbeddedOrder` from standard input, serve, and write an `EmbeddedReply`.

    Returns the exit status. The signal mask and CPU affinity are reset, because the starting
    process may run pinned to a core, with signals blocked.
    """
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=EmbeddedOrder)
    if os.fork():
        # vLLM may kill its whole process tree at its end. A service outside of that tree can
        # still flush and clean up.
        os._exit(0)
    logging.basicConfig(
        level=order.settings.log_level, format="%(levelname)s kvhaven-service: %(message)s"
    )
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    try:
        prepare_directory(order.socket)
        _sweep(Path(order.socket))
        serve(
            order.settings,
            order.socket,
            embedded=True,
            on_listening=lambda: _reply(EmbeddedReply()),
        )
    except (KVHavenError, OSError) as error:
        _reply(EmbeddedReply(str(error), passing=isinstance(error, AlreadyRunningError)))
        return 1
    return 0


def _reply(reply: EmbeddedReply) -> None:
    """Write the reply, and close standard output, so that no reader waits for its end."""
    with contextlib.suppress(OSError):  # the starting process has ended
        os.write(1, msgspec.json.encode(reply) + b"\n")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)


def _sweep(own: Path) -> None:
    """Remove the files of embedded services of other engines that were killed."""
    left = {file.with_suffix("").with_suffix(".sock") for file in own.parent.glob("engine-*.*")}
    for socket_path in left - {own}:
        with contextlib.suppress(OSError, KVHavenError), lock_file(f"{socket_path}.lock") as unused:
            if unused:
                socket_path.unlink(missing_ok=True)
        with contextlib.suppress(OSError, KVHavenError), lock_file(f"{socket_path}.start"):
            pass
