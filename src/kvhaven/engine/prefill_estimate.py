# SPDX-License-Identifier: Apache-2.0
"""Estimate of prefill times, measured from the engine's own steps.

The time of a step with prefill is modelled as a sum of four non-negative terms: a constant, the
prefill tokens, the prefill tokens times their mean context (attention), and the decoding requests.
"""

from collections import deque
from typing import Final, NamedTuple

from kvhaven.engine.least_squares import LeastSquares

_KEEP: Final = 0.99
"""Weight of all earlier samples after a new one."""
_FIRST: Final = 4
"""Samples before the first estimate. The first steps of an engine are slow, because they compile
or allocate; see `_OUTLIER`."""
_OUTLIER: Final = 3.0
"""A sample that is so many times above or below its estimate is ignored, ..."""
_CHANGED: Final = 4
"""... but after so many in a row the engine has changed: earlier samples hardly count then."""
_LEFT: Final = 0.02
_EVERY: Final = 8
"""The coefficients are computed again after so many samples."""
_MOST_IN_FLIGHT: Final = 64
_K: Final = 1024.0
_SOON: Final = 1e-5
"""Shortest duration of a step in seconds, to limit the weight of a sample."""


class StepShape(NamedTuple):
    """Work of a step: prefill tokens, the sum of their contexts, and decoding requests."""

    tokens: int = 0
    contexts: float = 0.0
    decoding: int = 0

    def plus(self, computed: int, tokens: int) -> "StepShape":
        """Add `tokens` tokens of a request of which `computed` tokens have KV."""
        context = tokens * (computed + tokens / 2)
        return StepShape(self.tokens + tokens, self.contexts + context, self.decoding)


class RecomputeCost(NamedTuple):
    """Seconds to compute the first chunk of a request, and how much more each further one takes."""

    first_s: float
    growth_s: float


class PrefillEstimate:
    """Least squares over the engine's steps with prefill; steps without any do not count.

    Relative errors are minimized. Steps with decoding requests only outnumber the others by far,
    and would only make the estimate forget them.
    """

    def __init__(self) -> None:
        self._fit = LeastSquares(4)
        self._samples = 0
        self._odd = 0
        self._most_tokens = 0
        self._coefficients: list[float] | None = None

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Add a step's duration."""
        if shape.tokens <= 0 or seconds <= 0:
            return
        features = _features(shape)
        if self._coefficients is not None:
            expected = sum(c * f for c, f in zip(self._coefficients, features, strict=True))
            if not expected / _OUTLIER <= seconds <= expected * _OUTLIER:
                self._odd += 1
                if self._odd < _CHANGED:
                    return
                self._fit.scale(_LEFT)
            elif self._odd:
                self._odd = 0
        self._fit.add(features, seconds, max(seconds, _SOON) ** -2, _KEEP)
        self._samples += 1
        self._most_tokens = max(self._most_tokens, shape.tokens)
        early = self._samples <= 2 * _EVERY or self._odd > 0
        if self._samples >= _FIRST and (early or self._samples % _EVERY == 0):
            self._coefficients = self._fit.solve()

    def cost(self, start: int, chunk_size: int) -> RecomputeCost | None:
        """Return what chunks from token `start` on cost to compute; None while it is not known.

        This is the time that they add to a prefill in steps of the largest size seen.
        """
        if self._coefficients is None:
            return None
        per_token, per_context, per_step, _ = self._coefficients
        each = chunk_size * (per_token / _K + per_step / max(self._most_tokens, chunk_size))
        growth = per_context * (chunk_size / _K) ** 2
        first = each + per_context * (chunk_size / _K) * ((start + chunk_size / 2) / _K)
        return RecomputeCost(first, growth) if first > 0 else None


class StepTimes:
    """Durations of an engine's steps, from their plans and reports, which come in this order.

    The engine may plan a step while the one before runs; its time then begins at the earlier one's
    end. Steps without a forward may be reported only if there is something to report (`empty`).
    """

    def __init__(self, estimate: PrefillEstimate) -> None:
        self._estimate = estimate
        self._planned: deque[tuple[float, StepShape, bool]] = deque()
        self._last_end = 0.0

    def planned(self, shape: StepShape, now: float, *, forward: bool, measured: bool) -> None:
        """Note a planned step; one that is not `measured` (it loads, too) is no sample."""
        if len(self._planned) >= _MOST_IN_FLIGHT:  # reports got lost
            self._planned.clear()
        self._planned.append((now, shape if measured else StepShape(), forward))

    def reported(self, now: float, *, empty: bool) -> None:
        """Note that a step has ended."""
        while self._planned:
            planned, shape, forward = self._planned.popleft()
            if not forward and empty:
                continue
            if forward:
                self._estimate.observe(shape, now - max(planned, self._last_end))
            break
        self._last_end = now

    def idle(self) -> None:
        """Note that no request is left: no report is awaited any more."""
        self._planned.clear()


def _features(shape: StepShape) -> tuple[float, float, float, float]:
    return shape.tokens / _K, shape.contexts / (_K * _K), 1.0, float(shape.decoding)
