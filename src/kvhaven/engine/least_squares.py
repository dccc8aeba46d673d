# SPDX-License-Identifier: Apache-2.0
"""Least squares with few coefficients, none of them negative, for estimates of durations."""

from collections.abc import Sequence
from typing import Final

_RIDGE: Final = 1e-9
"""Added to the diagonal, relative to it: makes collinear features solvable."""
_GAIN: Final = 1e-6
"""Smallest part of the largest correlation for which a further feature is used."""


class LeastSquares:
    """Weighted sums of a linear model's samples, and the coefficients that fit them best.

    Features that explain nothing more, because others are proportional to them, get the
    coefficient 0; feature 0 is used first.
    """

    def __init__(self, features: int) -> None:
        self._square = [[0.0] * features for _ in range(features)]
        self._product = [0.0] * features

    def add(self, features: Sequence[float], value: float, weight: float, keep: float) -> None:
        """Add a sample, after all earlier ones have been multiplied by `keep`."""
        for row, one in enumerate(features):
            scaled, line = weight * one, self._square[row]
            self._product[row] = self._product[row] * keep + scaled * value
            for column, other in enumerate(features):
                line[column] = line[column] * keep + scaled * other

    def scale(self, factor: float) -> None:
        """Multiply the weight of all samples."""
        self._product = [value * factor for value in self._product]
        self._square = [[value * factor for value in line] for line in self._square]

    def solve(self) -> list[float]:
        """Return the coefficients, by the active-set method of Lawson and Hanson."""
        square, product = self._square, self._product
        count = len(product)
        found, used = [0.0] * count, [0] if product[0] > 0 else []
        for _ in range(3 * count):
            if used:
                tried = _solved(
                    [[square[i][j] for j in used] for i in used], [product[i] for i in used]
                )
                if min(tried) < 0:
                    # Go towards the solution up to the first coefficient that becomes 0.
                    step, out = min(
                        (found[i] / (found[i] - value), i)
                        for i, value in zip(used, tried, strict=True)
                        if value < 0
                    )
                    for i, value in zip(used, tried, strict=True):
                        found[i] += step * (value - found[i])
                    found[out] = 0.0
                    used.remove(out)
                    continue
                for i, value in zip(used, tried, strict=True):
                    found[i] = value
            slopes = [
                (product[i] - sum(square[i][j] * found[j] for j in used)) / scale
                for i in range(count)
                if i not in used and (scale := square[i][i] ** 0.5) > 0
            ]
            free = [i for i in range(count) if i not in used and square[i][i] > 0]
            most = max(
                (abs(product[i]) / square[i][i] ** 0.5 for i in range(count) if square[i][i] > 0),
                default=0.0,
            )
            if not free or max(slopes) <= _GAIN * most:
                return found
            used.append(free[slopes.index(max(slopes))])
        return found


def _solved(square: list[list[float]], product: list[float]) -> list[float]:
    """Return the solution of a small symmetric system, by elimination."""
    count = len(product)
    rows = [[*line, value] for line, value in zip(square, product, strict=True)]
    for i in range(count):
        rows[i][i] *= 1 + _RIDGE
    for i in range(count):
        pivot = max(range(i, count), key=lambda at: abs(rows[at][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for below in rows[i + 1 :]:
            factor = below[i] / rows[i][i] if rows[i][i] else 0.0
            for j in range(i, count + 1):
                below[j] -= factor * rows[i][j]
    found = [0.0] * count
    for i in reversed(range(count)):
        rest = rows[i][count] - sum(rows[i][j] * found[j] for j in range(i + 1, count))
        found[i] = rest / rows[i][i] if rows[i][i] else 0.0
    return found
