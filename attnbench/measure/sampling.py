"""The headline's samples: settled, interleaved with the baseline, until the interval is narrow enough."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from attnbench.measure.stats import Summary, summarise
from attnbench.scenario.plan import MeasurePolicy

if TYPE_CHECKING:
    from attnbench.measure.timer import DeviceClock, Timed

BLOCK = 5
"""Samples of one side between two turns of A B B A."""
MOST_SAMPLES = 300


@dataclass
class Headline:
    """Samples in milliseconds of the candidate and, where one was interleaved, of the baseline."""

    samples: list[float]
    baseline: list[float] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)
    began: float = 0.0
    settled: float = 0.0
    """`time.perf_counter()` at the start and at the end of settling."""

    @property
    def summary(self) -> Summary:
        return summarise(self.samples)


def settle(clock: DeviceClock, timed: Timed, policy: MeasurePolicy) -> None:
    """Work back to back until the time per call has stopped moving, for one to four times `min_seconds`."""
    stretch = policy.min_seconds / 3
    recent: list[float] = []
    while True:
        _, each = clock.back_to_back(timed, stretch)
        recent.append(each)
        if len(recent) < 3:
            continue
        steady = max(recent[-3:]) / min(recent[-3:]) < 1.01
        if steady or len(recent) >= 12:
            return


def converged(samples: list[float], policy: MeasurePolicy) -> bool:
    """Whether the median's 95 % interval lies within `half_width_percent` on either side."""
    return len(samples) >= policy.samples and 100 * summarise(samples).half_width <= policy.half_width_percent


def measure_device(clock: DeviceClock, candidate: Timed, baseline: Timed | None, policy: MeasurePolicy) -> Headline:
    """Settle, then sample candidate and baseline in turns of A B B A until the candidate's interval is narrow enough.

    Drift of clocks and temperature then meets both sides alike. The first `samples` are taken whatever the time cap
    says; a row that ends with a wider interval is flagged `unconverged`, one whose launches could not be queued ahead
    `host-bound`, two modes `bimodal`.
    """
    start = time.perf_counter()
    if policy.duty == "sustained":
        settle(clock, candidate, policy)
    result = Headline([], began=start, settled=time.perf_counter())
    b = BLOCK
    if baseline is None:
        order, ours = [candidate] * (2 * b), [True] * (2 * b)
    else:
        order = [candidate] * b + [baseline] * (2 * b) + [candidate] * b
        ours = [True] * b + [False] * (2 * b) + [True] * b
    began = time.perf_counter()
    late = False
    while True:
        samples, ahead = clock.sample(order)
        late |= not ahead
        result.samples += [s for s, own in zip(samples, ours, strict=True) if own]
        result.baseline += [s for s, own in zip(samples, ours, strict=True) if not own]
        n = len(result.samples)
        if n >= policy.samples:
            if converged(result.samples, policy):
                break
            if n >= MOST_SAMPLES or time.perf_counter() - began > policy.max_seconds:
                result.flags.append("unconverged")
                break
    if late:
        result.flags.append("host-bound")
    if result.summary.bimodal:
        result.flags.append("bimodal")
    return result


def measure_host(call: Callable[[], Any], policy: MeasurePolicy) -> Headline:
    """Wall time of `call` on the CPU, in milliseconds; at least three samples, `samples` where the cap allows."""
    began = time.perf_counter()
    call()
    samples: list[float] = []
    while True:
        start = time.perf_counter()
        call()
        samples.append(1e3 * (time.perf_counter() - start))
        spent = time.perf_counter() - began
        if converged(samples, policy):
            break
        if len(samples) >= MOST_SAMPLES or (spent > policy.max_seconds and len(samples) >= 3):
            break
    result = Headline(samples)
    if not converged(samples, policy):
        result.flags.append("unconverged")
    if result.summary.bimodal:
        result.flags.append("bimodal")
    return result


def median(samples: list[float]) -> float | None:
    """The median, or None of nothing."""
    return float(np.median(samples)) if samples else None
