# SPDX-License-Identifier: Apache-2.0
"""Keeps a shared directory within its limits: asks for credits, and, if elected, looks after it."""

import asyncio
import contextlib
import functools
import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, Protocol, TypeVar

from kvhaven.errors import TierError
from kvhaven.tiers.executor import Lane
from kvhaven.tiers.filesystem import write_credits as credit
from kvhaven.tiers.filesystem.files import SharedFiles
from kvhaven.tiers.filesystem.ownership import Ownership
from kvhaven.tiers.filesystem.usage import Deletions, DirectoryUsage, Limits
from kvhaven.tiers.filesystem.write_credits import Account, Purse
from kvhaven.tiers.shared.store import Blob

_log = logging.getLogger(__name__)

T = TypeVar("T")

_BATCH: Final = 64
"""Files that are deleted between two looks at the lease."""


class Runner(Protocol):
    """Runs blocking work on the directory in a thread of the tier."""

    async def __call__(self, lane: Lane, work: Callable[[SharedFiles], T]) -> T:
        """Return what `work` returns. Raises `TierError`."""


class _LostError(Exception):
    """The lease is another's now."""


class QuotaManager:
    """One service's part in keeping a directory within `limits`. Used on the event loop.

    Every service is a writer: at each beat it tells what it spent and reads what it was granted.
    Whoever holds the lease also shares out the free bytes, and removes what is too old or too
    much. What is in use is known from a survey of all files, plus what writers said they spent
    since it began: so it is never less than what is really there, unless somebody writes who
    does not keep to this.
    """

    def __init__(self, limits: Limits, run: Runner, title: str) -> None:
        self._limits = limits
        self._run = run
        self._title = title
        self._id = uuid.uuid4().hex
        self.purse = Purse(time.monotonic, limits.least_wanted_bytes)
        self.owner = False
        self.removed_files = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._spent: Counter[str] = Counter()  # by writer, as last told
        self._surveyed: Counter[str] = Counter()  # the same when the survey began
        self._base_bytes = 0
        self._next_survey = 0.0
        self._next_beat = 0.0

    def start(self) -> None:
        """Begin, when the directory is open."""
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._forever(self._tell), name="kvhaven-fs-writer"),
            loop.create_task(self._forever(self._look_after), name="kvhaven-fs-owner"),
        ]

    async def stop(self) -> None:
        """End; hand the lease and the credits back, if the directory lets us."""
        for task in self._tasks:
            task.cancel()
        if not self._tasks:
            return
        await asyncio.wait(self._tasks)
        self._tasks = []
        with contextlib.suppress(TierError):
            await self._run(Lane.WRITE, lambda files: credit.forget(files, self._id))
            if self.owner:
                await self._run(Lane.WRITE, lambda files: self._lease(files).give_up())
        self.owner = False

    async def _forever(self, beat: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await beat()
            except TierError as error:
                _log.debug("%s: %s", self._title, str(error))
            except Exception:  # noqa: BLE001 - nobody else would do it any more
                _log.exception("%s: keeping to its limits failed", self._title)
            await asyncio.sleep(self._limits.beat_s)

    async def _tell(self) -> None:
        """Say what was spent, and take note of what was granted."""
        writer, credit_s = self.purse.beat(), self._limits.credit_s
        asked = time.monotonic()
        grant, good_for_s = await self._run(
            Lane.WRITE, lambda files: credit.tell(files, self._id, writer, credit_s)
        )
        self.purse.granted(grant, good_for_s - (time.monotonic() - asked))

    async def _look_after(self) -> None:
        """Be elected, or do an owner's round."""
        try:
            if not self.owner:
                await self._stand()
            if self.owner:
                await self._round()
        except _LostError:
            self.owner = False
            _log.info("%s: another service looks after it now", self._title)

    async def _stand(self) -> None:
        if not await self._run(Lane.WRITE, lambda files: self._lease(files).claim()):
            return
        await asyncio.sleep(self._limits.beat_s)  # longer than others take to claim
        epoch = await self._run(Lane.WRITE, lambda files: self._lease(files).held())
        if epoch is None:
            return
        self.owner = True
        self._next_survey = 0.0  # nothing is known, so nothing is granted before the first one
        self._base_bytes = self._limits.most_bytes
        _log.info("%s: this service looks after it, epoch %d", self._title, epoch)

    async def _round(self) -> None:
        self._next_beat = 0.0
        in_vain = await self._pulse()
        if in_vain or time.monotonic() >= self._next_survey:
            await self._tidy(in_vain)

    async def _pulse(self) -> int:
        """Once a beat: renew the lease and the grants; return what was asked for in vain."""
        if time.monotonic() < self._next_beat:
            return 0
        self._next_beat = time.monotonic() + self._limits.beat_s
        return await self._run(Lane.WRITE, self._renew)

    def _renew(self, files: SharedFiles) -> int:
        self._require_lease(files)
        accounts = credit.accounts(files, self._limits.credit_s)
        self._hear(accounts)
        outstanding = sum(account.outstanding for account in accounts.values())
        free = self._limits.ceiling_bytes - self._used_bytes() - outstanding
        return credit.grant(files, accounts, free)

    async def _tidy(self, wanted_bytes: int) -> None:
        """Count everything, remove what has to go, and take note of what is left."""
        accounts = await self._run(
            Lane.WRITE, lambda files: credit.accounts(files, self._limits.credit_s)
        )
        self._hear(accounts)
        told = Counter(self._spent)
        outstanding = sum(account.outstanding for account in accounts.values())
        survey = DirectoryUsage()
        async for folder, page in self._files():
            survey.add(folder, page)
        now = await self._run(Lane.WRITE, SharedFiles.server_time)
        doomed = survey.doomed(self._limits, now, wanted_bytes + outstanding)
        removed = await self._remove_all(doomed) if doomed.bytes else 0
        self._base_bytes = survey.used_bytes - removed
        self._surveyed = told
        self._next_survey = time.monotonic() + self._limits.survey_s
        if removed:
            _log.info("%s: removed %d bytes of %d", self._title, removed, survey.used_bytes)

    async def _remove_all(self, doomed: Deletions) -> int:
        """Remove what has to go; return its bytes."""
        removed = 0
        async for _, page in self._files():
            gone = [blob for blob in page if doomed.take(blob)]
            for at in range(0, len(gone), _BATCH):
                removed += await self._remove(gone[at : at + _BATCH])
        return removed

    async def _files(self) -> AsyncIterator[tuple[str, list[Blob]]]:
        """Yield all files, a subfolder at a time; the beat goes on meanwhile."""
        for folder in await self._run(Lane.WRITE, SharedFiles.folders):
            for part in range(256):
                await self._pulse()
                subfolder = f"{folder}/{part:02x}"
                page = await self._run(
                    Lane.WRITE, functools.partial(SharedFiles.list_subfolder, subfolder=subfolder)
                )
                if page:
                    yield folder, page

    async def _remove(self, batch: list[Blob]) -> int:
        await self._pulse()

        def remove(files: SharedFiles) -> int:
            self._require_lease(files)
            return sum(blob.size for blob in batch if files.remove_unused(blob))

        self.removed_files += len(batch)
        return await self._run(Lane.WRITE, remove)

    def _require_lease(self, files: SharedFiles) -> None:
        if not self._lease(files).renew():
            raise _LostError

    def _lease(self, files: SharedFiles) -> Ownership:
        return Ownership(files, self._id, self._limits.lease_s)

    def _hear(self, accounts: dict[str, Account]) -> None:
        """Take note of what writers have spent; those who went have spent it all the same."""
        for writer_id, account in accounts.items():
            self._spent[writer_id] = account.spent

    def _used_bytes(self) -> int:
        """Return what is in use at most."""
        since = sum(spent - self._surveyed[writer_id] for writer_id, spent in self._spent.items())
        return self._base_bytes + max(0, since)
