"""What this board reaches on plain work at the rows' duty: a large matmul and a large copy."""

from __future__ import annotations

import time

import torch

from attnbench.measure.sampling import settle
from attnbench.measure.telemetry import Telemetry
from attnbench.measure.timer import DeviceClock
from attnbench.ops.attention_inputs import TORCH_DTYPES
from attnbench.scenario.plan import MeasurePolicy

MATMUL_SIZE = 8192
COPY_BYTES = 1 << 30


def measure_ceilings(clock: DeviceClock, dtypes: tuple[str, ...], uuid: str | None, seconds: float) -> dict[str, float]:
    """`matmul_<dtype>` in TFLOP/s (8192 cubed, normal random) and `copy` in TB/s (read plus write of 1 GiB each).

    Settled under back-to-back work like every row; SM clock and watts of each stand beside it as `…_sm_mhz`, `…_watts`.
    """
    policy = MeasurePolicy(min_seconds=seconds / 2)
    found: dict[str, float] = {}

    def one(name: str, make: tuple[torch.Tensor, ...], call: object, amount: float) -> None:
        assert callable(call)
        telemetry = Telemetry(uuid)
        telemetry.start()
        timed = clock.prepare(call)
        settle(clock, timed, policy)
        since = time.perf_counter()
        samples: list[float] = []
        while time.perf_counter() - since < seconds / 2:
            samples += clock.sample([timed] * 10)[0]
        telemetry.stop()
        timed.close()
        found[name] = amount / sorted(samples)[len(samples) // 2] / 1e9
        for key, value in telemetry.summary(since).items():
            if key in ("sm_mhz", "watts"):
                found[f"{name}_{key}"] = value
        del make

    for dtype in dtypes:
        a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda", dtype=TORCH_DTYPES[dtype]) for _ in range(2))
        c = torch.empty_like(a)
        one(f"matmul_{dtype}", (a, b, c), lambda a=a, b=b, c=c: torch.mm(a, b, out=c), 2 * MATMUL_SIZE**3)
        del a, b, c
    source = torch.randn(COPY_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    one("copy", (source, target), lambda: target.copy_(source), 2 * COPY_BYTES)
    return found
