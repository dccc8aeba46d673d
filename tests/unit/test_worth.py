# SPDX-License-Identifier: Apache-2.0
"""When compression is on: measured on 16 shards, and again after 1024."""

import pytest

from kvhaven.tiers.executor import Lane
from kvhaven.tiers.format.compression_policy import (
    EVERY_SHARDS,
    TRIAL_SHARDS,
    CompressionPolicy,
    Turn,
)

SIZE = 1_000_000


def trial(worth: CompressionPolicy, stored: float, pack_s: float = 0.0) -> list[bool]:
    """Let shards be measured of which this part is stored; return which made news."""
    turns = [worth.turn() for _ in range(TRIAL_SHARDS)]
    assert turns == [Turn.SURVEY] + [Turn.MEASURE] * (TRIAL_SHARDS - 1)
    return [worth.compressed(SIZE, int(stored * SIZE), pack_s) for _ in turns]


def pass_by(worth: CompressionPolicy) -> set[Turn]:
    """Let all shards pass until the next trial; return what was to be done with them."""
    return {worth.turn() for _ in range(EVERY_SHARDS)}


@pytest.mark.parametrize(("stored", "on"), [(0.5, True), (0.9, True), (0.91, False), (1.0, False)])
def test_it_stays_on_from_a_tenth_saved(stored: float, on: bool) -> None:
    worth = CompressionPolicy()
    assert trial(worth, stored) == [False] * (TRIAL_SHARDS - 1) + [True]
    assert worth.on == on
    assert pass_by(worth) == {Turn.COMPRESS if on else Turn.PLAIN}


@pytest.mark.parametrize(
    ("write_s", "pack_s", "on"),
    [
        (1.0, 0.1, True),  # a slow store: fewer bytes are worth the time
        (1.0, 2.7, True),
        (1.0, 3.2, False),  # 3.2 + 0.1 + 0.4 * 2 seconds instead of 2
        (0.1, 0.2, True),
        (0.1, 0.32, False),
        (0.0, 9.9, True),  # nothing is known of the store yet
    ],
)
def test_it_is_off_when_it_takes_more_than_twice_as_long(
    write_s: float, pack_s: float, on: bool
) -> None:
    worth = CompressionPolicy()
    worth.suits(2, unpack_s=write_s / 10 / SIZE)
    if write_s:
        worth.moved(Lane.WRITE, SIZE, write_s)
    trial(worth, 0.4, pack_s)
    assert worth.on == on
    assert ("times" in worth.why) == bool(pack_s)


def test_reads_count_as_they_are_once_there_were_some() -> None:
    worth = CompressionPolicy()
    worth.moved(Lane.WRITE, SIZE, 0.1)
    worth.moved(Lane.READ, SIZE, 10.0)  # so slow that any saving is worth the time
    trial(worth, 0.5, pack_s=1.0)
    assert worth.on


def test_it_comes_back_when_it_pays_again_and_says_so_once_each_time() -> None:
    worth = CompressionPolicy()
    assert trial(worth, 1.0)[-1]
    for _ in range(2):
        assert pass_by(worth) == {Turn.PLAIN}
        assert not any(trial(worth, 0.99))
    pass_by(worth)
    assert trial(worth, 0.6)[-1]
    assert worth.on
    assert pass_by(worth) == {Turn.COMPRESS}
    assert not any(trial(worth, 0.6))


def test_shards_that_were_begun_for_a_trial_that_has_ended_change_nothing() -> None:
    worth = CompressionPolicy()
    for _ in range(TRIAL_SHARDS + 3):
        worth.turn()
    for _ in range(TRIAL_SHARDS):
        worth.compressed(SIZE, SIZE // 2, 0.0)
    assert not any(worth.compressed(SIZE, SIZE, 99.0) for _ in range(3))
    assert pass_by(worth) == {Turn.COMPRESS}
    trial(worth, 0.5)
    assert worth.on
