# SPDX-License-Identifier: Apache-2.0
"""Directory tier whose reads are delayed to a given rate, for tests and benchmarks.

`install` makes it available to node services as the URL `throttled:///directory`.
"""

import asyncio
from pathlib import Path
from typing import Any

from kvhaven.tiers.base import StoredShard, Tier
from kvhaven.tiers.registry import TierOptions, open_tier
from kvhaven.types import Checksum

_RATE_FILE = "rate"


class ThrottledTier:
    """Tier that forwards all calls to `inner`; its reads end at `rate` bytes a second.

    The rate is the content of a file, read anew for each shard, so that it can be changed while a
    service runs; 0 or no file means no delay.
    """

    def __init__(self, inner: Tier, rate_file: Path) -> None:
        self.name = "throttled"
        self.shared = inner.shared
        self._inner = inner
        self._rate_file = rate_file
        self._free_at = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def read(self, shard: StoredShard, into: memoryview) -> Checksum:
        """Read from the inner tier, and wait until the bytes would have arrived."""
        loop = asyncio.get_running_loop()
        rate = self._rate()
        if not rate:
            return await self._inner.read(shard, into)
        self._free_at = max(self._free_at, loop.time()) + len(into) / rate
        ends = self._free_at
        checksum = await self._inner.read(shard, into)
        await asyncio.sleep(max(0.0, ends - loop.time()))
        return checksum

    def _rate(self) -> float:
        try:
            return float(self._rate_file.read_text() or 0)
        except OSError:
            return 0.0


def open_throttled(url: str, options: TierOptions) -> ThrottledTier:
    """Open `throttled:///directory`; the file of the rate is beside the directory."""
    path = Path(url.partition("://")[2])
    return ThrottledTier(open_tier(f"fs://{path}", options), _file_of(path))


def set_rate(directory: Path, bytes_per_second: float) -> None:
    """Set the rate of the tier at a directory; 0: no delay."""
    new = _file_of(directory).with_suffix(".new")
    new.write_text(str(bytes_per_second))
    new.replace(_file_of(directory))


def install(folder: Path) -> None:
    """Write the metadata of a package that provides the tier; `folder` goes into `PYTHONPATH`."""
    metadata = folder / "kvhaven_throttled-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: kvhaven-throttled\nVersion: 1\n"
    )
    (metadata / "entry_points.txt").write_text(
        f"[kvhaven.tiers]\nthrottled = {__name__}:open_throttled\n"
    )


def _file_of(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.{_RATE_FILE}")
