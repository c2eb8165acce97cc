"""Kernels that are slowed on purpose: `SLOWED_PERCENT=3` makes each forward take 3 % more device time.

The extra time is a kernel that sleeps for a number of SM cycles, queued behind the real one. How many is found by
timing both, in turns and with a cold L2, while the backend is tuned. `compare` between runs with and without it must
say `regressed`: `python examples/noise_study.py` counts how often it does.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch

from attnbench.backends import Backend, Prepared, backend
from attnbench.ops.base import Inputs
from attnbench.scenario.case import Case

Spans = tuple[list[float], list[float]]
CLOSE = 0.001
"""Calibration ends when the extra time is this close to what is wanted, as a share of the kernel's own."""
ROUNDS = 6


def calibrate(measure: Callable[[int], Spans], cycles_per_ms: float, percent: float) -> tuple[int, float]:
    """Cycles of sleep that make a call `percent` slower, and by how much they did, in percent.

    Args:
        measure: samples in milliseconds of the plain call and of the one with that many cycles of sleep.

    Raises:
        ValueError: the call is so short that launching a second kernel alone slows it by more.
    """
    cycles, best = 1, (1, float("inf"))
    for _ in range(ROUNDS):
        plain, slow = (median(samples) for samples in measure(cycles))
        extra = 100 * (slow / plain - 1)
        if abs(extra - percent) < abs(best[1] - percent):
            best = (cycles, extra)
        if cycles == 1 and extra > percent:
            raise ValueError(
                f"a call of {1e3 * plain:.0f} us cannot be slowed by {percent:g} %: launching a second kernel alone "
                f"takes {extra:.1f} % of it. Take a longer case, or more percent"
            )
        if abs(extra - percent) < 100 * CLOSE:
            break
        cycles = max(1, cycles + int((percent / 100 * plain - (slow - plain)) * cycles_per_ms))
    return best


def _slow(forward: Callable[[], Any], cycles: int) -> Any:
    outputs = forward()
    torch.cuda._sleep(cycles)
    return outputs


def _cycles_for(forward: Callable[[], Any], percent: float) -> tuple[int, float]:
    from attnbench.measure.timer import DeviceClock

    torch.cuda.synchronize()
    clock = DeviceClock()
    plain = clock.prepare(forward)
    rate = 1e6 / clock.prepare(partial(torch.cuda._sleep, 1_000_000)).device_ms
    clock.back_to_back(plain, 0.1)

    def measure(cycles: int) -> Spans:
        slow = clock.prepare(partial(_slow, forward, cycles))
        order = [plain] * 5 + [slow] * 10 + [plain] * 5
        spans: Spans = ([], [])
        for _ in range(3):
            for timed, span in zip(order, clock.sample(order)[0], strict=True):
                spans[timed is slow].append(span)
        slow.close()
        return spans

    try:
        return calibrate(measure, rate, percent)
    finally:
        plain.close()


class Slowed:
    """Another backend, its forward slowed by `SLOWED_PERCENT`; without that exactly the other one."""

    def __init__(self, name: str) -> None:
        self.name = f"slowed {name}"
        self._base = name

    @property
    def base(self) -> Backend:
        return backend(self._base)

    def supports(self, case: Case, device: str) -> str | None:
        return self.base.supports(case, device)

    def prepare(self, case: Case, inputs: Inputs) -> Prepared:
        prepared = self.base.prepare(case, inputs)
        percent = float(os.environ.get("SLOWED_PERCENT") or 0)
        if not percent or not torch.cuda.is_available():
            return prepared
        sleep = {"cycles": 1}

        def tune() -> dict[str, Any]:
            chosen = prepared.tune() if prepared.tune else {}
            sleep["cycles"], reached = _cycles_for(prepared.forward, percent)
            slowed.reason = f"slowed by {reached:.2f} % on purpose"
            return chosen

        slowed = replace(
            prepared,
            forward=lambda: _slow(prepared.forward, sleep["cycles"]),
            tune=tune,
            kernel_forward=None,
        )
        return slowed


SM90 = Slowed("sm90")
TRITON = Slowed("triton")
