# SPDX-License-Identifier: Apache-2.0
"""Election of the one service that maintains a shared directory. Runs in a tier's threads.

Ownership saves work and is not a safety property: files are immutable and deletes idempotent, so
two concurrent owners at worst remove more than one would have. A lease expires by its file's
age on the server's clock; the clocks of the nodes are never used.
"""

import os
from typing import Final

import msgspec

from kvhaven.tiers.filesystem.files import SharedFiles

NAME: Final = "owner"


class Owner(msgspec.Struct, frozen=True):
    """Content of the lease file, in JSON: the holder, and the number of claims so far."""

    holder: str
    epoch: int


class Ownership:
    """Lease of an open directory for `holder`, a unique name.

    Any service may claim a lease that was not renewed for `lease_s` seconds. After `claim`, the
    holder waits longer than a concurrent claim takes, then calls `held` to find out whether its
    claim was the last one. All methods raise `OSError` for errors of the file system.
    """

    def __init__(self, files: SharedFiles, holder: str, lease_s: float) -> None:
        self._files = files
        self._holder = holder
        self._lease_s = lease_s

    def claim(self) -> bool:
        """Claim the lease if it is free, expired or already ours; return whether it was."""
        owner, age_s = self._read()
        # A lease from the future is from before the server's clock was set back.
        valid = abs(age_s) <= self._lease_s
        if owner is not None and owner.holder != self._holder and valid:
            return False
        epoch = owner.epoch + 1 if owner else 1
        self._files.save(NAME, msgspec.json.encode(Owner(self._holder, epoch)))
        return True

    def renew(self) -> bool:
        """Set the lease file's time to the server's current time; return whether it is still ours.

        The renewal goes through an open file, so a lease that replaced it is left unchanged.
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
        """Return the epoch if the lease is ours and at most half expired; otherwise None.

        The owner calls this before each batch of deletes, to detect that its process was stopped
        for too long.
        """
        owner, age_s = self._read()
        if owner is None or owner.holder != self._holder or age_s > self._lease_s / 2:
            return None
        return owner.epoch

    def give_up(self) -> None:
        """Release the lease if it is ours."""
        if self.held() is not None:
            self._files.remove(NAME)

    def _read(self) -> tuple[Owner | None, float]:
        """Return the lease file's content, and its age in seconds by the server's clock."""
        found = self._files.load_dated(NAME)
        if found is None:
            return None, 0.0
        raw, changed = found
        return _owner(raw), self._files.server_time() - changed


def _owner(raw: bytes) -> Owner | None:
    try:
        return msgspec.json.decode(raw, type=Owner)
    except (ValueError, RecursionError):
        return None  # a damaged lease is free
