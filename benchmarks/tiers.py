# SPDX-License-Identifier: Apache-2.0
"""`make bench-tiers`: each tier compared with its raw limit, and its effect on time to first token.

- `<tier>.write`, `<tier>.read`: GB/s of shards of 2 MiB, all requested together, as the service
  does; reads are verified. `<tier>.contains`: names per second. See `rates`.
- Limits: for `disk` and `fs`, direct I/O of the same pieces (see `disks`), target 0.85; for `s3`
  and `redis`, their bare clients with as many requests in progress on the same server (see
  `plain_clients`), target 0.80.
- `ttft.*`: see `two_nodes`.

The S3 server is moto, a Python program with low throughput: there only the ratio is meaningful, not
the value. `TEST_S3_URL` selects another server (`scripts/with-ceph python -m benchmarks tiers`:
Ceph). A server that is not installed is skipped, with a line about its installation. All results
are in `build/bench-tiers.json`.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from benchmarks import two_nodes
from benchmarks.disks import measure_directory, measure_disk
from benchmarks.plain_clients import PlainRedis, PlainS3
from benchmarks.rates import Memory, measure_rates, memory
from benchmarks.results import Result
from benchmarks.servers import s3_bucket
from kvhaven.tiers.redis.tier import redis_tier
from tests import servers
from tests.servers import Bucket

_PART = 0.80
_ALWAYS_ASK: dict[str, Any] = {"present_s": 0, "absent_s": 0}
"""Otherwise the tier would answer lookups from its own memory."""


def measure(say: Callable[[str], None]) -> list[Result]:
    """Measure all tiers whose servers are available."""
    results = []
    with memory() as held:
        for of_tier in (measure_disk, measure_directory, measure_s3, measure_redis):
            try:
                results += of_tier(held, say)
            except servers.MissingServerError as missing:
                say(f"skipped: {missing}")
    return results + two_nodes.measure(say)


def measure_s3(held: Memory, say: Callable[[str], None]) -> list[Result]:
    """Measure writes, reads and lookups of the S3 tier."""

    async def run(bucket: Bucket) -> list[Result]:
        tier = bucket.tier(deadline_s=120, **_ALWAYS_ASK)
        return await measure_rates(tier, PlainS3(bucket.name, bucket.url), held, _PART, say)

    with s3_bucket() as bucket:
        return asyncio.run(run(bucket))


def measure_redis(held: Memory, say: Callable[[str], None]) -> list[Result]:
    """Measure writes, reads and lookups of the Redis tier."""

    async def run(url: str) -> list[Result]:
        plain = PlainRedis(url)
        try:
            return await measure_rates(redis_tier(url), plain, held, _PART, say)
        finally:
            await plain.close()

    with servers.redis() as url:
        return asyncio.run(run(url))
