# SPDX-License-Identifier: Apache-2.0
"""Commands for Redis from many callers, gathered into pipelines; connections for long answers."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

Command = tuple[Any, ...]
"""A command's words, as `execute_command` of redis-py takes them."""

Execute = Callable[[Sequence[Command]], Awaitable[Sequence[Any]]]
"""Sends commands in one pipeline; returns a reply, or an exception, for each."""

MOST_COMMANDS: Final = 128
MOST_BYTES: Final = 4 << 20
"""A pipeline's values, larger single ones aside: while it is answered, others keep the server
busy (shards of 2 MiB were written at 0.8 of the limit with 16 MiB, and at 0.97 with 4)."""


def roomy(connection: type[Any]) -> type[Any]:
    """Return a redis-py connection class whose stream takes a whole pipeline's answer.

    By default a stream stops its socket at 128 KiB and starts it again, a dozen times for a shard:
    shards of 2 MiB were read at 0.75 of the bare client's rate, and at 1.02 with this. A Unix
    socket's connection takes no such argument and stays as it is.
    """

    class Roomy(connection):  # type: ignore[misc]  # a class that is only known now
        def _connection_arguments(self) -> Mapping[str, Any]:
            return {**super()._connection_arguments(), "limit": MOST_BYTES}

    return Roomy


class Pipelines:
    """Runs commands with at most `connections` pipelines at once.

    What comes while all of them are under way goes together into the next one, so a lone
    command waits for nothing, and many share round trips. Who asks may be cancelled: the
    pipeline goes on without it. Used in one thread.
    """

    def __init__(self, execute: Execute, connections: int) -> None:
        self._execute = execute
        self._free = connections
        self._waiting: deque[tuple[Sequence[Command], int, asyncio.Future[list[Any]]]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, commands: Sequence[Command], moved_bytes: int) -> list[Any]:
        """Return the replies; raises the first one that is an exception.

        `moved_bytes` is about what their values take.
        """
        future: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._waiting.append((commands, moved_bytes, future))
        self._start()
        replies = await future
        for reply in replies:
            if isinstance(reply, BaseException):
                raise reply
        return replies

    async def close(self) -> None:
        """Cancel what goes on."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _start(self) -> None:
        while self._free and self._waiting:
            self._free -= 1
            task = asyncio.get_running_loop().create_task(self._work())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _work(self) -> None:
        """Send pipelines until nothing waits."""
        try:
            await asyncio.sleep(0)  # who asks in this moment comes along
            while batch := self._take():
                await self._send(batch)
        finally:
            self._free += 1

    def _take(self) -> list[tuple[Sequence[Command], asyncio.Future[list[Any]]]]:
        batch: list[tuple[Sequence[Command], asyncio.Future[list[Any]]]] = []
        count = moved = 0
        while self._waiting:
            commands, size, future = self._waiting[0]
            if batch and (count + len(commands) > MOST_COMMANDS or moved + size > MOST_BYTES):
                break
            self._waiting.popleft()
            if future.done():  # cancelled while it waited
                continue
            batch.append((commands, future))
            count += len(commands)
            moved += size
        return batch

    async def _send(self, batch: list[tuple[Sequence[Command], asyncio.Future[list[Any]]]]) -> None:
        every = [command for commands, _ in batch for command in commands]
        try:
            replies = list(await self._execute(every))
        except asyncio.CancelledError:
            for _, future in batch:
                future.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - it is raised where it was asked for
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
                    future.exception()  # who asked may be gone: no complaint about that
            return
        at = 0
        for commands, future in batch:
            if not future.done():
                future.set_result(replies[at : at + len(commands)])
            at += len(commands)
