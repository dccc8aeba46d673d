# SPDX-License-Identifier: Apache-2.0
"""The breaker: a state machine with the time in."""

import pytest

from kvhaven.tiers.health import Breaker, BreakerState


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(clock, threshold=3, pause_s=1, growth=2, max_pause_s=5)


def opened(breaker: Breaker) -> Breaker:
    while not breaker.failed():
        pass
    return breaker


def test_it_opens_after_failures_in_a_row_only(breaker: Breaker) -> None:
    assert not breaker.failed()
    assert not breaker.failed()
    breaker.succeeded()
    assert not breaker.failed()
    assert not breaker.failed()
    assert breaker.closed
    assert breaker.failed()
    assert breaker.state is BreakerState.OPEN
    assert not breaker.failed()  # it tells of the opening once


def test_a_failure_that_is_enough_opens_it_at_once(breaker: Breaker) -> None:
    assert breaker.failed(enough=True)
    assert breaker.state is BreakerState.OPEN
    assert not breaker.failed(enough=True)


def test_one_probe_is_let_through_after_the_pause(breaker: Breaker, clock: Clock) -> None:
    assert not breaker.take_probe()
    opened(breaker)
    clock.now += 0.99
    assert not breaker.take_probe()
    clock.now += 0.01
    assert breaker.take_probe()
    assert not breaker.take_probe()
    assert breaker.state is BreakerState.HALF_OPEN
    assert not breaker.closed


def test_a_good_probe_closes_it(breaker: Breaker, clock: Clock) -> None:
    opened(breaker)
    clock.now += 1
    assert breaker.take_probe()
    breaker.probed(success=True)
    assert breaker.closed
    assert not breaker.failed()  # it counts from nothing


def test_the_pause_grows_with_bad_probes_up_to_its_limit(breaker: Breaker, clock: Clock) -> None:
    opened(breaker)
    pauses = []
    for _ in range(4):
        pauses.append(breaker.pause_s)
        clock.now += breaker.pause_s
        assert breaker.take_probe()
        breaker.probed(success=False)
    assert pauses == [1, 2, 4, 5]


def test_late_results_change_nothing(breaker: Breaker, clock: Clock) -> None:
    opened(breaker)
    breaker.succeeded()
    assert breaker.state is BreakerState.OPEN
    clock.now += 1
    assert breaker.take_probe()
    breaker.succeeded()
    assert not breaker.failed()
    assert not breaker.closed


def test_the_pause_goes_on_growing_when_only_probes_succeed(breaker: Breaker, clock: Clock) -> None:
    opened(breaker)
    clock.now += 1
    assert breaker.take_probe()
    breaker.probed(success=True)
    clock.now += 0.5
    assert opened(breaker).pause_s == 2


def test_the_pause_starts_over_after_it_stayed_closed(breaker: Breaker, clock: Clock) -> None:
    opened(breaker)
    clock.now += 1
    assert breaker.take_probe()
    breaker.probed(success=True)
    clock.now += 1.5
    assert opened(breaker).pause_s == 1


def test_a_probe_that_nobody_took_cannot_be_reported(breaker: Breaker) -> None:
    with pytest.raises(RuntimeError, match="closed"):
        breaker.probed(success=True)


@pytest.mark.parametrize(
    ("threshold", "pause_s", "growth", "max_pause_s"),
    [(0, 1, 2, 5), (1, 0, 2, 5), (1, 1, 0.5, 5), (1, 2, 2, 1)],
)
def test_settings_that_make_no_sense_are_refused(
    threshold: int, pause_s: float, growth: float, max_pause_s: float
) -> None:
    with pytest.raises(ValueError, match="breaker"):
        Breaker(
            Clock(), threshold=threshold, pause_s=pause_s, growth=growth, max_pause_s=max_pause_s
        )
