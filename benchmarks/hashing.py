# SPDX-License-Identifier: Apache-2.0
"""`hash.128k`: milliseconds to compute the keys of a request of 131,072 tokens.

The limit is the time that the scheduler may spend on it, 3 ms, as there is no limit of the machine
to compare with. `hash.128k.sha256` is the time of SHA-256 alone on as many bytes, in the same
chunks.
"""

import random
import statistics
import time
from array import array
from collections.abc import Callable
from hashlib import sha256

from benchmarks.results import Result, at_most, plain
from kvhaven.keys import Extras, KeyChain, namespace_digest

_TOKENS = 131_072
_CHUNK = 256
_LIMIT_MS = 3.0
_REPETITIONS = 30


def measure(say: Callable[[str], None]) -> list[Result]:
    """Hash random tokens repeatedly."""
    chance = random.Random(1)
    tokens = [chance.randrange(150_000) for _ in range(_TOKENS)]
    packed = array("I", tokens).tobytes()
    root = namespace_digest({"model": "benchmark"})
    chains, bare = [], []
    for _ in range(_REPETITIONS):
        began = time.perf_counter()
        KeyChain(root, _CHUNK, Extras()).extend(tokens)
        chains.append((time.perf_counter() - began) * 1e3)
        began = time.perf_counter()
        for at in range(0, len(packed), 4 * _CHUNK):
            sha256(root + packed[at : at + 4 * _CHUNK]).digest()
        bare.append((time.perf_counter() - began) * 1e3)
    value = statistics.median(chains)
    say(f"{value:.2f} ms, of which SHA-256 {statistics.median(bare):.2f} ms")
    return [
        at_most("hash.128k", value, "ms", _LIMIT_MS, _REPETITIONS, "set by the design"),
        plain("hash.128k.sha256", statistics.median(bare), "ms", _REPETITIONS),
    ]
