# SPDX-License-Identifier: Apache-2.0
"""Quota manager of a shared directory: requests write credits and, as the owner, evicts files."""

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
"""Files deleted between two checks of the lease."""


class Runner(Protocol):
    """Function that runs blocking work on the directory in a thread of the tier."""

    async def __call__(self, lane: Lane, work: Callable[[SharedFiles], T]) -> T:
        """Return the result of `work`. Raises `TierError` if the store fails or is not open."""


class _LostError(Exception):
    """Another service holds the lease now."""


class QuotaManager:
    """One service's part in keeping a directory within `limits`. Used on the event loop.

    Every service is a writer: at each beat it reports the bytes it spent and reads its grant. The
    holder of the lease also distributes the free bytes, and removes files that are expired or
    exceed a limit. The usage is computed from a survey of all files plus the bytes that writers
    reported as spent since the survey began. It is therefore never too low, unless a writer
    ignores the limits.
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
        self._spent: Counter[str] = Counter()  # by writer, as last reported
        self._surveyed: Counter[str] = Counter()  # the same when the survey began
        self._base_bytes = 0
        self._next_survey = 0.0
        self._next_beat = 0.0

    def start(self) -> None:
        """Start the periodic tasks; the directory must be open."""
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._forever(self._tell), name="kvhaven-fs-writer"),
            loop.create_task(self._forever(self._look_after), name="kvhaven-fs-owner"),
        ]

    async def stop(self) -> None:
        """Stop the tasks; release the lease and the credits if the directory is reachable."""
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
            except Exception:  # noqa: BLE001 - the task must survive any error
                _log.exception("%s: enforcing the limits failed", self._title)
            await asyncio.sleep(self._limits.beat_s)

    async def _tell(self) -> None:
        """Report the bytes spent, and read the grant."""
        writer, credit_s = self.purse.beat(), self._limits.credit_s
        asked = time.monotonic()
        grant, good_for_s = await self._run(
            Lane.WRITE, lambda files: credit.tell(files, self._id, writer, credit_s)
        )
        self.purse.granted(grant, good_for_s - (time.monotonic() - asked))

    async def _look_after(self) -> None:
        """Try to become the owner, or do the owner's periodic work."""
        try:
            if not self.owner:
                await self._stand()
            if self.owner:
                await self._round()
        except _LostError:
            self.owner = False
            _log.info("%s: another service is the owner now", self._title)

    async def _stand(self) -> None:
        if not await self._run(Lane.WRITE, lambda files: self._lease(files).claim()):
            return
        await asyncio.sleep(self._limits.beat_s)  # longer than a concurrent claim takes
        epoch = await self._run(Lane.WRITE, lambda files: self._lease(files).held())
        if epoch is None:
            return
        self.owner = True
        self._next_survey = 0.0  # usage is unknown: no grants before the first survey
        self._base_bytes = self._limits.most_bytes
        _log.info("%s: this service is the owner, epoch %d", self._title, epoch)

    async def _round(self) -> None:
        self._next_beat = 0.0
        in_vain = await self._pulse()
        if in_vain or time.monotonic() >= self._next_survey:
            await self._tidy(in_vain)

    async def _pulse(self) -> int:
        """Renew the lease and the grants, once a beat; return the bytes not granted."""
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
        """Survey all files, remove those beyond a limit, and record the remaining usage."""
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
        deletions = survey.deletions(self._limits, now, wanted_bytes + outstanding)
        removed = await self._remove_all(deletions) if deletions.bytes else 0
        self._base_bytes = survey.used_bytes - removed
        self._surveyed = told
        self._next_survey = time.monotonic() + self._limits.survey_s
        if removed:
            _log.info("%s: removed %d bytes of %d", self._title, removed, survey.used_bytes)

    async def _remove_all(self, deletions: Deletions) -> int:
        """Remove the selected files; return their bytes."""
        removed = 0
        async for _, page in self._files():
            gone = [blob for blob in page if deletions.take(blob)]
            for at in range(0, len(gone), _BATCH):
                removed += await self._remove(gone[at : at + _BATCH])
        return removed

    async def _files(self) -> AsyncIterator[tuple[str, list[Blob]]]:
        """Yield all files, one subfolder at a time, renewing the lease in between."""
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
        """Record the bytes that writers have spent; those of departed writers still count."""
        for writer_id, account in accounts.items():
            self._spent[writer_id] = account.spent

    def _used_bytes(self) -> int:
        """Return an upper bound of the bytes in use."""
        since = sum(spent - self._surveyed[writer_id] for writer_id, spent in self._spent.items())
        return self._base_bytes + max(0, since)
