"""What this board reaches on plain work at the rows' duty: a large matmul and a large copy."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from attnbench.measure.sampling import settle
from attnbench.measure.stats import summarise
from attnbench.measure.telemetry import Telemetry
from attnbench.measure.timer import DeviceClock
from attnbench.ops.attention_inputs import TORCH_DTYPES
from attnbench.scenario.plan import MeasurePolicy

MATMUL_SIZE = 8192
COPY_BYTES = (1 << 28, 1 << 30)


@dataclass(frozen=True)
class Reached:
    """A rate (work per second over 10¹²) with the SM clock and power that it was reached at."""

    rate: float
    sm_mhz: float | None
    watts: float | None


def measure_ceilings(clock: DeviceClock, dtypes: tuple[str, ...], uuid: str | None, seconds: float) -> dict[str, float]:
    """`matmul_<dtype>` in TFLOP/s (8192 cubed, normal random) and `copy` in TB/s, read plus write.

    The copy is the best of the driver's and an elementwise kernel's, over 256 MiB and 1 GiB. Settled under back-to-back
    work like every row, for `seconds` each; SM clock and watts stand beside them as `…_sm_mhz` and `…_watts`.
    """
    found: dict[str, float] = {}
    for dtype in dtypes:
        a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda", dtype=TORCH_DTYPES[dtype]) for _ in range(2))
        c = torch.empty_like(a)
        reached = _reach(clock, uuid, partial(torch.mm, a, b, out=c), 2 * MATMUL_SIZE**3, seconds)
        _store(found, f"matmul_{dtype}", reached)
        del a, b, c
    copies: list[Reached] = []
    for size in COPY_BYTES:
        source = torch.randn(size // 4, device="cuda")
        target = torch.empty_like(source)
        copied, multiplied = partial(target.copy_, source), partial(torch.mul, source, 2.0, out=target)
        copies += [_reach(clock, uuid, call, 2 * size, seconds / 2) for call in (copied, multiplied)]
        del copied, multiplied
        del source, target
    _store(found, "copy", max(copies, key=lambda reached: reached.rate))
    return found


def _reach(clock: DeviceClock, uuid: str | None, call: Callable[[], Any], work: int, seconds: float) -> Reached:
    telemetry = Telemetry(uuid)
    timed = clock.prepare(call)
    telemetry.start()
    try:
        settle(clock, timed, MeasurePolicy(min_seconds=seconds / 2))
        since = time.perf_counter()
        samples: list[float] = []
        while time.perf_counter() - since < seconds / 2:
            samples += clock.sample([timed] * 10)[0]
    finally:
        telemetry.stop()
        timed.close()
    seen = telemetry.summary(since)
    return Reached(work / summarise(samples).median / 1e9, seen.get("sm_mhz"), seen.get("watts"))


def _store(found: dict[str, float], name: str, reached: Reached) -> None:
    found[name] = reached.rate
    if reached.sm_mhz is not None:
        found[f"{name}_sm_mhz"] = reached.sm_mhz
    if reached.watts is not None:
        found[f"{name}_watts"] = reached.watts
