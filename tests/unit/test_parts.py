# SPDX-License-Identifier: Apache-2.0
"""Which chunks of several parts a request can continue after, compared with the definition."""

import random

from hypothesis import given
from hypothesis import strategies as st

from kvhaven.config import Settings
from kvhaven.engine.parts import KvPart, block_lists, usable_chunks
from kvhaven.engine.request_state import RequestState
from kvhaven.engine.requests import Request
from kvhaven.engine.save_planner import SavePlanner

CHUNK = 16
BLOCK = 4


def is_usable(
    parts: list[KvPart], present: list[list[bool]], chunks: int, computed: int, end_of_hit: int
) -> bool:
    """Whether each token that a part needs is computed already, or in a chunk that is present."""
    for part, has in zip(parts, present, strict=True):
        needed = range(end_of_hit)
        if part.reach is not None:
            needed = range(max(0, end_of_hit - part.reach), end_of_hit)
        if any(token >= computed and not has[token // CHUNK] for token in needed):
            return False
    return chunks * CHUNK > computed


@given(st.integers(0, 2**32))
def test_the_largest_usable_number_is_found(seed: int) -> None:
    chance = random.Random(seed)
    most = chance.randint(1, 10)
    reaches = [None, *(chance.randint(0, 80) for _ in range(chance.randint(0, 3)))]
    parts = [KvPart(f"{reach}", (i,), BLOCK, reach) for i, reach in enumerate(reaches)]
    likely = chance.random()
    present = [[chance.random() < likely for _ in range(most)] for _ in parts]
    computed = chance.randint(0, most * CHUNK // BLOCK) * BLOCK
    found = usable_chunks(parts, present, most=most, computed=computed, chunk_size=CHUNK)
    expected = [n for n in range(1, most + 1) if is_usable(parts, present, n, computed, n * CHUNK)]
    assert found == max(expected, default=0)


@given(st.integers(0, 40), st.integers(1, 100))
def test_the_ends_of_a_chunk_are_those_that_need_it(chunk: int, reach: int) -> None:
    part = KvPart("window", (0,), BLOCK, reach)
    needing = [n for n in range(1, 60) if chunk in part.chunks(n, 0, CHUNK)]
    assert list(part.ends(chunk, CHUNK)) == needing


@given(st.integers(1, 100), st.integers(1, 20))
def test_what_is_stored_of_a_chunk_covers_what_its_ends_need(reach: int, end: int) -> None:
    part = KvPart("window", (0,), BLOCK, reach)
    for chunk in part.chunks(end, 0, CHUNK):
        first = max(chunk * CHUNK, part.first_token(end * CHUNK))
        stored = (chunk + 1) * CHUNK - part.stored_blocks(CHUNK) * BLOCK
        assert stored <= first


@given(st.integers(0, 700), st.sampled_from((128, 256, 512)))
def test_portable_windows_are_whole_blocks_of_any_engine(reach: int, chunk: int) -> None:
    """The same tokens for all engines whose blocks divide the grain, and no part of a block."""
    sizes = (16, 32, 64, 128)
    parts = [KvPart("window", (0,), size, reach, grain=128) for size in sizes]
    (stored,) = {part.stored_tokens(chunk) for part in parts}
    assert min(reach, chunk) <= stored <= chunk
    assert all(stored == part.stored_blocks(chunk) * part.block_size for part in parts)
    large = KvPart("window", (0,), 256, reach, grain=128)
    assert large.stored_tokens(512) % 256 == 0


def test_the_blocks_of_groups_follow_each_other_in_each_chunk() -> None:
    assert block_lists([[(1, 2), (3, 4)]]) == [(1, 2), (3, 4)]
    assert block_lists([[(1, 2), (3, 4)], [(5, 6), (7, 8)]]) == [(1, 2, 5, 6), (3, 4, 7, 8)]


def stored_share(window_every: int) -> float:
    """Return what is stored of a prompt of 32K tokens, relative to all layers' whole KV.

    The shape is that of Gemma 3 27B: 52 layers with a window of 1024 tokens, 10 without.
    """
    size, tokens = 256, 32768
    part = KvPart("window:1024", (1,), 16, 1023)
    saves = SavePlanner(Settings(chunk_size=size, window_every=window_every), [16], 1)
    request = Request("r", list(range(tokens)), tokens)
    state = RequestState(request, bytes(32), size)
    saved = sum(saves._is_wanted(state, part, chunk) for chunk in range(tokens // size))
    return (10 + 52 * saved / (tokens // size)) / 62


def test_a_prompt_of_gemma_27b_is_stored_in_less_than_half_of_its_bytes() -> None:
    assert 0.30 < stored_share(4096) <= 0.40
    assert 0.15 < stored_share(0) <= 0.20
