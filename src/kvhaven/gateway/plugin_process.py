# SPDX-License-Identifier: Apache-2.0
"""Processes of plugins: started within limits, supervised, and started again with back-off."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import time
from asyncio.subprocess import DEVNULL, Process
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from kvhaven.config.sources import ENV_PREFIX

MOST_EVENTS: Final = 1024
"""Events that wait for a plugin; the oldest are dropped."""
MOST_MESSAGE: Final = 1 << 20
_LEAST_MESSAGE: Final = 1 << 10
MOST_WAITING_BYTES: Final = 16 << 20
"""Size of the prefetches that wait."""
_MOST_ASKING: Final = 8
_PREFETCHERS: Final = 2
"""Prefetches of a plugin that run side by side: jobs of operators need room, too."""
_LAST_PAUSE_S: Final = 60.0
_POLL_S: Final = 0.5
_TERM_S: Final = 0.5
_MOST_KILLED: Final = 1 << 12
_PATIENCE: Final = 10
"""A deadline counts the time in which a plugin waits for a core only from so many times on."""
_STEPS: Final = 4
"""Steps in which a deadline counts."""
_LATE: Final = 1.5
"""A step that took so many times its length was one in which the API's loop was late."""
_TICKS: Final = os.sysconf("SC_CLK_TCK")
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_MOST_LINE: Final = 1000
_NOTHING: Final[Mapping[str, str]] = {}
_ASKS: Final = frozenset({"prefetch", "lookup", "pin"})

State = Literal["starting", "running", "waiting", "ended", "off"]
Ask = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
"""Function that answers what a plugin asks. Raises `KVHavenError` if it refuses."""
Config = Callable[[], Mapping[str, object]]
"""Function that returns the service's present settings: a program may start at any time."""

logger = logging.getLogger(__name__)


class Limits(NamedTuple):
    """Limits of a plugin, in seconds and bytes; `failures` in a row switch it off."""

    hook_s: float = 1.0
    start_s: float = 30.0
    memory: int = 512 << 20
    processes: int = 64
    """Processes of a plugin, with itself."""
    first_pause_s: float = 1.0
    failures: int = 5
    steady_s: float = 600.0
    """A plugin that has run for so long starts to count its failures anew."""
    log_rate: int = 4 << 10
    """Bytes a second of its output that are read; also `log_burst` at once."""
    log_burst: int = 64 << 10
    rate: int = 1 << 20
    """Bytes a second of its messages that are read; each counts as `_LEAST_MESSAGE` at least."""
    burst: int = 4 << 20
    ask_rate: float = 10.0
    """Questions a second to the service; also `ask_burst` at once."""
    ask_burst: float = 20.0


class Ended(Exception):  # noqa: N818  it may have ended well
    """The reason why a process ended, or was killed."""

    def __init__(self, why: str, *, well: bool = False) -> None:
        super().__init__(why)
        self.well = well


class Bucket:
    """A rate with a burst; a caller that takes more waits."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        self._left, self._at = burst, time.monotonic()

    async def take(self, amount: float) -> None:
        """Take an amount, later if there is not enough."""
        now = time.monotonic()
        self._left = min(self._burst, self._left + (now - self._at) * self._rate)
        self._at = now
        self._left -= amount
        if self._left < 0:
            await asyncio.sleep(-self._left / self._rate)


class Supervised:
    """A program that runs within limits, and starts again if it fails."""

    def __init__(self, name: str, kind: Literal["class", "script"], limits: Limits) -> None:
        self.name = name
        self.kind = kind
        self.limits = limits
        self.state: State = "starting"
        self.error = ""
        """Why it ended last."""
        self.pid: int | None = None
        self.starts = 0
        self._output = -1
        self.counts = Counter[tuple[str, str]]()
        """Events by hook and result: ok, error, timeout, died, dropped."""

    async def run(self) -> None:
        """Run it until cancelled, or until it has failed too often."""
        failures = 0
        while True:
            began = time.monotonic()
            try:
                await self._run_once()
            except Ended as ended:
                self.error = str(ended)
            except OSError as error:
                self.error = f"cannot be started: {error.strerror or error}"
            except Exception:  # the other plugins, and the API, continue
                logger.exception("plugin %s: running it failed", self.name)
                self.error = "internal error; the log of the API has the details"
            else:
                self.state = "ended"
                return
            if time.monotonic() - began >= self.limits.steady_s:
                failures = 0
            failures += 1
            if failures >= self.limits.failures:
                self.state = "off"
                logger.error(
                    "plugin %s is off after %d failures: %s", self.name, failures, self.error
                )
                return
            pause_s = min(self.limits.first_pause_s * 2 ** (failures - 1), _LAST_PAUSE_S)
            self.state = "waiting"
            logger.warning(
                "plugin %s ended (%s); it is started again in %g s", self.name, self.error, pause_s
            )
            await asyncio.sleep(pause_s)

    async def _run_once(self) -> None:
        """Run it once; return if it ended well. Raises `Ended` or `OSError`."""
        raise NotImplementedError

    async def _start(
        self,
        arguments: Sequence[str],
        descriptors: Sequence[int] = (),
        more: Mapping[str, str] = _NOTHING,
    ) -> Process:
        """Start the process of `plugin_host` with these arguments."""
        kept = {n: v for n, v in os.environ.items() if not n.startswith((ENV_PREFIX, "LMCACHE_"))}
        program = [sys.executable, "-P", "-m", "kvhaven.gateway.plugin_host"]
        self._output, output = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *program,
                str(self.limits.memory),
                *arguments,
                stdin=DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=descriptors,
                env=kept | dict(more),
                start_new_session=True,  # its children end with it
            )
        except OSError:
            os.close(self._output)
            raise
        finally:
            os.close(output)
        self.pid = process.pid
        self.starts += 1
        return process

    async def _supervise(self, process: Process, *others: Coroutine[Any, Any, None]) -> None:
        """Wait until the process, or one of the others, ends; then end all of them."""
        own = [self._log(), self._watch(process), self._wait(process)]
        tasks = [asyncio.create_task(one) for one in (*own, *others)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._end(process)

    async def _end(self, process: Process) -> None:
        """Kill the process and all that it has started, also in sessions of their own."""
        started = _family(process.pid, _MOST_KILLED)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for pid in started[1:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await process.wait()
        self.pid = None

    async def _wait(self, process: Process) -> None:
        code = await process.wait()
        why = f"signal {-code}" if code < 0 else f"exit status {code}"
        raise Ended(why, well=code == 0)

    async def _log(self) -> None:
        """Log what it prints, at a limited rate; if it prints more, it waits."""
        bucket = Bucket(self.limits.log_rate, self.limits.log_burst)
        reader = asyncio.StreamReader(_MOST_LINE)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(self._output, "rb", 0)
        )
        try:
            rest = b""
            while data := await reader.read(_MOST_LINE):
                *lines, rest = (rest + data).split(b"\n")
                if len(rest) >= _MOST_LINE:
                    lines, rest = [*lines, rest], b""
                for line in filter(None, lines):
                    logger.info("plugin %s: %s", self.name, _shown(line))
                await bucket.take(len(data))
            if rest:
                logger.info("plugin %s: %s", self.name, _shown(rest))
        finally:
            transport.close()

    async def _watch(self, process: Process) -> None:
        """End it if it has more memory or processes than allowed, however it came by them."""
        most = self.limits.processes
        while True:
            await asyncio.sleep(_POLL_S)
            family = _family(process.pid, most + 1)
            if len(family) > most:
                raise Ended(f"it has more than {most} processes")
            used = sum(map(_resident, family))
            if used > self.limits.memory:
                raise Ended(
                    f"it has {used >> 20} MiB of memory, at most {self.limits.memory >> 20}"
                )


class Script(Supervised):
    """A script that runs for itself. If it succeeds, it is not started again."""

    def __init__(self, file: Path, role: str, config: Config, limits: Limits) -> None:
        super().__init__(file.name, "script", limits)
        self._file = file
        self._role = role
        self._config = config

    async def _run_once(self) -> None:
        more = {
            "LMCACHE_RUNTIME_PLUGIN_ROLE": self._role,
            "LMCACHE_RUNTIME_PLUGIN_CONFIG": json.dumps(self._config()),
            "LMCACHE_RUNTIME_PLUGIN_WORKER_ID": "0",
            "LMCACHE_RUNTIME_PLUGIN_WORKER_COUNT": "1",
        }
        process = await self._start(_interpreted(self._file), more=more)
        self.state = "running"
        try:
            await self._supervise(process)
        except Ended as ended:
            if not ended.well:
                raise

    async def _end(self, process: Process) -> None:
        with contextlib.suppress(ProcessLookupError, TimeoutError):
            os.killpg(process.pid, signal.SIGTERM)
            async with asyncio.timeout(_TERM_S):
                await process.wait()
        await super()._end(process)


class Plugin(Supervised):
    """A class with hooks. Events wait in a queue of `MOST_EVENTS`; the oldest are dropped."""

    def __init__(self, name: str, config: Config, ask: Ask, limits: Limits) -> None:
        super().__init__(name, "class", limits)
        self._config = config
        self._ask = ask
        self._events = deque[tuple[str, Sequence[object]]]()
        self._wake = asyncio.Event()
        self._done: asyncio.Future[str] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._prefetches = deque[tuple[dict[str, Any], int]]()
        self._prefetch_bytes = 0
        self._more_prefetches = asyncio.Event()
        self._questions = Bucket(limits.ask_rate, limits.ask_burst)

    @property
    def queued(self) -> int:
        """Number of events that wait."""
        return len(self._events)

    def offer(self, hook: str, *arguments: object) -> None:
        """Queue an event."""
        if self.state == "off":
            self.counts[hook, "dropped"] += 1
            return
        if len(self._events) >= MOST_EVENTS:
            dropped, _ = self._events.popleft()
            self.counts[dropped, "dropped"] += 1
        self._events.append((hook, arguments))
        self._wake.set()

    async def _run_once(self) -> None:
        self.state = "starting"
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = await self._start(["--socket", str(theirs.fileno())], [theirs.fileno()])
            except OSError:
                ours.close()
                raise
        reader, writer = await asyncio.open_connection(sock=ours, limit=MOST_MESSAGE)
        self._writer = writer
        prefetching = [self._prefetch() for _ in range(_PREFETCHERS)]
        try:
            await self._supervise(process, self._receive(reader), self._hooks(), *prefetching)
        finally:
            self._writer = None
            writer.close()
            self._prefetches.clear()
            self._prefetch_bytes = 0

    async def _end(self, process: Process) -> None:
        current = asyncio.current_task()
        if current is not None and current.cancelling() and self.state == "running":
            with contextlib.suppress(OSError, TimeoutError):  # the API ends, not the plugin
                async with asyncio.timeout(self.limits.hook_s):
                    if self._writer is not None:
                        self._writer.write(b'{"do": "on_shutdown", "arguments": []}\n')
                        await process.wait()
        await super()._end(process)

    # --- hooks ------------------------------------------------------------------------------

    async def _hooks(self) -> None:
        if await self._call("on_startup", self.limits.start_s, "start", []):
            raise Ended("on_startup failed: see the log")
        self.state = "running"
        while True:
            while not self._events:
                self._wake.clear()
                await self._wake.wait()
            hook, arguments = self._events.popleft()
            await self._call(hook, self.limits.hook_s, hook, arguments)

    async def _call(self, hook: str, seconds: float, do: str, arguments: Sequence[object]) -> str:
        """Run a hook to its end; return its error. Raises `Ended` if it takes too long."""
        message: dict[str, object] = {"do": do, "arguments": arguments}
        if do == "start":
            message |= {"plugin": self.name, "config": self._config()}
        self._done = asyncio.get_running_loop().create_future()
        result = "died"
        try:
            error = await self._within(seconds, self._run(message))
        except TimeoutError:
            result = "timeout"
            raise Ended(f"{hook} took longer than {seconds:g} s") from None
        except ConnectionError as problem:
            raise Ended("it closed its socket") from problem
        else:
            result = "error" if error else "ok"
            return error
        finally:
            self.counts[hook, result] += 1

    async def _run(self, message: Mapping[str, object]) -> str:
        """Send a hook; return its error when it has ended."""
        assert self._writer is not None, "it runs"
        assert self._done is not None, "it is expected"
        self._writer.write(json.dumps(message).encode() + b"\n")
        await self._writer.drain()
        return await self._done

    async def _within(self, seconds: float, work: Coroutine[Any, Any, str]) -> str:
        """Return the result of `work`. Raises `TimeoutError` if the plugin takes longer.

        On a busy machine plugins wait for a core, which is no fault of theirs: of the time in which
        one could run, only what it used of a core counts. This loop may be late itself, and read
        late of a hook that has ended: steps in which it was do not count, and none after the
        plugin's process has ended, of which `_wait` tells the reason.
        """
        loop, step_s, counted_s = asyncio.get_running_loop(), seconds / _STEPS, 0.0
        family = _family(self.pid or 0, self.limits.processes)
        used_s = _cpu_seconds(family)
        task = asyncio.create_task(work)
        try:
            for _ in range(_PATIENCE * _STEPS):
                began_s = loop.time()
                if (await asyncio.wait([task], timeout=step_s))[0]:
                    return task.result()
                was_late = loop.time() - began_s > _LATE * step_s
                before_s, used_s = used_s, _cpu_seconds(family)
                if not was_late and _lives(family[0]):
                    could_run = any(map(_may_run, family))
                    # A process that has ended takes what it used with it.
                    ran_s = min(step_s, max(0.0, used_s - before_s))
                    counted_s += ran_s if could_run else step_s
                if counted_s >= seconds:
                    break
            raise TimeoutError
        finally:
            task.cancel()

    # --- questions --------------------------------------------------------------------------

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        bucket = Bucket(self.limits.rate, self.limits.burst)
        asking: set[asyncio.Task[None]] = set()
        try:
            while line := await self._line(reader):
                await bucket.take(max(len(line), _LEAST_MESSAGE))
                self._require_reader()
                message = _decoded(line)
                if message["do"] == "done":
                    if self._done is not None and not self._done.done():
                        self._done.set_result(str(message.get("error", "")))
                elif message["do"] == "prefetch":
                    self._queue(message, len(line))
                elif len(asking) >= _MOST_ASKING:
                    self._send_answer(message, {"error": "too many questions side by side"})
                else:
                    task = asyncio.create_task(self._answer(message))
                    asking.add(task)
                    task.add_done_callback(asking.discard)
        finally:
            for task in asking:
                task.cancel()

    def _require_reader(self) -> None:
        """Raise `Ended` if it does not read its answers."""
        writer = self._writer
        if writer is not None and writer.transport.get_write_buffer_size() > MOST_MESSAGE:
            raise Ended("it does not read its answers")

    async def _line(self, reader: asyncio.StreamReader) -> bytes:
        try:
            return await reader.readline()
        except ValueError as error:
            raise Ended(f"it sent a message of more than {MOST_MESSAGE} bytes") from error
        except ConnectionError:
            return b""

    async def _answer(self, message: dict[str, Any]) -> None:
        self._send_answer(message, await self._asked(message))

    def _send_answer(self, message: dict[str, Any], found: Mapping[str, object]) -> None:
        if self._writer is not None and not self._writer.is_closing():
            answer = {"do": "answer", "id": message.get("id"), **found}
            self._writer.write(json.dumps(answer).encode() + b"\n")

    async def _asked(self, message: dict[str, Any]) -> dict[str, object]:
        what = message["do"]
        await self._questions.take(1)
        try:
            found = await self._ask(message)
        except Exception as error:  # noqa: BLE001  it is the plugin's to know
            self.counts[what, "error"] += 1
            logger.info("plugin %s: %s: %s", self.name, what, error)
            return {"error": str(error)}
        self.counts[what, "ok"] += 1
        return {"result": found}

    def _queue(self, message: dict[str, Any], size: int) -> None:
        if len(self._prefetches) >= MOST_EVENTS or self._prefetch_bytes + size > MOST_WAITING_BYTES:
            self.counts["prefetch", "dropped"] += 1
            return
        self._prefetches.append((message, size))
        self._prefetch_bytes += size
        self._more_prefetches.set()

    async def _prefetch(self) -> None:
        while True:
            while not self._prefetches:
                self._more_prefetches.clear()
                await self._more_prefetches.wait()
            message, size = self._prefetches.popleft()
            self._prefetch_bytes -= size
            await self._asked(message)


def _shown(line: bytes) -> str:
    """Return a printed line without control characters, which could forge other lines."""
    text = line.decode(errors="replace").replace("\t", " ")
    return "".join(char if char.isprintable() else "?" for char in text)


def _decoded(line: bytes) -> dict[str, Any]:
    """Return a plugin's message. Raises `Ended` if it is none."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Ended("it sent a message that is not valid") from error
    if not isinstance(message, dict) or message.get("do") not in {"done", *_ASKS}:
        raise Ended("it sent a message that is not valid")
    return message


def _interpreted(file: Path) -> list[str]:
    """Return the command for a script: its own if it may run, else that for its name."""
    if os.access(file, os.X_OK):
        return [str(file)]
    return [sys.executable if file.suffix == ".py" else "sh", str(file)]


def _family(pid: int, most: int) -> list[int]:
    """Return a process and what it has started, `most` of them at most."""
    found = [pid]
    for one in found:
        with contextlib.suppress(OSError):
            for file in Path(f"/proc/{one}/task").glob("*/children"):
                found += map(int, file.read_text().split())
        if len(found) >= most:
            break
    return found[:most]


def _cpu_seconds(family: Sequence[int]) -> float:
    """Return the time of cores that processes have used."""
    ticks = 0
    for pid in family:
        with contextlib.suppress(OSError, ValueError):
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            ticks += int(fields[11]) + int(fields[12])  # in user mode, and in the kernel
    return ticks / _TICKS


def _lives(pid: int) -> bool:
    """Return whether a thread of a process has not ended."""
    return not _thread_states(pid) <= {b"Z", b"X"}


def _may_run(pid: int) -> bool:
    """Return whether a thread of a process runs, or waits for a core only."""
    return b"R" in _thread_states(pid)


def _thread_states(pid: int) -> set[bytes]:
    """Return the states of a process's threads, as in `man proc`; none if it is gone."""
    states = set()
    for file in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            states.add(file.read_bytes().rpartition(b")")[2].split()[0])
    return states


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0
