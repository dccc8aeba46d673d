# SPDX-License-Identifier: Apache-2.0
"""Node services for the tests: one in a thread of the test, and real processes."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from kvhaven.client.control import connect
from kvhaven.config import Settings
from kvhaven.errors import KVHavenError
from kvhaven.service.arena import Arena
from kvhaven.service.connection import Listener
from kvhaven.service.server import Service
from kvhaven.service.status import ServiceStatus
from kvhaven.service.tier_setup import make_tiers
from kvhaven.tiers.base import TierAudit
from kvhaven.tiers.executor import TierExecutor
from kvhaven.tiers.local.tier import DiskTier

T = TypeVar("T")

MIB = 1 << 20


def eventually(what: Callable[[], T | None], seconds: float = 120.0) -> T:
    """Wait until `what` returns something true, and return that."""
    end = time.monotonic() + seconds
    while True:
        got = what()
        if got:
            return got
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds} s: {what}, the last answer was {got!r}")
        time.sleep(0.005)


def status_of(address: str | Path) -> ServiceStatus:
    """Return a service's status."""
    with connect(str(address)) as control:
        return msgspec.json.decode(control.status(), type=ServiceStatus)


def flush(address: str | Path) -> None:
    """Wait until all is stored."""
    with connect(str(address)) as control:
        assert control.flush(10) == 0


def leaks(status: ServiceStatus) -> dict[str, int]:
    """Return what is held although nobody should hold anything; empty when all is well."""
    catalog = status.catalog
    resident = sum(namespace.bytes["memory"] for namespace in status.namespaces)
    held = {
        "leases": catalog.leases,
        "leased_bytes": catalog.leased_bytes,
        "reserved_bytes": catalog.reserved_bytes,
        "promoting_bytes": catalog.promoting_bytes,
        "retired_bytes": catalog.retired_bytes,
        "quarantined_bytes": catalog.quarantined_bytes,
        "used_beyond_resident": status.arena_used_bytes - resident,
    }
    return {name: value for name, value in held.items() if value}


def seconds(call: Callable[[], object]) -> float:
    """Return how long a call takes."""
    began = time.monotonic()
    call()
    return time.monotonic() - began


def settled(address: str | Path, *, members: int | None = None, seconds: float = 30.0) -> None:
    """Wait until nothing is held; `members` is how many processes are to be known then."""
    end = time.monotonic() + seconds
    while True:
        status = status_of(address)
        left = leaks(status)
        if not left and members in {None, len(status.members)}:
            return
        assert time.monotonic() < end, f"leaks: {left}; members: {status.members}"
        time.sleep(0.01)


class NodeThread:
    """A real service on a real socket, in a thread of this process, so that it can be audited."""

    make_tiers = staticmethod(make_tiers)
    """A test may put other tiers here."""
    arena_steps: Mapping[str, int] = {}
    """A test may have its arena come in smaller steps."""

    def __init__(self, socket: Path, **settings: Any) -> None:
        self.address = str(socket)
        self.settings = Settings(**({"max_local_cpu_size": 16 * MIB} | settings))
        self.service: Service
        self._thread = threading.Thread(target=self._main)
        self._ready = threading.Event()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(120)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def call(self, what: Callable[[], T]) -> T:
        """Call something on the service's loop."""

        async def answer() -> T:
            return what()

        return asyncio.run_coroutine_threadsafe(answer(), self._loop).result(10)

    def cut(self) -> None:
        """Close every connection from the service's side."""

        def close_all() -> None:
            for connection in tuple(self.service._connections):
                connection.close()

        self.call(close_all)

    def check(self) -> None:
        """Audit every invariant of the catalog, and of the accounts of its lookups."""
        self.call(self.service.catalog.check)
        self.call(self.service.accounts.check)

    def status(self) -> ServiceStatus:
        """Return its status."""
        return status_of(self.address)

    def _main(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        size, strict = self.settings.max_local_cpu_size, self.settings.arena_strict
        self.arena = arena = Arena(size, strict=strict, **self.arena_steps)
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self.service = Service(self.settings, arena, self.make_tiers(self.settings))
        listener = Listener(self.address)
        self._ready.set()
        await self.service.run(listener, self._stop)
        arena.close()


class GrowingNode(NodeThread):
    """One with an arena of 16 MiB, of which 1 MiB is there first, and then at least 1 MiB more."""

    arena_steps: Mapping[str, int] = {"first_bytes": MIB, "step_bytes": MIB}


class NodeProcess:
    """`kvhaven serve` in a process of its own; `settings` go by its environment."""

    program: Sequence[str] = ("-m", "kvhaven.cli")

    def __init__(self, socket: Path, log: Path, **settings: object) -> None:
        self.address = str(socket)
        self.log = log
        self._environment = os.environ | {
            f"KVHAVEN_{name.upper()}": str(value)
            for name, value in (
                {"max_local_cpu_size": "16MiB", "api_listen": "off"} | settings
            ).items()
        }
        self.process: subprocess.Popen[bytes]

    def launch(self) -> Self:
        """Start it, and do not wait; entering its context then does."""
        with self.log.open("a") as output:
            self.process = subprocess.Popen(
                [sys.executable, *self.program, "serve", "--socket", self.address],
                stdout=output,
                stderr=output,
                env=self._environment,
            )
        return self

    def start(self) -> None:
        """Start it and wait until it answers."""
        self.launch()
        eventually(self._answers)

    def kill(self) -> None:
        """Kill -9."""
        self.process.kill()
        self.process.wait()

    def stop(self, seconds: float = 30.0) -> None:
        """Tell it to end, and wait for it."""
        self.process.terminate()
        assert self.process.wait(seconds) == 0, self.log.read_text()[-4000:]

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """SIGSTOP it for a while."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        # One that ended by itself since its launch is not launched again: `_answers` says why.
        if not hasattr(self, "process") or self.process.returncode is not None:
            self.launch()
        eventually(self._answers)
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()

    def _answers(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-4000:]
        try:
            status_of(self.address)
        except KVHavenError:
            return False
        return True


def audit_disk(path: Path) -> TierAudit:
    """Open a disk tier that nobody uses, let it clean up as a start does, and check all of it."""

    async def run() -> TierAudit:
        tier = DiskTier(path, 1 << 40, executor=TierExecutor(1))
        await tier.start()
        try:
            async for _ in tier.scan():
                pass
            return await tier.check()
        finally:
            await tier.close(10)

    return asyncio.run(run())
