# SPDX-License-Identifier: Apache-2.0
"""The estimate of prefill times follows the engine: exactly without noise, closely with it."""

import random
from collections.abc import Callable
from typing import Any, Literal

import pytest

from kvhaven.client.scheduler import SchedulerClient, Worth
from kvhaven.config import Settings
from kvhaven.engine.least_squares import LeastSquares
from kvhaven.engine.lookups import Lookups
from kvhaven.engine.prefill_estimate import PrefillEstimate, StepShape, StepTimes
from kvhaven.engine.request_state import RequestState
from kvhaven.engine.requests import KnownExtras, Permissions, Request, Transfer
from kvhaven.keys import Extras
from kvhaven.protocol import AttachScheduler

CHUNK = 256


class Accelerator:
    """Steps that take `fixed_s`, `token_s` per token and `context_s` per token and token before."""

    def __init__(self, fixed_s: float, token_s: float, context_s: float, decode_s: float) -> None:
        self.fixed_s, self.token_s, self.context_s = fixed_s, token_s, context_s
        self.decode_s = decode_s

    def seconds(self, shape: StepShape) -> float:
        return (
            self.fixed_s
            + self.token_s * shape.tokens
            + self.context_s * shape.contexts
            + self.decode_s * shape.decoding
        )

    def chunks_s(self, start: int, chunks: int) -> float:
        """Return the marginal time of whole chunks, without the fixed time of their steps."""
        tokens = chunks * CHUNK
        return self.token_s * tokens + self.context_s * tokens * (start + tokens / 2)


GPU = Accelerator(0.004, 50e-6, 1e-9, 20e-6)
CPU = Accelerator(0.03, 680e-6, 20e-9, 1e-3)


def shapes(source: random.Random) -> StepShape:
    step = StepShape(decoding=source.randrange(64))
    for _ in range(source.randint(1, 3)):
        step = step.plus(source.randrange(0, 30_000), source.randint(64, 4096))
    return step


def run(
    estimate: PrefillEstimate,
    device: Accelerator,
    source: random.Random,
    steps: int,
    noise: Callable[[], float] = lambda: 1.0,
) -> None:
    for _ in range(steps):
        shape = shapes(source)
        estimate.observe(shape, device.seconds(shape) * noise())


def estimated(estimate: PrefillEstimate, start: int, chunks: int) -> float:
    cost = estimate.cost(start, CHUNK)
    assert cost is not None
    return chunks * cost.first_s + chunks * (chunks - 1) / 2 * cost.growth_s


def test_least_squares_equal_the_closed_form() -> None:
    """For a line, slope = cov(x, y) / var(x), and intercept = mean(y) - slope mean(x)."""
    fit, source = LeastSquares(2), random.Random(1)
    points = [(x := source.uniform(1, 9), 3 * x + 2 + source.gauss(0, 0.1)) for _ in range(40)]
    for x, y in points:
        fit.add((x, 1.0), y, 1.0, 1.0)
    mean_x = sum(x for x, _ in points) / 40
    mean_y = sum(y for _, y in points) / 40
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum(
        (x - mean_x) ** 2 for x, _ in points
    )
    assert fit.solve() == pytest.approx([slope, mean_y - slope * mean_x], rel=1e-6)


def test_no_coefficient_is_negative_and_the_others_fit_as_well_as_they_can() -> None:
    fit = LeastSquares(2)
    for x in (1.0, 2.0, 3.0):
        fit.add((x, 1.0), 5 * x - 2, 1.0, 1.0)  # an intercept of -2, which is not allowed
    slope, intercept = fit.solve()
    assert intercept == 0.0
    assert slope == pytest.approx(sum(x * (5 * x - 2) for x in (1, 2, 3)) / 14)


def test_proportional_features_count_as_the_first() -> None:
    fit = LeastSquares(3)
    for _ in range(5):
        fit.add((2.0, 1.0, 4.0), 6.0, 1.0, 0.99)
    assert fit.solve() == pytest.approx([3.0, 0.0, 0.0])


@pytest.mark.parametrize("device", [GPU, CPU])
def test_without_noise_the_cost_is_that_of_the_device(device: Accelerator) -> None:
    estimate = PrefillEstimate()
    run(estimate, device, random.Random(2), 64)
    for start, chunks in ((0, 1), (0, 128), (16_384, 32)):
        fixed = device.fixed_s * chunks * CHUNK / 12_288  # three requests of 4096 tokens at most
        wanted = device.chunks_s(start, chunks)
        got = estimated(estimate, start, chunks)
        assert wanted < got < wanted + 2 * fixed


@pytest.mark.parametrize("device", [GPU, CPU])
@pytest.mark.parametrize("seed", range(4))
def test_with_noise_and_outliers_the_cost_stays_within_a_fifth(
    device: Accelerator, seed: int
) -> None:
    estimate, source = PrefillEstimate(), random.Random(seed)

    def noise() -> float:
        return 40.0 if source.random() < 0.03 else source.lognormvariate(0, 0.2)

    run(estimate, device, source, 8)  # the first steps are not the noisy ones here
    run(estimate, device, source, 300, noise)
    wanted = device.chunks_s(0, 64)
    assert 0.8 * wanted < estimated(estimate, 0, 64) < 1.2 * wanted + device.fixed_s * 8


def test_a_few_odd_steps_change_nothing_but_a_lasting_change_is_followed() -> None:
    estimate, source = PrefillEstimate(), random.Random(5)
    run(estimate, GPU, source, 200)
    before = estimated(estimate, 0, 64)
    run(estimate, CPU, source, 3)
    run(estimate, GPU, source, 16)
    assert estimated(estimate, 0, 64) == pytest.approx(before, rel=1e-3)
    run(estimate, CPU, source, 32)
    wanted = CPU.chunks_s(0, 64)
    assert 0.9 * wanted < estimated(estimate, 0, 64) < 1.3 * wanted
    run(estimate, GPU, source, 32)
    assert estimated(estimate, 0, 64) < 2 * before


def test_nothing_is_estimated_before_some_steps_nor_from_decoding_alone() -> None:
    estimate = PrefillEstimate()
    for _ in range(50):
        estimate.observe(StepShape(decoding=3), 0.01)
    for tokens in (100, 200, 300):
        estimate.observe(StepShape().plus(0, tokens), tokens * 1e-4)
        assert estimate.cost(0, CHUNK) is None
    estimate.observe(StepShape().plus(0, 400), 0.04)
    cost = estimate.cost(0, CHUNK)
    assert cost is not None
    assert cost.first_s == pytest.approx(CHUNK * 1e-4, rel=0.01)


def test_a_step_lasts_from_the_end_of_the_one_before_if_it_was_planned_earlier() -> None:
    seen: list[float] = []

    class Recorder(PrefillEstimate):
        def observe(self, shape: StepShape, seconds: float) -> None:
            if shape.tokens:
                seen.append(seconds)

    times, step = StepTimes(Recorder()), StepShape().plus(0, 100)
    times.planned(step, 10.0, forward=True, measured=True)
    times.planned(step, 10.5, forward=True, measured=True)
    times.reported(11.0, empty=True)
    times.reported(13.0, empty=True)
    times.planned(step, 20.0, forward=True, measured=True)
    times.reported(21.0, empty=True)
    assert seen == [1.0, 2.0, 1.0]
    # A step without a forward is reported only if there is something to report.
    times.planned(StepShape(), 22.0, forward=False, measured=True)
    times.planned(step, 23.0, forward=True, measured=True)
    times.reported(24.0, empty=True)
    times.planned(StepShape(), 25.0, forward=False, measured=True)
    times.planned(step, 26.0, forward=True, measured=True)
    times.reported(27.0, empty=False)
    times.reported(28.0, empty=True)
    # A step that loads is no sample.
    times.planned(step, 30.0, forward=True, measured=False)
    times.reported(35.0, empty=True)
    assert seen == [1.0, 2.0, 1.0, 1.0, 1.0]


@pytest.fixture
def client() -> SchedulerClient:
    """A client that is never started: it sends nothing."""
    attach = AttachScheduler(1, "engine", "member", 1, 1000)
    return SchedulerClient("/nowhere", attach, lookup_deadline_s=1.0, promote_deadline_s=1.0)


def request_state(tokens: int, **more: Any) -> RequestState:
    request = Request("r", list(range(tokens)), tokens, **more)
    state = RequestState(request, bytes(32), CHUNK)
    state.permissions = request.permissions
    state.key(KnownExtras(Extras()))
    state.permissions = request.permissions
    state.extend_keys(tokens)
    return state


def lookups(client: SchedulerClient, choice: Literal["auto", "always"]) -> Lookups:
    estimate = PrefillEstimate()
    run(estimate, GPU, random.Random(3), 32)
    settings = Settings(load_or_recompute=choice)
    return Lookups(settings, client, asynchronous=True, shared=True, estimate=estimate)


def test_a_lookup_says_what_its_first_chunk_costs_unless_it_waits_in_any_case(
    client: SchedulerClient,
) -> None:
    state, awaited = request_state(2048), request_state(2048, transfer=Transfer(awaited=True))
    compares = lookups(client, "auto")
    first = compares.worth(state, 0)
    assert first.compute_s == pytest.approx(GPU.chunks_s(0, 1), rel=0.1)
    assert compares.worth(state, 100).compute_s > 1.2 * first.compute_s
    assert compares.worth(awaited, 0) == Worth()
    assert lookups(client, "always").worth(state, 0) == Worth()
    no_estimate = Lookups(Settings(), client, asynchronous=True, shared=True)
    assert no_estimate.worth(state, 0) == Worth()


@pytest.mark.parametrize(
    ("most", "computed", "chunks"),
    [(None, 0, 4), (0, 0, 0), (255, 0, 0), (600, 0, 2), (600, 300, 3), (1100, 0, 4), (900, 200, 4)],
)
def test_a_request_looks_up_no_more_than_it_may_load(
    client: SchedulerClient, most: int | None, computed: int, chunks: int
) -> None:
    limit = Permissions(load=True, save=True, load_tokens=most)
    state = request_state(4 * CHUNK + 76, permissions=limit)
    state.computed, state.tail = computed, state.tail_key(4 * CHUNK + 76)
    keys, tail, limited = lookups(client, "auto").permitted(state)
    assert len(keys) == chunks
    assert (tail is None) == limited == (most not in {None, 1100, 900})
