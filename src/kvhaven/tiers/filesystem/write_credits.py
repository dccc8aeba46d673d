# SPDX-License-Identifier: Apache-2.0
"""Write credits of a shared directory. The functions block and run in a tier's threads.

Eviction alone cannot enforce a quota: 100 MB are 0.2 s of writing. A writer therefore needs
credits, bytes granted by the directory's owner, and drops writes without credit.

- `writers/<id>` is written by a writer at each beat: the bytes it has `spent` since it began, and
  the bytes it `wants` beyond that.
- `grants/<id>` is written by the owner: the limit up to which that writer may spend. A grant is
  valid for `credit_s` seconds by the server's clock, and the owner renews it as long as the
  writer beats.

A limit is absolute, so two concurrent owners do not grant twice, and a new owner reads the grants
of the previous one from these files. A writer without a beat for three times `credit_s` has no
valid grant and is removed.
"""

from collections.abc import Callable, Mapping
from typing import Final, TypeVar

import msgspec

from kvhaven.errors import TierError
from kvhaven.tiers.filesystem.files import SharedFiles

T = TypeVar("T")

WRITERS: Final = "writers"
GRANTS: Final = "grants"
_DEAD_AFTER: Final = 3


class Writer(msgspec.Struct, frozen=True):
    """Report of a writer: bytes spent since it began, and further bytes requested."""

    spent: int
    wants: int


class CreditGrant(msgspec.Struct, frozen=True):
    """Limit of a writer's spent bytes."""

    limit: int


class Account(msgspec.Struct, frozen=True):
    """State of a writer as seen by the owner. `alive`: its last beat is within `credit_s`."""

    spent: int
    wants: int
    limit: int
    alive: bool

    @property
    def outstanding(self) -> int:
        """Bytes that the writer may still write."""
        return max(0, self.limit - self.spent)


class Purse:
    """Credits of a writer. Used on the event loop; `clock` returns monotonic seconds.

    `clock` only measures the time since a grant was read, so nodes need not agree on the time.
    """

    def __init__(self, clock: Callable[[], float], least_wanted: int) -> None:
        self._clock = clock
        self._least = least_wanted
        self._spent = 0
        self._missing = 0
        self._limit = 0
        self._until = 0.0

    def take(self, size: int) -> None:
        """Spend `size` bytes. Raises `TierError` if the credit does not suffice or has expired."""
        if self._clock() >= self._until or self._spent + size > self._limit:
            self._missing += size
            raise TierError(
                f"no credit for {size} bytes: the owner of the store has not granted it yet"
            )
        self._spent += size

    def refund(self, size: int) -> None:
        """Return credit for bytes that were not written."""
        self._spent -= size

    def beat(self) -> Writer:
        """Return the report for the owner; it requests at least twice the bytes without credit."""
        wants = max(self._least, 2 * self._missing)
        self._missing = 0
        return Writer(self._spent, wants)

    def granted(self, grant: CreditGrant | None, good_for_s: float) -> None:
        """Record a grant that was just read and stays valid for `good_for_s` seconds."""
        if grant is not None:
            self._limit = grant.limit
            self._until = self._clock() + good_for_s


def tell(
    files: SharedFiles, writer_id: str, writer: Writer, credit_s: float
) -> tuple[CreditGrant | None, float]:
    """Write a writer's beat; return its grant, and the seconds that the grant stays valid."""
    name = f"{WRITERS}/{writer_id}"
    files.save(name, msgspec.json.encode(writer))
    beat, found = files.load_dated(name), files.load_dated(f"{GRANTS}/{writer_id}")
    if beat is None or found is None:
        return None, 0.0
    raw, granted_at = found
    now = beat[1]  # the server's clock, from the file written just now
    return _decode(raw, CreditGrant), credit_s - max(0.0, now - granted_at)


def forget(files: SharedFiles, writer_id: str) -> None:
    """Remove a writer that has ended."""
    for folder in (GRANTS, WRITERS):
        files.remove(f"{folder}/{writer_id}")


def accounts(files: SharedFiles, credit_s: float) -> dict[str, Account]:
    """Return all writers by id; remove those whose grants expired long ago."""
    now = files.server_time()
    found: dict[str, Account] = {}
    for writer_id in {*files.names(WRITERS), *files.names(GRANTS)}:
        beat = files.load_dated(f"{WRITERS}/{writer_id}")
        granted = files.load_dated(f"{GRANTS}/{writer_id}")
        last = max((dated[1] for dated in (beat, granted) if dated), default=0.0)
        if now - last > _DEAD_AFTER * credit_s:
            forget(files, writer_id)
            continue
        writer = (_decode(beat[0], Writer) if beat else None) or Writer(0, 0)
        grant = _decode(granted[0], CreditGrant) if granted else None
        limit = grant.limit if grant else writer.spent
        alive = beat is not None and now - beat[1] <= credit_s
        found[writer_id] = Account(writer.spent, writer.wants, limit, alive)
    return found


def grant(files: SharedFiles, found: Mapping[str, Account], free: int) -> int:
    """Distribute `free` bytes among the writers that request more; return the bytes not granted.

    Every live writer's grant is renewed, even if its limit cannot be raised.
    """
    alive = {writer_id: account for writer_id, account in found.items() if account.alive}
    lacking = {
        writer_id: account.wants - account.outstanding
        for writer_id, account in alive.items()
        if account.wants > account.outstanding
    }
    in_vain = 0
    for left, (writer_id, lacks) in zip(
        range(len(lacking), 0, -1), sorted(lacking.items(), key=lambda item: item[1]), strict=True
    ):
        given = min(lacks, max(0, free) // left)
        free -= given
        in_vain += lacks - given
        lacking[writer_id] = given
    for writer_id, account in alive.items():
        limit = account.spent + account.outstanding + lacking.get(writer_id, 0)
        files.save(f"{GRANTS}/{writer_id}", msgspec.json.encode(CreditGrant(limit)))
    return in_vain


def _decode(raw: bytes, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (ValueError, RecursionError):
        return None  # damaged: treated as absent
