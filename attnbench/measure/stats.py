"""Medians with an interval, and what a sample's shape says.

Every figure is computed from all samples: no outlier is dropped, because a slow mode is a finding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 1000
_SEED = 20251201


@dataclass(frozen=True)
class Summary:
    """Median and spread of one sample, in the sample's own unit. `low`/`high` bound the 95 % interval of the median."""

    n: int
    median: float
    low: float
    high: float
    p10: float
    p90: float
    minimum: float
    bimodal: bool

    @property
    def half_width(self) -> float:
        """Half of the interval over the median; 0 for a median of 0."""
        return (self.high - self.low) / (2 * self.median) if self.median else 0.0


def median_interval(samples: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Percentile-bootstrap interval of the median; seeded, so equal samples give equal intervals.

    One or two samples give their own range: there is nothing to resample.

    Raises:
        ValueError: no samples.
    """
    values = np.asarray(samples, dtype=np.float64)
    if values.size == 0:
        raise ValueError("a median needs at least one sample")
    if values.size < 3:
        return float(values.min()), float(values.max())
    rng = np.random.default_rng(_SEED)
    picks = rng.integers(0, values.size, size=(RESAMPLES, values.size))
    medians = np.median(values[picks], axis=1)
    tail = 50 * (1 - confidence)
    low, high = np.percentile(medians, [tail, 100 - tail])
    return float(low), float(high)


def is_bimodal(samples: Sequence[float]) -> bool:
    """Whether two separate modes explain the samples.

    The best split into two groups (Otsu's criterion) must leave at least 15 % on each side, the two means at least 3 %
    of the median apart, and Ashman's D of the two groups above 4.
    """
    values = np.sort(np.asarray(samples, dtype=np.float64))
    n = values.size
    if n < 20 or values[0] == values[-1]:
        return False
    sums = np.cumsum(values)
    counts = np.arange(1, n)
    left = sums[:-1] / counts
    right = (sums[-1] - sums[:-1]) / (n - counts)
    split = int(np.argmax(counts * (n - counts) * (right - left) ** 2)) + 1
    if min(split, n - split) < 0.15 * n:
        return False
    gap = float(right[split - 1] - left[split - 1])
    if gap < 0.03 * float(np.median(values)):
        return False
    spread = np.sqrt((values[:split].var() + values[split:].var()) / 2)
    return bool(gap > 4 * spread)


def summarise(samples: Sequence[float]) -> Summary:
    """All figures of one sample. Raises ValueError when it is empty."""
    low, high = median_interval(samples)
    values = np.asarray(samples, dtype=np.float64)
    p10, p90 = np.percentile(values, [10, 90])
    return Summary(
        n=int(values.size),
        median=float(np.median(values)),
        low=low,
        high=high,
        p10=float(p10),
        p90=float(p90),
        minimum=float(values.min()),
        bimodal=is_bimodal(samples),
    )
