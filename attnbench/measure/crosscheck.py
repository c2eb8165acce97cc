"""Can this machine's numbers be trusted today: do independent clocks agree, and how far apart are A and A?"""

from __future__ import annotations

import time
from typing import Any

import torch

from attnbench.measure.referee import second_opinion
from attnbench.measure.sampling import BLOCK
from attnbench.measure.split import kernel_times
from attnbench.measure.stats import summarise
from attnbench.measure.timer import DeviceClock, Timed

_ROUNDS = 8
_WALL_CALLS = 100


def crosscheck(clock: DeviceClock) -> dict[str, Any]:
    """Time a matmul and a copy by graph, events, wall clock and profiler, and a matmul against itself.

    `timers`: microseconds by kernel and clock; warm L2, since a wall clock cannot leave a flush out.
    `timer_gap_percent`: the largest disagreement between two clocks on one kernel. `noise_floor_percent`: the largest
    difference of medians in eight comparisons of a call with itself, sampled as rows are (cold, A B B A, 30 each).
    Smaller differences between two backends of one run are invisible on this machine. `referee`, where `cuda-bench` is
    installed: see `referee.second_opinion`.
    """
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    source = torch.randn(1 << 26, device="cuda")
    target = torch.empty_like(source)
    kernels = {"matmul 4096": lambda: torch.mm(a, a), "copy 256 MiB": lambda: target.copy_(source)}
    timers: dict[str, dict[str, float]] = {}
    gap = 0.0
    for name, call in kernels.items():
        graph, events = clock.prepare(call), clock.prepare(call, graph=False)
        clock.back_to_back(graph, 0.2)
        # In turns: the board's clock drifts by more than the clocks differ.
        spans: dict[str, list[float]] = {"graph": [], "events": [], "wall": []}
        for _ in range(5):
            spans["graph"] += clock.sample_warm(graph, 20)
            spans["events"] += clock.sample_warm(events, 20)
            spans["wall"].append(_wall_ms(clock, graph))
        profiled = sum(kernel_times(clock, call, 20, cold=False).values())
        if profiled:  # no kernels are seen where another profiler is attached
            spans["profiler"] = [profiled]
        found = {clock_name: 1e3 * summarise(samples).median for clock_name, samples in spans.items()}
        gap = max(gap, max(found.values()) / min(found.values()) - 1)
        timers[name] = {clock_name: round(value, 3) for clock_name, value in found.items()}
        graph.close()
    noise = _noise(clock, kernels["matmul 4096"])
    found_all: dict[str, Any] = {
        "timers": timers,
        "timer_gap_percent": round(100 * gap, 3),
        "noise_floor_percent": round(100 * noise, 3),
    }
    opinion = second_opinion()
    return found_all if opinion is None else {**found_all, "referee": opinion}


def _wall_ms(clock: DeviceClock, timed: Timed) -> float:
    with torch.cuda.stream(clock.stream):
        clock.stream.synchronize()
        began = time.perf_counter()
        for _ in range(_WALL_CALLS):
            timed.launch()
        clock.stream.synchronize()
    return 1e3 * (time.perf_counter() - began) / _WALL_CALLS


def _noise(clock: DeviceClock, call: Any) -> float:
    one, two = clock.prepare(call), clock.prepare(call)
    clock.back_to_back(one, 0.2)
    order = [one] * BLOCK + [two] * (2 * BLOCK) + [one] * BLOCK
    first = [timed is one for timed in order]
    worst = 0.0
    for _ in range(_ROUNDS):
        a: list[float] = []
        b: list[float] = []
        while len(a) < 30:
            samples, _ = clock.sample(order)
            a += [s for s, mine in zip(samples, first, strict=True) if mine]
            b += [s for s, mine in zip(samples, first, strict=True) if not mine]
        worst = max(worst, abs(summarise(a).median / summarise(b).median - 1))
    one.close()
    two.close()
    return worst
