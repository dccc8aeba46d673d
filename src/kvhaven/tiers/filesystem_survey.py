# SPDX-License-Identifier: Apache-2.0
"""What is in a shared directory, how old it is, and what has to go. No I/O of its own."""

from collections import Counter
from collections.abc import Iterable

import msgspec

from kvhaven.tiers.shared_store import (
    Blob,
)
from kvhaven.types import align_up

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
    beat_s: float = 2.0
    lease_s: float = 30.0
    credit_s: float = 20.0
    survey_s: float = 300.0
    least_wanted_bytes: int = 64 << 20
    """A writer asks for credits for at least this much ahead."""

    @property
    def any(self) -> bool:
        """Whether there is anything to keep to."""
        return (self.quota_bytes, self.namespace_bytes, self.ttl_s) != (None, None, None)

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


class Survey:
    """Sums of what was found, per namespace's folder, with histograms of ages."""

    def __init__(self) -> None:
        self.used_bytes = 0
        self.by_folder: Counter[str] = Counter()
        self._steps: dict[str, Counter[int]] = {}

    def add(self, folder: str, page: Iterable[Blob]) -> None:
        """Count a page of files of a namespace's folder."""
        steps = self._steps.setdefault(folder, Counter())
        for blob in page:
            size = align_up(blob.size)
            self.used_bytes += size
            self.by_folder[folder] += size
            steps[_step(blob.used_at)] += size

    def doomed(self, limits: Limits, now: float, wanted_bytes: int) -> "Doomed":
        """Return what has to go for the limits, with room for `wanted_bytes` besides.

        Only when there is too much: then down to the limits' floor.
        """
        expired = _step(now - limits.ttl_s) if limits.ttl_s is not None else None
        cuts: dict[str, _Cut] = {}
        left: Counter[int] = Counter()
        for folder, steps in self._steps.items():
            own = Counter(
                {step: size for step, size in steps.items() if expired is None or step >= expired}
            )
            excess = 0
            if limits.namespace_bytes is not None:
                excess = own.total() - limits.namespace_bytes
            cuts[folder] = _Cut(own, excess, expired)
            left.update(cuts[folder].left)
        excess = 0
        if left.total() + wanted_bytes > limits.ceiling_bytes:
            excess = left.total() + wanted_bytes - limits.floor_bytes
        return Doomed(cuts, _Cut(left, excess, None))


class Doomed:
    """Tells which files of a survey have to go, each once."""

    def __init__(self, cuts: dict[str, "_Cut"], common: "_Cut") -> None:
        self._cuts = cuts
        self._common = common

    def take(self, blob: Blob) -> bool:
        """Return whether a file has to go; count it if so."""
        own = self._cuts.get(blob.name.partition("/")[0])
        if own is None:  # a namespace that was not there when all was counted
            return False
        return own.take(blob) or self._common.take(blob)


class _Cut:
    """The age from which on files go: `excess` bytes of the oldest, and all before `expired`."""

    def __init__(self, steps: Counter[int], excess: int, expired: int | None) -> None:
        self.left = Counter(steps)
        self._before = expired
        self._rest = 0
        for step in sorted(steps):
            if excess <= 0:
                break
            self._before, self._rest = step, min(excess, steps[step])
            excess -= self._rest
            self.left[step] -= self._rest

    def take(self, blob: Blob) -> bool:
        if self._before is None:
            return False
        step = _step(blob.used_at)
        if step == self._before and self._rest > 0:
            self._rest -= align_up(blob.size)
            return True
        return step < self._before


def _step(used_at: float | None) -> int:
    if used_at is None:
        raise ValueError("what does not tell its age has none to go by")
    return int(used_at // _STEP_S)
