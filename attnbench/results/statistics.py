"""Ratios of medians with an interval, and what many comparisons at once do to them.

A stored 95 % interval of a median becomes a standard error on the log scale; two of them combine into the interval of
the ratio (the delta method, Casella & Berger, Statistical Inference, section 5.5.4). That costs no samples, so that ten
thousand cases compare in a blink; the bootstrap from samples is for the few that are close to call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

Z95 = 1.959964
RUN_TO_RUN = {"graph": 0.002, "events": 0.002, "host": 0.02}
"""Relative standard error, by timer, that a median is granted beyond its own samples: an interval from within one run
does not know how much the next run of the same code differs (clocks, placement in memory, other processes)."""
HOST_IN_TURNS = 0.005
"""The same on the host where both sides were measured in turns: other work met both."""
RESAMPLES = 1000
_SEED = 20251201


@dataclass(frozen=True)
class Ratio:
    """`value` = new / base, its 95 % interval, and the two-sided p-value of "the ratio is 1"."""

    value: float
    low: float
    high: float
    p: float

    @classmethod
    def of(cls, log_ratio: float, log_error: float) -> Ratio:
        """From the logarithm of the ratio and the standard error of that logarithm (> 0)."""
        reach = Z95 * log_error
        p = math.erfc(abs(log_ratio) / (log_error * math.sqrt(2)))
        return cls(math.exp(log_ratio), math.exp(log_ratio - reach), math.exp(log_ratio + reach), p)


def run_to_run(timer: str | None, *, in_turns: bool = False) -> float:
    """The allowance of a median by its timer; that of the least certain one where the timer is unknown."""
    if in_turns and timer == "host":
        return HOST_IN_TURNS
    return RUN_TO_RUN.get(timer or "", max(RUN_TO_RUN.values()))


def log_error(interval: Sequence[float]) -> float:
    """Standard error of log(median) from the median's 95 % interval; infinite where the interval says nothing."""
    low, high = interval
    if not (0 < low <= high and math.isfinite(high)):
        return math.inf
    return math.log(high / low) / (2 * Z95)


def ratio_of_medians(
    base: float, base_interval: Sequence[float], new: float, new_interval: Sequence[float], *, allowance: float
) -> Ratio:
    """new / base from two medians and their stored 95 % intervals; `allowance` is a side's run-to-run error.

    Raises:
        ValueError: a median is not positive and finite.
    """
    if not (0 < base < math.inf and 0 < new < math.inf):
        raise ValueError(f"medians must be positive and finite, got {base} and {new}")
    error = math.hypot(log_error(base_interval), log_error(new_interval), allowance, allowance)
    if math.isinf(error):
        return Ratio(new / base, 0.0, math.inf, 1.0)
    return Ratio.of(math.log(new / base), error)


@cache
def _middles(count: int) -> tuple[Any, Any]:
    """Places, in the sorted samples, of the two middle ones of each resample; equal counts give equal resamples.

    A resample's median is the mean of those two, so that nothing but indices need be resampled, and once a count.
    """
    import numpy as np

    picks = np.random.default_rng(_SEED + count).integers(0, count, (RESAMPLES, count))
    picks.sort(axis=1)
    return picks[:, (count - 1) // 2], picks[:, count // 2]


def bootstrap_ratio(base: Sequence[float], new: Sequence[float], *, allowance: float) -> Ratio:
    """new / base from all samples: medians resampled on both sides, seeded; `allowance` as above.

    Raises:
        ValueError: a side has fewer than 5 samples, which resampling cannot judge.
    """
    if min(len(base), len(new)) < 5:
        raise ValueError(f"the bootstrap needs 5 samples a side, got {len(base)} and {len(new)}")
    import numpy as np

    def medians(samples: Sequence[float]) -> Any:
        values = np.sort(np.asarray(samples, dtype=np.float64))
        low, high = _middles(values.size)
        return np.log((values[low] + values[high]) / 2)

    left, right = medians(base), medians(new)
    # The same picks for equal sizes would tie the two sides together; a half turn unties them, either way round.
    logs = right - np.roll(left, RESAMPLES // 2)
    centre = float(np.log(np.median(new)) - np.log(np.median(base)))
    low, high = np.percentile(logs, [2.5, 97.5])
    both = math.sqrt(2) * allowance
    ratio = Ratio.of(centre, max(math.hypot(float(logs.std()), both), 1e-9))
    below, above = math.hypot(centre - min(low, centre), Z95 * both), math.hypot(max(high, centre) - centre, Z95 * both)
    return Ratio(ratio.value, math.exp(centre - below), math.exp(centre + above), ratio.p)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p-values (Holm 1979), in the given order: reject those below the level."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def geometric_mean(ratios: Sequence[Ratio]) -> tuple[float, float]:
    """Geometric mean of ratios and the half-width of its 95 % interval (from the ratios' own intervals only).

    Raises:
        ValueError: no ratios.
    """
    if not ratios:
        raise ValueError("a mean needs at least one ratio")
    mean = sum(math.log(r.value) for r in ratios) / len(ratios)
    errors = [math.log(r.high / r.low) / (2 * Z95) if r.low > 0 and math.isfinite(r.high) else math.inf for r in ratios]
    half = Z95 * math.sqrt(sum(e * e for e in errors)) / len(ratios)
    value = math.exp(mean)
    return value, value * half
