# SPDX-License-Identifier: Apache-2.0
"""Usage of a shared directory by folder and age, and the choice of files to delete. No I/O."""

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from kvhaven.tenants import Quotas
from kvhaven.tiers.shared.store import Blob, tenant_of
from kvhaven.types import TenantId, align_up

_STEP_S = 10.0
"""Ages are counted in steps of this many seconds; files within a step have no order."""


_UNBOUNDED = 1 << 60


class Limits(msgspec.Struct, frozen=True):
    """Limits that the owner of a shared directory enforces. Must be equal in all its services.

    A lease that was not renewed for `lease_s` seconds expires; a grant of credits is valid for
    `credit_s` seconds.
    """

    quota_bytes: int | None = None
    """Limit of all files in bytes, in blocks of 4096, except the few small files of KVHaven."""
    namespace_bytes: int | None = None
    """Limit of each namespace (a model, with all that must match) in bytes."""
    ttl_s: float | None = None
    """Files unused for this many seconds are deleted."""
    tenants: Quotas = Quotas()
    """Limit of each tenant, summed over all namespaces, in bytes."""
    beat_s: float = 2.0
    lease_s: float = 30.0
    credit_s: float = 20.0
    survey_s: float = 300.0
    least_wanted_bytes: int = 64 << 20
    """Smallest amount of credits that a writer requests, in bytes."""

    @property
    def any(self) -> bool:
        """Whether any limit is set."""
        limits = (self.quota_bytes, self.namespace_bytes, self.ttl_s)
        return limits != (None, None, None) or bool(self.tenants)

    @property
    def most_bytes(self) -> int:
        """The quota in bytes; without a quota, more than any store holds."""
        return _UNBOUNDED if self.quota_bytes is None else self.quota_bytes

    @property
    def ceiling_bytes(self) -> int:
        """Limit of used plus granted bytes: slightly below the quota."""
        return self.most_bytes - self.most_bytes // 32

    @property
    def floor_bytes(self) -> int:
        """Limit of the bytes that remain after an eviction."""
        return self.most_bytes - self.most_bytes // 5


class DirectoryUsage:
    """Bytes in a directory, by folder (of a namespace, or of a tenant in it) and by age."""

    def __init__(self) -> None:
        self.used_bytes = 0
        self.by_folder: Counter[str] = Counter()
        self._steps: dict[str, Counter[int]] = {}

    def add(self, folder: str, page: Iterable[Blob]) -> None:
        """Add a page of files of a folder."""
        steps = self._steps.setdefault(folder, Counter())
        for blob in page:
            size = align_up(blob.size)
            self.used_bytes += size
            self.by_folder[folder] += size
            steps[_step(blob.used_at)] += size

    def deletions(self, limits: Limits, now: float, wanted_bytes: int) -> "Deletions":
        """Choose the files to delete so that the limits hold and `wanted_bytes` more fit.

        The order is: expired files, then tenants beyond their quota, then namespaces beyond their
        limit. If the total still exceeds the ceiling, the oldest files are deleted down to the
        floor.
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
    """Files of a survey that are to be deleted, each once; their sizes add up to `bytes`."""

    def __init__(self, cuts: dict[str, "_Cut"], bytes_: int) -> None:
        self._cuts = cuts
        self.bytes = bytes_

    def take(self, blob: Blob) -> bool:
        """Return whether a file is to be deleted; if so, count it."""
        cut = self._cuts.get(blob.name.partition("/")[0])
        # A folder without a cut was created after the survey.
        return cut is not None and cut.take(blob)


class _Cut:
    """Cut-off age of a folder: delete all files older than a step, and some bytes of that step."""

    def __init__(self, steps: Counter[int]) -> None:
        self.left = Counter(steps)
        self._before: int | None = None
        self._rest = 0

    def expire(self, before: int) -> None:
        """Mark all files older than a step for deletion."""
        self._before = before
        self.left = Counter({step: size for step, size in self.left.items() if step >= before})

    def add(self, step: int, size: int) -> None:
        """Mark `size` more bytes of a step; all older steps must be marked already."""
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
    """Mark the oldest files of these folders until at most `most_bytes` remain."""
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
        raise ValueError("the store does not report when data was used: limits cannot be enforced")
    return int(used_at // _STEP_S)
