"""A second opinion on device time: NVIDIA's `cuda-bench` (NVBench) on the sentinel kernels, beside our own clock.

Optional: `pip install 'cuda-bench[cu13]'`. Each kernel is timed by our clock, by NVBench and by our clock again, so
that drift meets both. In a process of its own, since NVBench ends the process that misuses it.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

SAMPLES = 60
TIMEOUT_S = 120.0
Sentinel = tuple[str, Callable[[], Any]]


def installed() -> bool:
    try:
        return importlib.util.find_spec("cuda.bench") is not None
    except ModuleNotFoundError:
        return False


def second_opinion() -> dict[str, Any] | None:
    """`times_us` ({kernel: {"own", "cuda-bench"}}) and `gap_percent`, the largest disagreement; or `error`, in words.

    None where cuda-bench is not installed.
    """
    if not installed():
        return None
    command = [sys.executable, "-m", "attnbench.measure.referee"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return {"error": f"cuda-bench took longer than {TIMEOUT_S:.0f} s"}
    last = done.stdout.strip().splitlines()[-1:] or [""]
    try:
        times = json.loads(last[0])
    except ValueError:
        words = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:] or [f"exit code {done.returncode}"]
        return {"error": f"cuda-bench gave no times: {words[0][:300]}"}
    return {"times_us": times, "gap_percent": gap_percent(times)}


def gap_percent(times: dict[str, dict[str, float]]) -> float:
    """The largest disagreement of the two clocks on one kernel, in percent."""
    return round(100 * max((abs(t["own"] / t["cuda-bench"] - 1) for t in times.values()), default=0.0), 3)


def referee(
    kernels: Iterable[Sentinel],
    own_us: Callable[[Callable[[], Any]], list[float]],
    bench: Any,
    read: Callable[[str], Any],
    folder: Path,
) -> dict[str, dict[str, float]]:
    """Median microseconds of each kernel by both clocks.

    Args:
        own_us: our clock's samples of a call, in microseconds.
        bench: the module `cuda.bench`.
        read: `cuda.bench.results.BenchmarkResult.from_json`.
        folder: where NVBench may write its files.
    """
    own: dict[str, list[float]] = {}

    def benchmark(name: str, call: Callable[[], Any]) -> Callable[[Any], None]:
        def run(state: Any) -> None:
            own[name] = own_us(call)
            state.exec(lambda launch: _on_stream(launch, call), batched=False)
            own[name] += own_us(call)

        run.__name__ = name.replace(" ", "_")
        return run

    names = []
    for name, call in kernels:
        names.append(name)
        bench.register(benchmark(name, call))
    path = str(folder / "referee.json")
    criterion = ["--stopping-criterion", "sample-count", "--target-samples", str(SAMPLES)]
    bench.run_all_benchmarks(["referee", "--quiet", "--jsonbin", path, *criterion])
    result = read(path)
    times = {}
    for name in names:
        seconds = result[name.replace(" ", "_")][0].samples
        times[name] = {
            "own": round(statistics.median(own[name]), 3),
            "cuda-bench": round(1e6 * statistics.median(seconds), 3),
        }
    return times


def _on_stream(launch: Any, call: Callable[[], Any]) -> None:
    import torch

    with torch.cuda.stream(torch.cuda.ExternalStream(launch.get_stream().addressof())):
        call()


def main() -> int:
    import cuda.bench
    from cuda.bench.results import BenchmarkResult

    from attnbench.measure.sentinels import sentinels
    from attnbench.measure.timer import DeviceClock

    clock = DeviceClock()

    def own_us(call: Callable[[], Any]) -> list[float]:
        timed = clock.prepare(call)
        clock.back_to_back(timed, 0.1)
        samples = [ms for _ in range(3) for ms in clock.sample([timed] * 10)[0]]
        timed.close()
        return [1e3 * ms for ms in samples]

    with tempfile.TemporaryDirectory() as folder:
        times = referee(sentinels(), own_us, cuda.bench, BenchmarkResult.from_json, Path(folder))
    print(json.dumps(times), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
