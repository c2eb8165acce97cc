"""Where a series of medians steps to another level.

Binary segmentation (Scott and Knott, Biometrics 30, 1974): of all splits the plainest is kept if it is large and beyond
doubt, and each side is then searched on its own. What noise looks like comes from the runs themselves: the interval of
each median, what a run is granted beyond its own samples, and the scatter between neighbours, whichever is larger.
Nothing is resampled, so that a series of a thousand runs takes milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, median_high, median_low

LEVEL = 0.002
"""Probability of a step in a series without one, over all places where one could be."""
LEAST_SIDE = 2
"""Runs on either side of a step: one run alone may be the odd one out."""
LEAST_FOR_SCATTER = 3
"""Differences between neighbours from which their scatter is taken."""


@dataclass(frozen=True)
class Point:
    """A median's logarithm and the standard error of that (its interval, and the run-to-run allowance)."""

    level: float
    error: float


@dataclass(frozen=True)
class Step:
    """Between points `at - 1` and `at`: `ratio` of the levels after and before (above 1 is slower), and its p-value."""

    at: int
    ratio: float
    p: float
    z: float
    """The step in standard errors: tells apart what is beyond all doubt, where p is 0."""


def steps(points: Sequence[Point], threshold: float = 0.02) -> list[Step]:
    """The steps of a series in order, each of at least `threshold` (0.02 is 2 %)."""
    scatter = _scatter([point.level for point in points])
    errors = [max(point.error, scatter) for point in points]
    levels = [point.level for point in points]
    places = sorted(_split(levels, errors, 0, len(points)))
    while True:
        around = zip([0, *places], places, [*places[1:], len(points)], strict=False)
        found = [_step(levels, errors, *three, len(points)) for three in around]
        weak = [step for step in found if step.p >= LEVEL or abs(math.log(step.ratio)) < math.log1p(threshold)]
        if not weak:
            return found
        places.remove(min(weak, key=lambda step: step.z).at)


def _split(levels: Sequence[float], errors: Sequence[float], start: int, end: int) -> list[int]:
    """Where the means of both sides differ beyond doubt: candidates, of which an odd run makes some too."""
    places = range(start + LEAST_SIDE, end - LEAST_SIDE + 1)
    doubts = [
        abs(difference) / doubt for difference, doubt in (_apart(levels, errors, start, at, end) for at in places)
    ]
    if not doubts or _p(z := max(doubts), len(places)) >= LEVEL:
        return []
    best = places[doubts.index(z)]
    return [*_split(levels, errors, start, best), best, *_split(levels, errors, best, end)]


def _step(levels: Sequence[float], errors: Sequence[float], start: int, at: int, end: int, places: int) -> Step:
    """The step at `at` within `start..end`: size from the medians of the sides, doubt from their weighted means.

    An odd run moves a mean but not a median, and both must agree; of two middle runs the one nearer to the other side
    counts, so that one of two is still an odd one. `p` is Bonferroni's over `places`.
    """
    before, after = levels[start:at], levels[at:end]
    up = median_low(after) - median_high(before)
    down = median_high(after) - median_low(before)
    size = max(up, 0.0) or min(down, 0.0)
    difference, doubt = _apart(levels, errors, start, at, end)
    z = min(abs(difference), abs(size)) / doubt if difference * size > 0 else 0.0
    return Step(at, math.exp(size), _p(z, places), z)


def _p(z: float, places: int) -> float:
    return min(1.0, places * math.erfc(z / math.sqrt(2)))


def _apart(levels: Sequence[float], errors: Sequence[float], start: int, at: int, end: int) -> tuple[float, float]:
    """Difference of the sides' means, and its standard error."""
    one, first = _mean(levels[start:at], errors[start:at])
    other, second = _mean(levels[at:end], errors[at:end])
    return other - one, math.hypot(first, second)


def _mean(levels: Sequence[float], errors: Sequence[float]) -> tuple[float, float]:
    """Mean weighted by the inverse variances, and its standard error."""
    weights = [1 / max(error, 1e-9) ** 2 for error in errors]
    total = sum(weights)
    return sum(w * level for w, level in zip(weights, levels, strict=True)) / total, 1 / math.sqrt(total)


def _scatter(levels: Sequence[float]) -> float:
    """Standard deviation of one run about its level, from differences between neighbours; 0 of too few.

    The median of those sees over the few that are steps. It is itself uncertain in a short series, and raised for that.
    """
    away = [abs(b - a) for a, b in pairwise(levels)]
    if len(away) < LEAST_FOR_SCATTER:
        return 0.0
    return median(away) / (0.6745 * math.sqrt(2)) * (1 + 4 / len(away))
