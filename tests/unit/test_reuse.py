# SPDX-License-Identifier: Apache-2.0
"""The sample of requests, and the reuse curve that is estimated from it."""

import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhaven.client.control import connect
from kvhaven.client.scheduler import Asking
from kvhaven.protocol import KeyList
from kvhaven.service.accounts import Question
from kvhaven.service.reuse import PREFIX_BYTES, ReuseLog, Sampled, decoded, sampled, weights
from kvhaven.types import KEY_BYTES, TenantId
from tests.crash.engine import CHUNK_SIZE, Engine, prompt
from tests.crash.node import NodeThread, eventually

pytest.importorskip("aiohttp", reason="kvhaven[api] is not installed")

from kvhaven.gateway.reuse import SIZES, ReuseCurve
from tests.gateway_kit import GatewayThread
from tests.metrics_kit import samples_of

SIZE = 16
"""Tokens of a chunk."""
BYTES = 4096
"""Of a chunk."""
Chain = list[int]


def keys_of(chain: Sequence[int]) -> bytes:
    return b"".join(number.to_bytes(KEY_BYTES, "little") for number in chain)


def request_of(chain: Chain, memory: int = 0, computed: int = 0) -> Sampled:
    """Return the sampled request of a chain, of which the engine has `computed` tokens."""
    first = computed // SIZE
    prefixes = sampled(keys_of(chain[first:]), first)
    parts = tuple(prefixes[at : at + PREFIX_BYTES] for at in range(0, len(prefixes), PREFIX_BYTES))
    count = len(chain) - first
    return Sampled(len(chain) * SIZE, computed, memory, first, count, SIZE, BYTES, parts)


def ratio(curve: ReuseCurve, size: float = 1.0, now: float = 0.0) -> float | None:
    return next(point.hit_ratio for point in curve.curve(now).points if point.memory == size)


# --- the sample -----------------------------------------------------------------------------


@given(st.integers(0, 200), st.integers(0, 600))
def test_each_chunk_is_represented_once(first: int, chunks: int) -> None:
    positions = sampled(keys_of(range(first, first + chunks)), first)
    found = weights(first, chunks)
    assert len(positions) == PREFIX_BYTES * len(found)
    assert sum(found) == (chunks if found else 0)
    assert not found or min(found) > 0
    assert chunks < 16 or found


@given(st.integers(0, 200), st.integers(0, 300), st.integers(0, 300))
def test_a_chunk_is_sampled_by_its_position_in_the_prompt_alone(
    first: int, more: int, length: int
) -> None:
    def positions(begin: int, end: int) -> set[int]:
        raw = sampled(keys_of(range(begin, end)), begin)
        return {int.from_bytes(raw[at : at + 8], "little") for at in range(0, len(raw), 8)}

    part = positions(first + more, first + more + length)
    whole = positions(0, first + more + length)
    assert part == {position for position in whole if position >= first + more}
    assert set(range(min(16, first + more + length))) <= whole


def question_of(chain: Chain, computed: int = 0) -> Question:
    described = SimpleNamespace(table=SimpleNamespace(extent_bytes=BYTES))
    session = SimpleNamespace(digest=b"n", described=described)
    engine: Any = SimpleNamespace(chunk_tokens=SIZE, session=session)
    keys = KeyList(keys_of(chain[computed // SIZE :]))
    tokens = len(chain) * SIZE
    return Question(engine, keys, tokens, computed, TenantId(b""), "request", 0.0)


def test_each_observer_gets_each_request_once() -> None:
    log = ReuseLog()
    log.note(question_of([1]), 0, 0.0)
    assert log.since(0, 0.0) == (0, b""), "no observer wanted it"
    chains = [list(range(100, 100 + length)) for length in (3, 30, 1, 100)]
    for chain in chains[:2]:
        log.note(question_of(chain, 5), SIZE, 1.0)
    slow, fast = 0, 0
    fast, early = log.since(fast, 1.0)
    for chain in chains[2:]:
        log.note(question_of(chain, 5), SIZE, 1.0)
    fast, late = log.since(fast, 1.0)
    slow, everything = log.since(slow, 1.0)
    assert (fast, slow, early + late) == (4, 4, everything)
    assert list(decoded(everything)) == [request_of(chain, SIZE, 5) for chain in chains]
    assert log.since(slow, 1.0) == (4, b"")
    assert log.since(99, 1.0) == (4, b""), "the number of a service before this one"
    log.note(question_of([1]), 0, 100.0)
    assert log.since(slow, 100.0) == (4, b""), "the observers had gone"


def test_the_sample_is_bounded_and_the_oldest_requests_are_dropped() -> None:
    log = ReuseLog()
    log.since(0, 0.0)
    for number in range(3000):
        log.note(question_of(list(range(number, number + 200))), 0, 0.0)
    following, sample = log.since(0, 0.0)
    assert following == 3000
    assert len(sample) <= 256 << 10
    *_, last = decoded(sample)
    assert last == request_of(list(range(2999, 3199)))


def test_a_request_with_numbers_that_no_engine_has_is_left_out() -> None:
    log = ReuseLog()
    log.since(0, 0.0)
    odd = question_of([1, 2])
    odd.engine.chunk_tokens = 1 << 32
    for question in (question_of([3]), odd, question_of([4])):
        log.note(question, 0, 0.0)
    number, sample = log.since(0, 0.0)
    assert number == 2
    assert list(decoded(sample)) == [request_of([3]), request_of([4])]


def test_a_malformed_sample_is_refused() -> None:
    log = ReuseLog()
    log.since(0, 0.0)
    log.note(question_of(list(range(20))), 0, 0.0)
    _, sample = log.since(0, 0.0)
    for length in range(1, len(sample)):
        with pytest.raises(ValueError, match="ends within"):
            list(decoded(sample[:length]))
    with pytest.raises(ValueError, match="chunks"):
        list(decoded(sample[:16] + b"\xff" * (len(sample) - 16)))


# --- the curve ------------------------------------------------------------------------------


def workload(rng: random.Random, length: int) -> Iterator[Chain]:
    """Yield chains that share heads, and that come again after a while."""
    known: list[Chain] = []
    for number in range(1500):
        if known and rng.random() < 0.6:
            chain = rng.choice(known[-120:])
            if rng.random() < 0.5:
                chain = [*chain, *(number * 1000 + at for at in range(rng.randint(1, length // 2)))]
        else:
            head = rng.randint(0, 7)
            shared = [-1 - head * 100 - at for at in range(head)]
            chain = [*shared, *(number * 1000 + at for at in range(rng.randint(1, length)))]
            chain = [key % (1 << 40) for key in chain]
        known.append(chain)
        yield chain


def lru_hits(chains: Sequence[Chain], chunks: int) -> float:
    """Return the hit rate of an exact cache."""
    cache = OrderedDict[int, None]()
    hits = 0
    for chain in chains:
        hits += next((at for at, key in enumerate(chain) if key not in cache), len(chain))
        for key in reversed(chain):
            cache.pop(key, None)
            cache[key] = None
        while len(cache) > chunks:
            cache.popitem(last=False)
    return hits / sum(map(len, chains))


@pytest.mark.parametrize(("length", "error"), [(8, 0.01), (120, 0.015)])
def test_the_estimate_is_that_of_an_exact_cache(length: int, error: float) -> None:
    chains = list(workload(random.Random(7), length))
    capacity = 20 * length
    curve = ReuseCurve()
    curve.note(capacity * BYTES, [request_of(chain) for chain in chains], 0.0)
    found = curve.curve(0.0)
    for point in found.points:
        assert point.hit_ratio is not None
        exact = lru_hits(chains, int(point.memory * capacity))
        assert point.hit_ratio == pytest.approx(exact, abs=error), point
    ratios = [point.hit_ratio for point in found.points]
    assert ratios == sorted(ratios, key=lambda one: one or 0)
    everything = found.ceilings["all"]
    assert everything == pytest.approx(lru_hits(chains, 1 << 40), abs=error)
    assert ratios[-1] - ratios[0] > 0.2, "the workload tells sizes apart"  # type: ignore[operator]


def test_tokens_in_the_engine_count_and_what_was_found_gives_the_error() -> None:
    curve = ReuseCurve()
    chain = list(range(10))
    curve.note(100 * BYTES, [request_of(chain)], 0.0)
    assert ratio(curve) == 0
    curve.note(100 * BYTES, [request_of(chain, memory=60, computed=50)], 0.0)
    assert ratio(curve) == pytest.approx(160 / 320)
    found = curve.curve(0.0)
    assert found.requests == 2
    assert found.measured_ratio == pytest.approx(110 / 320)
    assert found.error_ratio == pytest.approx(50 / 320)


def test_chunks_behind_a_missing_one_are_not_found() -> None:
    chain, other = list(range(10)), list(range(100, 115))
    curve = ReuseCurve()
    # The head is in the engine, and its chunks were never seen.
    curve.note(20 * BYTES, [request_of(chain, computed=5 * SIZE)], 0.0)
    curve.note(20 * BYTES, [request_of(chain)], 0.0)
    assert ratio(curve, 8.0) == pytest.approx(5 / 20)
    # Now it is older than the tail, and evicted before it.
    requests = [request_of(other), request_of(chain, computed=5 * SIZE), request_of(chain)]
    curve = ReuseCurve()
    curve.note(20 * BYTES, [request_of(chain), *requests], 0.0)
    tokens = 10 + 15 + 10 + 10
    tail = 10  # 5 in the engine, 5 from memory
    assert ratio(curve) == pytest.approx(5 / tokens)
    assert ratio(curve, 1.5) == pytest.approx((tail + 10) / tokens)


def test_only_the_last_hour_counts_and_ceilings_forget() -> None:
    curve = ReuseCurve()
    chain = list(range(10))
    curve.note(100 * BYTES, [request_of(chain)], 0.0)
    curve.note(100 * BYTES, [request_of(chain)], 4000.0)
    found = curve.curve(4000.0)
    assert found.requests == 1
    assert found.ceilings == {"15m": 0.0, "1h": 0.0, "1d": 1.0, "all": 1.0}
    curve.note(100 * BYTES, [request_of(chain)], 4600.0)
    assert curve.curve(4600.0).ceilings["15m"] == pytest.approx(0.5)


def test_it_is_bounded_and_says_what_it_cannot_know() -> None:
    curve = ReuseCurve(most_keys=100)
    for number in range(50):
        curve.note(50 * BYTES, [request_of([number * 10 + at for at in range(10)])], 0.0)
    assert len(curve._chunks) == 100
    assert sum(map(len, curve._divisions)) == 100
    assert sum(curve._bytes) == 100 * BYTES
    known = {point.memory for point in curve.curve(0.0).points if point.hit_ratio is not None}
    assert known == {size for size in SIZES if size <= 2}


def test_another_memory_divides_the_chunks_again() -> None:
    curve = ReuseCurve()
    chains = [[number * 10 + at for at in range(10)] for number in range(10)]
    curve.note(20 * BYTES, map(request_of, chains), 0.0)
    curve.note(100 * BYTES, map(request_of, chains), 0.0)
    assert ratio(curve) == pytest.approx(0.5)
    other = ReuseCurve()
    other.note(100 * BYTES, map(request_of, chains), 0.0)
    other.note(20 * BYTES, map(request_of, chains), 0.0)
    assert ratio(other) == 0
    assert ratio(other, 8.0) == pytest.approx(0.5)


# --- a real service -------------------------------------------------------------------------


def test_a_service_and_its_api_estimate_what_was_found(short_dir: Path) -> None:
    with (
        NodeThread(short_dir / "s.sock", remote_url=None, local_disk=None) as node,
        Engine(node.address) as engine,
        GatewayThread(node.address) as api,
    ):
        eventually(lambda: api.health() == (200, "ok"))
        assert api.get("/stats").json["reuse"] is None
        assert api.get("/v1/curve").json["requests"] == 0
        for number in range(20):
            keys = prompt(number % 5, 12)
            found = engine.scheduler.acquire(
                keys, about=Asking(CHUNK_SIZE * len(keys), 0, f"r{number}")
            )
            if found is None:
                engine.save(keys)
                with connect(node.address) as control:
                    eventually(lambda c=control, k=keys: engine.load(k) == len(k))  # type: ignore[misc]
            else:
                engine.scheduler.client.release([found.lease_id])
        node.check()

        def counted() -> dict[str, Any] | None:
            curve: dict[str, Any] = api.get("/v1/curve").json
            return curve if curve["requests"] == 25 else None

        curve = eventually(counted)
        (present,) = [point for point in curve["points"] if point["memory"] == 1]
        assert present["bytes"] == curve["capacity_bytes"] == 16 << 20
        assert present["hit_ratio"] == pytest.approx(0.8)
        assert curve["measured_ratio"] == pytest.approx(0.8)
        assert curve["error_ratio"] == pytest.approx(0, abs=1e-9)
        assert api.get("/stats").json["reuse"]["requests"] == 25
        scraped = samples_of(api.get("/metrics").body.decode())
        shown = scraped["kvhaven_reuse_hit_ratio"]
        assert shown[frozenset({("memory", "1x")})] == pytest.approx(0.8)
        assert set(scraped["kvhaven_reuse_error_ratio"].values()) == {curve["error_ratio"]}
        windows = {dict(labels)["window"] for labels in scraped["kvhaven_reuse_ceiling_ratio"]}
        assert windows == {"15m", "1h", "1d", "all"}


def test_the_points_have_the_sizes_of_the_design() -> None:
    points = ReuseCurve().curve(0.0).points
    assert (points[0].memory, points[-1].memory) == (0.25, 8.0)
    assert [point.hit_ratio for point in points] == [None] * len(SIZES)
