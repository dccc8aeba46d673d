# SPDX-License-Identifier: Apache-2.0
"""The equations of the accounts, for any lookup that a client can send and any answer."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhaven.catalog.ghosts import Reason
from kvhaven.catalog.misses import Gap
from kvhaven.errors import KVHavenError
from kvhaven.service.accounts import MOST_NAMESPACES, MOST_REQUESTS, OTHERS, Accounts, Question
from kvhaven.service.engines import AttachedEngine, Traffic
from kvhaven.types import ChunkKey, NamespaceDigest, TenantId

SIZE = 16
TIERS = ("disk", "s3")


def engine_of(number: int = 0) -> AttachedEngine:
    digest = NamespaceDigest(number.to_bytes(32, "little"))
    session = SimpleNamespace(id="e#1", digest=digest)
    engine = SimpleNamespace(session=session, chunk_tokens=SIZE, traffic=Traffic())
    return cast(AttachedEngine, engine)


def count(accounts: Accounts, found: bytes, gap: Gap | None, **asked: Any) -> None:
    keys = [ChunkKey(bytes(32))] * asked.pop("chunks")
    question = Question(
        asked.pop("engine", engine_of()), keys, asked["prompt"], asked["computed"], TenantId(b""),
        "name", 1.0,
    )  # fmt: skip
    accounts.answered(question, found, gap, 1.5)


lookups = st.tuples(
    st.integers(1, 20 * SIZE),  # tokens of the prompt
    st.integers(0, 20 * SIZE),  # of these, computed
    st.integers(0, 25),  # chunks asked for: a client may ask for too many or too few
    st.binary(max_size=26).map(lambda raw: bytes(byte % 3 for byte in raw)),
    st.none() | st.builds(Gap, st.sampled_from(Reason), st.integers(0, 30)),
)


@given(st.lists(lookups, max_size=20))
def test_sources_sum_to_the_tokens_asked_for_and_reasons_to_those_found_nowhere(
    many: list[tuple[int, int, int, bytes, Gap | None]],
) -> None:
    accounts = Accounts(TIERS)
    for prompt, computed, chunks, found, gap in many:
        count(accounts, found[: chunks + 1], gap, prompt=prompt, computed=computed, chunks=chunks)
    rows = list(accounts.requests_before("", 0.0))
    assert len(rows) == len(many)
    for row in rows:
        assert sum(row.by_source.values()) == row.prompt_tokens
        assert sum(row.missed.values()) == row.by_source.get("none", 0)
        assert min((*row.by_source.values(), *row.missed.values()), default=1) > 0
    accounts.check()
    for counts in accounts.tokens().values():
        assert counts.asked == sum(prompt for prompt, *_ in many)
        assert sum(counts.lookups.values()) == len(many)


def test_each_chunk_counts_where_it_was() -> None:
    accounts = Accounts(TIERS)
    # 5 chunks and 4 tokens; the engine has one chunk and 6 tokens of the next.
    asked = {"prompt": 5 * SIZE + 4, "computed": SIZE + 6, "chunks": 4}
    count(accounts, bytes([0, 1, 2]), Gap(Reason.EVICTED, 1), **asked)
    count(accounts, bytes([2, 0, 0, 0, 1]), None, **asked)  # with the tail, from a peer
    first, last = reversed(list(accounts.requests_before("", 0.0)))
    have = {"engine": SIZE + 6}
    assert first.by_source == have | {"memory": 10, "disk": 16, "s3": 16, "none": 20}
    assert first.missed == {"evicted": 16, "partial_chunk": 4}
    assert (first.first_gap, first.reason) == (64, "evicted")
    assert last.by_source == have | {"s3": 10, "memory": 48, "disk": 4}
    assert (last.missed, last.first_gap, last.reason) == ({}, None, None)


def test_what_is_kept_is_bounded() -> None:
    accounts = Accounts(TIERS)
    for number in range(MOST_NAMESPACES + 5):
        engine = engine_of(number)
        count(accounts, b"", None, prompt=SIZE, computed=0, chunks=1, engine=engine)
    tokens = accounts.tokens()
    assert len(tokens) == MOST_NAMESPACES + 1
    assert tokens[OTHERS].asked == 5 * SIZE
    for _ in range(MOST_REQUESTS):
        count(accounts, b"", None, prompt=SIZE, computed=0, chunks=1)
    rows = accounts.requests_before("", 0.0)  # one by one, and others come meanwhile
    ids = []
    for row in rows:
        ids.append(int(row.id))
        count(accounts, b"", None, prompt=SIZE, computed=0, chunks=1)
    assert ids == list(range(ids[0], ids[0] - MOST_REQUESTS, -1))
    later = accounts.requests_before(f"{ids[0] + 3:016d}", 0.0)
    assert [int(row.id) - ids[0] for row in later] == [2, 1]
    assert len(accounts._by_digest) <= MOST_NAMESPACES
    for cursor in ("1", "-" * 16, "²" * 16):
        with pytest.raises(KVHavenError, match="not an id"):
            accounts.requests_before(cursor, 0.0)
