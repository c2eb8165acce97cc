"""Clocks, isolation and poisoning on a real GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from attnbench.measure.board import board
from attnbench.measure.job import CaseJob, Row
from attnbench.measure.poison import fill_free_blocks
from attnbench.measure.supervisor import Supervisor
from attnbench.measure.timer import DeviceClock
from attnbench.results.record import Record
from attnbench.scenario.case import AttentionCase
from attnbench.scenario.plan import MeasurePolicy

HERE = Path(__file__).parent / "misbehaving_gpu_backends.py"
CASE = AttentionCase(dtype="bf16", heads=4, kv_heads=4, head_dim=64, causal=True, batch=2, seqlen_q=512, seqlen_k=512)
POLICY = MeasurePolicy(samples=30, min_seconds=0.05, max_seconds=0.3)


@pytest.fixture(scope="module")
def clock() -> DeviceClock:
    return DeviceClock()


@pytest.fixture(scope="module")
def supervisor() -> Iterator[Supervisor]:
    with Supervisor("cuda") as found:
        yield found


def records(supervisor: Supervisor, *rows: Row, **changes: Any) -> dict[tuple[str, str], Record]:
    job = CaseJob(CASE, rows, "cuda", measure=POLICY, **changes)
    found = [message for message in supervisor.run(job) if isinstance(message, Record)]
    by_row = {(r.backend.rpartition(":")[2], r.pass_): r for r in found}
    assert len(by_row) == len(found) == sum(len(row.passes) for row in rows)
    return by_row


def median_us(samples: list[float]) -> float:
    return 1e3 * statistics.median(samples)


@pytest.mark.quiet
def test_graph_and_events_agree_on_a_long_kernel(clock: DeviceClock) -> None:
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    graph, events = clock.prepare(lambda: a @ a), clock.prepare(lambda: a @ a, graph=False)
    assert (graph.timer, events.timer) == ("graph", "events")
    clock.back_to_back(graph, 0.3)
    one, two = [], []
    for _ in range(4):
        one += clock.sample([graph] * 10)[0]
        two += clock.sample([events] * 10)[0]
    assert median_us(one) == pytest.approx(median_us(two), rel=0.05)


@pytest.mark.quiet
def test_host_time_stays_out_of_a_device_sample(clock: DeviceClock) -> None:
    a = torch.randn(1 << 16, device="cuda")

    def slow_to_launch() -> torch.Tensor:
        time.sleep(0.002)
        return a + 1

    timed = clock.prepare(slow_to_launch, graph=False)
    samples, ahead = clock.sample([timed] * 10)
    assert ahead
    assert max(samples) < 0.5, "a 2 ms launch must not show in a kernel of microseconds"


@pytest.mark.quiet
def test_a_flushed_cache_is_slower_than_a_warm_one(clock: DeviceClock) -> None:
    source = torch.randn(1 << 21, device="cuda")
    target = torch.empty_like(source)
    timed = clock.prepare(lambda: target.copy_(source))
    cold, _ = clock.sample([timed] * 20)
    assert median_us(cold) > 1.1 * median_us(clock.sample_warm(timed, 20))


@pytest.mark.parametrize("numel", [100, 70_000, 5_000_000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_free_memory_is_nan_after_poisoning(numel: int, dtype: torch.dtype) -> None:
    fill_free_blocks(1 << 29)
    assert bool(torch.empty(numel, device="cuda", dtype=dtype).isnan().all())


def test_memory_free_beside_live_tensors_is_nan_after_poisoning() -> None:
    sizes = (128, 5_000, 200_000, 3_000_000)  # the small pool, a segment shared by large requests, one of its own
    tensors = [torch.zeros(size, device="cuda") for size in sizes for _ in range(6)]
    alive = tensors[::2]
    del tensors
    fill_free_blocks(1 << 26)
    fresh = [torch.empty(size, device="cuda") for size in sizes for _ in range(3)]
    assert all(bool(x.isnan().all()) for x in fresh)
    assert not any(bool(x.any()) for x in alive), "live tensors keep what they hold"


def test_the_board_is_found_by_uuid() -> None:
    found = board(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    assert found is not None
    assert found.power_cap_w is None or found.power_cap_w > 50
    assert found.driver


def test_an_illegal_access_costs_its_own_rows_only(supervisor: Supervisor) -> None:
    supervisor.start()
    before = supervisor.restarts
    found = records(
        supervisor,
        Row("eager", ("forward",)),
        Row(f"{HERE}:ILLEGAL", ("forward", "backward")),
        Row("triton", ("forward",)),
    )
    assert found["ILLEGAL", "forward"].outcome == found["ILLEGAL", "backward"].outcome == "illegal-access"
    assert found["eager", "forward"].outcome == "ok"
    assert found["triton", "forward"].outcome == "ok", found["triton", "forward"].reason
    assert supervisor.restarts == before + 1


def test_work_that_is_skipped_when_timed_is_caught(supervisor: Supervisor) -> None:
    found = records(supervisor, Row(f"{HERE}:LAZY", ("forward",)))["LAZY", "forward"]
    assert found.outcome == "check-failed"
    assert "timed calls" in (found.reason or "")
    assert found.median_ms is None
    assert not found.samples_ms


def test_what_cannot_be_captured_says_so(supervisor: Supervisor) -> None:
    found = records(supervisor, Row(f"{HERE}:SYNCHRONISES", ("forward",)))["SYNCHRONISES", "forward"]
    assert found.outcome == "ok", found.reason
    assert found.timer == "events"
    assert "host-bound" in found.flags
    assert "not captured" in found.telemetry["no_graph"]
    assert supervisor.ceilings(("bf16",), seconds=0.1), "a failed capture must leave random numbers and memory usable"


@pytest.mark.quiet
def test_a_row_has_all_its_figures(supervisor: Supervisor) -> None:
    passes = ("forward", "backward", "forward_backward")
    ceilings = supervisor.ceilings(("bf16",), seconds=0.4)
    assert ceilings["matmul_bf16"] > 10
    assert ceilings["copy"] > 0.1
    found = records(
        supervisor, Row("sdpa_cudnn", passes[:2]), Row("triton", passes), baseline="sdpa_cudnn", ceilings=ceilings
    )
    for pass_ in passes:
        r = found["triton", pass_]
        assert r.outcome == "ok", (pass_, r.reason, r.check)
        assert r.timer == "graph", r.telemetry
        assert r.median_ms and r.ci_ms and r.ci_ms[0] <= r.median_ms <= r.ci_ms[1]  # noqa: PT018
        assert len(r.samples_ms) >= POLICY.samples
        assert r.baseline == "sdpa_cudnn"
        assert r.baseline_median_ms
        assert r.call_ms
        assert r.warm_ms
        assert r.peak_share is not None
        assert 0 < r.peak_share["matmul"] < 1
        assert r.telemetry["sm_mhz"] > 100
        assert r.energy_j
    assert found["triton", "forward"].median_ms < found["triton", "forward_backward"].median_ms  # type: ignore[operator]


@pytest.mark.quiet
def test_clocks_agree_and_a_equals_a(supervisor: Supervisor) -> None:
    found = supervisor.crosscheck()
    assert found["timer_gap_percent"] < 5
    assert found["noise_floor_percent"] < 2
    assert set(found["timers"]["matmul 4096"]) == {"graph", "events", "wall", "profiler"}


def test_selftest_catches_all_thirteen(capsys: pytest.CaptureFixture[str]) -> None:
    from attnbench.cli.selftest import selftest

    code = selftest(device="cuda")
    shown = capsys.readouterr().out
    assert code == 0, shown
    assert "13 of 13" in shown
