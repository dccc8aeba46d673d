# SPDX-License-Identifier: Apache-2.0
"""What is in a shared directory, how old it is, and what has to go. No I/O of its own."""

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from kvhaven.tenants import Quotas
from kvhaven.tiers.shared.store import Blob, tenant_of
from kvhaven.types import TenantId, align_up

_STEP_S = 10.0
"""Ages are counted in steps of this many seconds; within a step any file may go first."""


_UNBOUNDED = 1 << 60


class Limits(msgspec.Struct, frozen=True):
    """What the owner of a shared directory keeps to. The same in every service that uses it.

    A lease that is not renewed for `lease_s` is anybody's; credits are good for `credit_s`.
    """

    quota_bytes: int | None = None
    """All files together, blocks of 4096 bytes, the few small ones of KVHaven itself aside."""
    namespace_bytes: int | None = None
    """Each namespace (a model, with all that must match) at most this much."""
    ttl_s: float | None = None
    """What nobody used for so long goes."""
    tenants: Quotas = Quotas()
    """Each tenant, in all namespaces together, at most this much."""
    beat_s: float = 2.0
    lease_s: float = 30.0
    credit_s: float = 20.0
    survey_s: float = 300.0
    least_wanted_bytes: int = 64 << 20
    """A writer asks for credits for at least this much ahead."""

    @property
    def any(self) -> bool:
        """Whether there is anything to keep to."""
        limits = (self.quota_bytes, self.namespace_bytes, self.ttl_s)
        return limits != (None, None, None) or bool(self.tenants)

    @property
    def most_bytes(self) -> int:
        """The quota; without one, more than any store holds."""
        return _UNBOUNDED if self.quota_bytes is None else self.quota_bytes

    @property
    def ceiling_bytes(self) -> int:
        """What is in use and what is granted, together at most: a little below the quota."""
        return self.most_bytes - self.most_bytes // 32

    @property
    def floor_bytes(self) -> int:
        """What is left after an eviction, at most."""
        return self.most_bytes - self.most_bytes // 5


class DirectoryUsage:
    """Sums of what was found, by folder of a namespace or of a tenant in it, and by age."""

    def __init__(self) -> None:
        self.used_bytes = 0
        self.by_folder: Counter[str] = Counter()
        self._steps: dict[str, Counter[int]] = {}

    def add(self, folder: str, page: Iterable[Blob]) -> None:
        """Count a page of files of a folder."""
        steps = self._steps.setdefault(folder, Counter())
        for blob in page:
            size = align_up(blob.size)
            self.used_bytes += size
            self.by_folder[folder] += size
            steps[_step(blob.used_at)] += size

    def doomed(self, limits: Limits, now: float, wanted_bytes: int) -> "Deletions":
        """Return what has to go for the limits, with room for `wanted_bytes` besides.

        First what is too old, then what tenants have too much, then namespaces. What is too much
        altogether comes last, and goes down to the limits' floor.
        """
        cuts = {folder: _Cut(steps) for folder, steps in self._steps.items()}
        if limits.ttl_s is not None:
            for cut in cuts.values():
                cut.expire(_step(now - limits.ttl_s))
        tenants: dict[TenantId, list[_Cut]] = {}
        namespaces: dict[str, list[_Cut]] = {}
        for folder, cut in cuts.items():
            tenants.setdefault(tenant_of(folder), []).append(cut)
            namespaces.setdefault(folder.partition(".")[0], []).append(cut)
        for tenant, own in tenants.items():
            _keep(own, limits.tenants.of(tenant))
        for own in namespaces.values():
            _keep(own, limits.namespace_bytes)
        everything = list(cuts.values())
        if _left(everything) + wanted_bytes > limits.ceiling_bytes:
            _keep(everything, max(0, limits.floor_bytes - wanted_bytes))
        return Deletions(cuts, self.used_bytes - _left(everything))


class Deletions:
    """Tells which files of a survey have to go, each once; they have `bytes` together."""

    def __init__(self, cuts: dict[str, "_Cut"], bytes_: int) -> None:
        self._cuts = cuts
        self.bytes = bytes_

    def take(self, blob: Blob) -> bool:
        """Return whether a file has to go; count it if so."""
        cut = self._cuts.get(blob.name.partition("/")[0])
        # A folder without one was not there when all was counted.
        return cut is not None and cut.take(blob)


class _Cut:
    """The age from which on a folder's files go: all older than a step, and some bytes of it."""

    def __init__(self, steps: Counter[int]) -> None:
        self.left = Counter(steps)
        self._before: int | None = None
        self._rest = 0

    def expire(self, before: int) -> None:
        """Have everything go that is older than a step."""
        self._before = before
        self.left = Counter({step: size for step, size in self.left.items() if step >= before})

    def add(self, step: int, size: int) -> None:
        """Have more go: nothing older than this step is left, and now less of it is."""
        if step != self._before:
            self._before, self._rest = step, 0
        self._rest += size
        self.left[step] -= size

    def take(self, blob: Blob) -> bool:
        if self._before is None:
            return False
        step = _step(blob.used_at)
        if step == self._before and self._rest > 0:
            self._rest -= align_up(blob.size)
            return True
        return step < self._before


def _keep(cuts: Sequence[_Cut], most_bytes: int | None) -> None:
    """Have the oldest of all these folders' files go, until they keep so many bytes."""
    if most_bytes is None:
        return
    excess = _left(cuts) - most_bytes
    for step in sorted({step for cut in cuts for step in cut.left}) if excess > 0 else ():
        for cut in cuts:
            size = min(excess, cut.left[step])
            if size > 0:
                cut.add(step, size)
                excess -= size


def _left(cuts: Iterable[_Cut]) -> int:
    return sum(cut.left.total() for cut in cuts)


def _step(used_at: float | None) -> int:
    if used_at is None:
        raise ValueError("what does not tell its age has none to go by")
    return int(used_at // _STEP_S)
