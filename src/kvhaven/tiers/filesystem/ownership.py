# SPDX-License-Identifier: Apache-2.0
"""Who looks after a shared directory: one service, elected by a file. Runs in a tier's threads.

Ownership saves work and is no safety property: files are immutable, deletes are idempotent, so
two owners at once remove more than one would have, and nothing worse. Expiry is the lease
file's age by the server's clock; the nodes' own clocks are never asked for the time.
"""

import os
from typing import Final

import msgspec

from kvhaven.tiers.filesystem.files import SharedFiles

NAME: Final = "owner"


class Owner(msgspec.Struct, frozen=True):
    """The lease file's content, in JSON: who holds it, and how often it changed hands."""

    holder: str
    epoch: int


class Ownership:
    """The lease of an opened directory, for `holder`, a name that nobody else has.

    A lease that was not renewed for `lease_s` seconds is anybody's. After `claim` the holder
    waits for longer than others take to claim, and asks `held` whether it was the last to do
    so. All raise `OSError` for what the file system says.
    """

    def __init__(self, files: SharedFiles, holder: str, lease_s: float) -> None:
        self._files = files
        self._holder = holder
        self._lease_s = lease_s

    def claim(self) -> bool:
        """Take the lease if it is nobody's, or ours from before; return whether that was so."""
        owner, age_s = self._read()
        if owner is not None and owner.holder != self._holder and age_s <= self._lease_s:
            return False
        epoch = owner.epoch + 1 if owner else 1
        self._files.save(NAME, msgspec.json.encode(Owner(self._holder, epoch)))
        return True

    def renew(self) -> bool:
        """Make it as new as the server's clock says; return whether it is still ours.

        It is renewed through an open file: one that was replaced meanwhile stays as it is.
        """
        try:
            file = os.open(NAME, os.O_RDWR | os.O_NOFOLLOW, dir_fd=self._files.fd)
        except FileNotFoundError:
            return False
        try:
            owner = _owner(os.pread(file, 4096, 0))
            if owner is None or owner.holder != self._holder:
                return False
            os.utime(file)
        finally:
            os.close(file)
        return self.held() is not None

    def held(self) -> int | None:
        """Return the epoch if the lease is ours and not half expired; else None.

        To be asked before each batch of deletes: who was stopped for a while finds out here.
        """
        owner, age_s = self._read()
        if owner is None or owner.holder != self._holder or age_s > self._lease_s / 2:
            return None
        return owner.epoch

    def give_up(self) -> None:
        """Leave the lease to others at once, if it is ours."""
        if self.held() is not None:
            self._files.remove(NAME)

    def _read(self) -> tuple[Owner | None, float]:
        """Return what the file says, and its age in seconds by the server's clock."""
        found = self._files.load_dated(NAME)
        if found is None:
            return None, 0.0
        raw, changed = found
        return _owner(raw), self._files.server_time() - changed


def _owner(raw: bytes) -> Owner | None:
    try:
        return msgspec.json.decode(raw, type=Owner)
    except ValueError:
        return None  # damaged: anybody's
