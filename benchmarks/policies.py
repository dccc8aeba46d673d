# SPDX-License-Identifier: Apache-2.0
"""`policies.*`: hit rate of each eviction policy, in chunks looked up, and its cost.

Hit rates are counted, not timed: a seeded workload goes through the real catalog (prefetch,
acquire, release, reserve the missing chunks, commit), parents before children, in chunks of 512
tokens. The second half of the requests counts. The three workloads are generated; no trace is read:

- `chat` has the shape of the open conversation trace of Mooncake (FAST'25; 12,031 requests in one
  hour): one first chunk that all requests share; prompts with a median of 6,900 and a mean of
  12,000 tokens (log-normal); conversations in which each turn has the whole chain so far and a few
  more chunks. The probability and the delay of further turns were chosen so that the hit rates of
  LRU are about those published for that trace (https://pypi.org/project/llmtrafficlens/): 5.6, 18.8
  and 35.6% with 2,048, 8,192 and 32,768 chunks, at most 39.8%.
- `agents` has the shape of the trace of the paper's first version (arXiv 2407.00079, table 1;
  23,608 requests, mean of 7,590 tokens), for which LRU hits 30, 40 and 48% with 1,000, 10,000 and
  30,000 chunks, at most 51%, and LFU 30, 35 and 43%. More than half of its chunks were never used
  again, and some tens of thousands of times. Therefore: 60 system prompts, used in proportion to
  rank**-1.2, with a tail for each request; one request in four continues, late. The workload is
  better for LFU than the trace.
- `scan` is `agents` while a client sends cold documents, each once: between the first and the last
  eighth, every third request consists of 60 chunks that never occur again.

The cost is that of the policy alone, with 100,000 chunks: a chain of 512 is touched, and 512
chunks are evicted and replaced.
"""

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import count

from benchmarks.results import Result, plain
from kvhaven.arena.allocator import SlabAllocator
from kvhaven.catalog import Catalog
from kvhaven.catalog.actions import LeaseId, MemberId
from kvhaven.catalog.policies import POLICIES
from kvhaven.catalog.sessions import RankDescription
from kvhaven.tiers.base import Namespace
from kvhaven.types import (
    PAGE_BYTES,
    Checksum,
    ChunkKey,
    NamespaceDigest,
    Shard,
    ShardId,
    ShardTable,
)

Chain = list[ChunkKey]

_SEED = 20250225
_REQUESTS = 12_000
_CHUNK_TOKENS = 512
_MOST_CHUNKS = 250

_KNOWN = 100_000
_CHAIN = 512
_ROUNDS = 40


def measure(say: Callable[[str], None]) -> list[Result]:
    """Run every workload at every size with every policy; then time the policies."""
    results = []
    gc.disable()  # as in the service
    try:
        for name, (workload, sizes) in WORKLOADS.items():
            chains = workload(random.Random(_SEED))
            say(f"{name}: {_described(chains)}")
            say(f"{'hit rate, %':>12}" + "".join(f"{size:8}" for size in sizes) + "    mean")
            for policy in POLICIES:
                rates = [_hit_rate(chains, policy, size) for size in sizes]
                mean = statistics.mean(rates)
                say(f"{policy:>12}" + "".join(f"{rate:8.1f}" for rate in (*rates, mean)))
                results.append(plain(f"policies.{name}.{policy}", mean, "%", len(sizes)))
        results += _costs(say)
    finally:
        gc.enable()
    return results


def chat(rng: random.Random) -> list[Chain]:
    """Return the chains of conversations with several turns."""
    fresh = _fresh()
    shared = [next(fresh)]

    def begin() -> Chain:
        return shared + _new(fresh, _length(rng, 12, 1.1) - 1)

    return _played(rng, begin, lambda: _new(fresh, _length(rng, 2, 0.8)), again=0.37, pause=600)


def agents(rng: random.Random) -> list[Chain]:
    """Return the chains of agents with long system prompts."""
    fresh = _fresh()
    prompts = [_new(fresh, _length(rng, 5, 0.5)) for _ in range(60)]
    weights = [rank**-1.2 for rank in range(1, len(prompts) + 1)]

    def begin() -> Chain:
        return rng.choices(prompts, weights)[0] + _new(fresh, _length(rng, 5, 1.1))

    return _played(rng, begin, lambda: _new(fresh, _length(rng, 2, 0.8)), again=0.25, pause=2500)


def scan(rng: random.Random) -> list[Chain]:
    """Return the chains of agents, interleaved with documents that are read once."""
    chains, fresh = agents(rng), _fresh(1 << 40)
    eighth = len(chains) // 8
    for at in range(eighth, len(chains) - eighth, 3):
        chains[at] = _new(fresh, 60)
    return chains


WORKLOADS = {
    "chat": (chat, (2048, 8192, 32_768)),
    "agents": (agents, (1000, 10_000, 30_000)),
    "scan": (scan, (1000, 10_000, 30_000)),
}
"""Workloads, and sizes of the arena in chunks for which hit rates were published."""


def _fresh(first: int = 0) -> Iterator[ChunkKey]:
    return (ChunkKey(number.to_bytes(32)) for number in count(first))


def _new(fresh: Iterator[ChunkKey], length: int) -> Chain:
    return [next(fresh) for _ in range(length)]


def _length(rng: random.Random, median: float, sigma: float) -> int:
    """Return a log-normal number of chunks."""
    return max(1, round(median * rng.lognormvariate(0, sigma)))


def _played(
    rng: random.Random,
    begin: Callable[[], Chain],
    more: Callable[[], Chain],
    *,
    again: float,
    pause: float,
) -> list[Chain]:
    """Return requests in the order of arrival; time is counted in requests.

    With probability `again`, a request continues with another one after a log-normal time whose
    median is `pause`.
    """
    due: dict[int, list[Chain]] = {}
    chains: list[Chain] = []
    while len(chains) < _REQUESTS:
        waiting = due.pop(len(chains), [])
        chain = waiting.pop() if waiting else begin()
        if waiting:
            due.setdefault(len(chains) + 1, []).extend(waiting)
        chain = chain[:_MOST_CHUNKS]
        if rng.random() < again and len(chain) < _MOST_CHUNKS:
            at = len(chains) + 1 + int(pause * rng.lognormvariate(0, 1.2))
            due.setdefault(at, []).append(chain + more())
        chains.append(chain)
    return chains


def _described(chains: list[Chain]) -> str:
    """Describe a workload by the statistics that are published for traces."""
    uses: dict[ChunkKey, int] = {}
    hits = looked_up = 0
    for number, chain in enumerate(chains):
        hit = sum(key in uses for key in chain)
        if number >= len(chains) // 2:
            hits, looked_up = hits + hit, looked_up + len(chain)
        for key in chain:
            uses[key] = uses.get(key, 0) + 1
    lengths = sorted(map(len, chains))
    never = sum(n == 1 for n in uses.values()) / len(uses)
    reuses = sorted((n - 1 for n in uses.values()), reverse=True)
    top = sum(reuses[: len(reuses) // 10]) / sum(reuses)
    return (
        f"{len(chains)} requests, tokens: median {lengths[len(lengths) // 2] * _CHUNK_TOKENS}, "
        f"mean {statistics.mean(lengths) * _CHUNK_TOKENS:.0f}; {len(uses)} chunks, {never:.0%} "
        f"never used again, a tenth has {top:.0%} of the reuses; highest possible hit rate "
        f"{hits / looked_up:.1%}"
    )


def _hit_rate(chains: list[Chain], policy: str, chunks: int) -> float:
    """Run a workload; return the percentage of hits in its second half."""
    table = ShardTable((Shard(ShardId(0, (0, 1), (0, 1)), PAGE_BYTES),))
    namespace = Namespace(NamespaceDigest(bytes(32)), {}, table)
    arena_bytes = chunks * PAGE_BYTES
    catalog = Catalog(SlabAllocator({0: arena_bytes}), POLICIES[policy]())
    rank, digest = MemberId("s/0"), namespace.digest
    session = catalog.attach_rank("s", rank, 0, RankDescription(1, digest, {}, table.shards)).id
    catalog.attach_scheduler("s", MemberId("s"), 1)
    catalog.ready(rank, 0, arena_bytes)
    checksum = [Checksum(bytes(16))]
    hits = looked_up = 0
    for number, chain in enumerate(chains):
        catalog.prefetch(digest, chain)
        hit = len(catalog.acquire(session, LeaseId(number), digest, chain).chunks)
        catalog.release(session, LeaseId(number))
        parent = chain[hit - 1] if hit else None
        for grant in catalog.reserve(rank, digest, parent, chain[hit:], number):
            if grant is not None:
                catalog.commit(rank, grant.key, grant.extent.generation, checksum)
        if number >= len(chains) // 2:
            hits, looked_up = hits + hit, looked_up + len(chain)
    catalog.check()
    return 100 * hits / looked_up


def _costs(say: Callable[[str], None]) -> list[Result]:
    """Time each policy alone, alternating between policies."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in POLICIES}
    for _ in range(3):
        for name, found in times.items():
            found.append(_timed(name))
    medians = {
        name: tuple(statistics.median(part) for part in zip(*found, strict=True))
        for name, found in times.items()
    }
    results = []
    for name, (touch, replace) in medians.items():
        say(f"{name:>12}: {touch:4.0f} ns to touch a chunk, {replace:5.0f} ns to replace one")
        base = medians["lru"]
        results += [
            Result(f"policies.touch.{name}", touch, "ns", base[0], 3, "LRU"),
            Result(f"policies.replace.{name}", replace, "ns", base[1], 3, "LRU"),
        ]
    return results


def _timed(name: str) -> tuple[float, float]:
    """Return the nanoseconds per chunk to touch it, and to evict it and add another."""
    policy, rng, fresh = POLICIES[name](), random.Random(_SEED), _fresh()
    known = _new(fresh, _KNOWN)
    for key in known:
        policy.added(key)
    touching = replacing = 0.0
    for _ in range(_ROUNDS):
        first = rng.randrange(_KNOWN - _CHAIN)
        used, new = known[first : first + _CHAIN], _new(fresh, _CHAIN)
        began = time.perf_counter()
        policy.touched(used)
        touched = time.perf_counter()
        gone = []
        for key in new:
            victim = next(policy.candidates())
            policy.evicted(victim)
            policy.added(key)
            gone.append(victim)
        replacing += time.perf_counter() - touched
        touching += touched - began
        lost = set(gone)
        known = [key for key in known if key not in lost] + new
    each = 1e9 / (_ROUNDS * _CHAIN)
    return touching * each, replacing * each
