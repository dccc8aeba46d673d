# SPDX-License-Identifier: Apache-2.0
"""Error of the reuse curve, for the workloads of `policies`, with chunks of 512 and 256 tokens.

`curve.error` is the mean difference between the estimated hit rate and that of an exact LRU cache,
in percentage points, over all workloads and sizes of memory; `curve.error.p95` the 95th percentile.
`curve.predicted` runs the real catalog with a memory, predicts the hit rate with twice of it, and
runs the catalog with that: the largest difference. Like the hit rates of `policies`, all are those
of the second half of the requests. `curve.sample` is the time on the service's loop to sample a
request of 512 chunks, and `curve.key` that of the API for a sampled chunk.
"""

import random
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from benchmarks.policies import _SEED, WORKLOADS, Chain, _hit_rate
from benchmarks.results import Result, at_most, plain
from kvhaven.gateway.reuse import SIZES, Curve, ReuseCurve
from kvhaven.service.reuse import PREFIX_BYTES, Sampled, sampled
from kvhaven.types import PAGE_BYTES, ChunkKey

_TOKENS = 512
_SET = "set by the design"
_LATER_S = 7200.0
"""Between the halves, so that the first one is not in the estimate's hour."""


def measure(say: Callable[[str], None]) -> list[Result]:
    """Compare estimates with exact hit rates, and a prediction with what then happens."""
    errors, predictions = [], []
    keys = spent = 0.0
    for name, (workload, sizes) in WORKLOADS.items():
        chains = workload(random.Random(_SEED))
        for parts in (1, 2):
            smaller = [_split(chain, parts) for chain in chains]
            for memory in sizes[:2]:
                chunks = memory * parts
                began = time.process_time()
                curve = estimated(smaller, chunks, _TOKENS // parts)
                spent += time.process_time() - began
                keys += sum(len(_sample(chain)) // PREFIX_BYTES for chain in smaller)
                found = [point.hit_ratio for point in curve.points]
                if None in found:
                    say(f"{name}: memory above what 50,000 sampled chunks cover is not estimated")
                pairs = [
                    (ratio, exact(smaller, int(size * chunks)))
                    for ratio, size in zip(found, SIZES, strict=True)
                    if ratio is not None
                ]
                differences = [100 * abs(ratio - real) for ratio, real in pairs]
                errors += differences
                say(
                    f"{name}, chunks of {_TOKENS // parts} tokens, {chunks} fit: error "
                    f"{statistics.mean(differences):.2f} points, at most {max(differences):.2f}"
                )
        curve = estimated(chains, sizes[0], _TOKENS)
        (twice,) = (point.hit_ratio for point in curve.points if point.memory == 2)
        assert twice is not None
        real = _hit_rate(chains, "lru", 2 * sizes[0])
        predictions.append(abs(100 * twice - real))
        say(f"{name}: twice the memory: predicted {100 * twice:.1f}%, then {real:.1f}%")
    blob = b"".join(ChunkKey(number.to_bytes(32)) for number in range(512))
    began = time.process_time()
    for _ in range(10_000):
        sampled(blob, 0)
    sampling = (time.process_time() - began) * 100
    p95 = statistics.quantiles(errors, n=20)[18]
    return [
        at_most("curve.error", statistics.mean(errors), "points", 1.5, len(errors), _SET),
        at_most("curve.error.p95", p95, "points", 3.0, len(errors), _SET),
        at_most(
            "curve.predicted",
            max(predictions),
            "points",
            2.0,
            len(predictions),
            _SET,
        ),
        plain("curve.sample", sampling, "us", 10_000),
        plain("curve.key", 1e6 * spent / keys, "us", int(keys)),
    ]


def estimated(chains: Sequence[Chain], chunks: int, tokens: int) -> Curve:
    """Return the estimate for the second half of the requests, with memory for so many chunks."""
    curve = ReuseCurve()
    for number, chain in enumerate(chains):
        prefixes = _sample(chain)
        request = Sampled(
            prompt=len(chain) * tokens,
            computed=0,
            memory=0,
            first=0,
            chunks=len(chain),
            chunk_tokens=tokens,
            chunk_bytes=PAGE_BYTES,
            prefixes=tuple(
                prefixes[at : at + PREFIX_BYTES] for at in range(0, len(prefixes), PREFIX_BYTES)
            ),
        )
        now = _LATER_S if number >= len(chains) // 2 else 0.0
        curve.note(chunks * PAGE_BYTES, [request], now)
    return curve.curve(_LATER_S)


def exact(chains: Sequence[Chain], chunks: int) -> float:
    """Return the hit rate of an LRU cache of so many chunks, in the second half."""
    cache = OrderedDict[ChunkKey, None]()
    hits = looked_up = 0
    for number, chain in enumerate(chains):
        hit = next((at for at, key in enumerate(chain) if key not in cache), len(chain))
        for key in reversed(chain):
            cache.pop(key, None)
            cache[key] = None
        while len(cache) > chunks:
            cache.popitem(last=False)
        if number >= len(chains) // 2:
            hits, looked_up = hits + hit, looked_up + len(chain)
    return hits / looked_up


def _sample(chain: Chain) -> bytes:
    return sampled(b"".join(key[::-1] for key in chain), 0)  # these keys differ in their last bytes


def _split(chain: Chain, parts: int) -> Chain:
    """Return a chain of smaller chunks of the same prompt."""
    if parts == 1:
        return chain
    return [
        ChunkKey((parts * int.from_bytes(key) + part).to_bytes(32))
        for key in chain
        for part in range(parts)
    ]
