# SPDX-License-Identifier: Apache-2.0
"""`make bench-tiers`: every tier against its raw limit, and what it is worth to a user.

- `<tier>.write`, `<tier>.read`: GB/s of shards of 2 MiB, all asked for at once, as the service
  does; what is read is verified. `<tier>.contains`: names per second. See `rates`.
- Limits: for `disk` and `fs` direct I/O of the same pieces (see `disks`), 0.85 of it wanted;
  for `s3` and `redis` their bare clients with as many requests under way on the same server
  (see `plain_clients`), 0.80 wanted.
- `ttft.*`: see `two_nodes`.

S3 is moto's server, a Python program with little throughput: there the ratio counts, not the
value. `TEST_S3_URL` names another (`scripts/with-ceph python -m benchmarks tiers`: Ceph). A
server that is not installed is skipped, and it is said how to get it. All results are in
`build/bench-tiers.json`.
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
"""Else the tier would answer look-ups from its own memory."""


def measure(say: Callable[[str], None]) -> list[Result]:
    """Measure all tiers whose servers there are."""
    results = []
    with memory() as held:
        for of_tier in (measure_disk, measure_directory, measure_s3, measure_redis):
            try:
                results += of_tier(held, say)
            except servers.MissingServerError as missing:
                say(f"skipped: {missing}")
    return results + two_nodes.measure(say)


def measure_s3(held: Memory, say: Callable[[str], None]) -> list[Result]:
    """Write, read and look up in a bucket."""

    async def run(bucket: Bucket) -> list[Result]:
        tier = bucket.tier(deadline_s=120, **_ALWAYS_ASK)
        return await measure_rates(tier, PlainS3(bucket.name, bucket.url), held, _PART, say)

    with s3_bucket() as bucket:
        return asyncio.run(run(bucket))


def measure_redis(held: Memory, say: Callable[[str], None]) -> list[Result]:
    """Write, read and look up in a Redis."""

    async def run(url: str) -> list[Result]:
        plain = PlainRedis(url)
        try:
            return await measure_rates(redis_tier(url), plain, held, _PART, say)
        finally:
            await plain.close()

    with servers.redis() as url:
        return asyncio.run(run(url))
