# SPDX-License-Identifier: Apache-2.0
"""Redis pipelines shared by many callers, and connections with large read buffers."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

Command = tuple[Any, ...]
"""Words of a command, as redis-py's `execute_command` takes them."""

Execute = Callable[[Sequence[Command]], Awaitable[Sequence[Any]]]
"""Function that sends commands in one pipeline; returns a reply or an exception for each."""

MOST_COMMANDS: Final = 128
MOST_BYTES: Final = 4 << 20
"""Limit of a pipeline's values in bytes; one larger value is sent alone. Small pipelines overlap:
2 MiB shards were written at 0.8 of the bare client's rate with 16 MiB, at 0.97 with 4 MiB."""


def roomy(connection: type[Any]) -> type[Any]:
    """Return a redis-py connection class whose stream buffers a whole pipeline's reply.

    By default a stream pauses its socket at 128 KiB, a dozen times for a shard. Shards of 2 MiB
    were read at 0.75 of the bare client's rate, and at 1.02 with the larger buffer. Connections
    to a Unix socket do not support the argument and are unchanged.
    """

    class Roomy(connection):  # type: ignore[misc]  # a class known only at run time
        def _connection_arguments(self) -> Mapping[str, Any]:
            return {**super()._connection_arguments(), "limit": MOST_BYTES}

    return Roomy


class Pipelines:
    """Batcher of commands into at most `connections` concurrent pipelines.

    Commands that arrive while all pipelines are busy are sent together in the next one: a single
    command is sent immediately, and many commands share round trips. If a caller is cancelled,
    its pipeline continues. Used in one thread.
    """

    def __init__(self, execute: Execute, connections: int) -> None:
        self._execute = execute
        self._free = connections
        self._waiting: deque[tuple[Sequence[Command], int, asyncio.Future[list[Any]]]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, commands: Sequence[Command], moved_bytes: int) -> list[Any]:
        """Send commands and return their replies. Raises the first reply that is an exception.

        `moved_bytes` is the approximate size of their values in bytes.
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
        """Cancel running pipelines."""
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
        """Send pipelines until no command waits."""
        try:
            await asyncio.sleep(0)  # collect the commands of other tasks that are ready now
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
        except Exception as error:  # noqa: BLE001 - raised in the callers of `ask`
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
                    future.exception()  # no "never retrieved" warning if the caller is gone
            return
        at = 0
        for commands, future in batch:
            if not future.done():
                future.set_result(replies[at : at + len(commands)])
            at += len(commands)
