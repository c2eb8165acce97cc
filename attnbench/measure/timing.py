"""Fill one record's figures: device time, kernel, call and warm time, energy, memory, shares of the limits."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from attnbench.backends.base import Prepared
from attnbench.measure.job import CaseJob
from attnbench.measure.peaks import peak_of
from attnbench.measure.sampling import Headline, measure_device, measure_host, median
from attnbench.measure.split import kernel_times, parts, short_name
from attnbench.measure.telemetry import SLOWDOWNS, Telemetry
from attnbench.measure.timer import DeviceClock, Timed, host_samples
from attnbench.measure.verify import Truth, autograd_call, gradients
from attnbench.ops.base import timed_inputs
from attnbench.results.record import Record

SIDE_SAMPLES = 10
SIDE_SETTLE_S = 0.05
_LONG_MS = 4.0


@dataclass
class Session:
    """What one worker process holds between cases."""

    device: str
    board: str | None = None
    uuid: str | None = None
    sms: int = 0
    _clock: DeviceClock | None = field(default=None, repr=False)

    @property
    def clock(self) -> DeviceClock:
        if self._clock is None:
            self._clock = DeviceClock()
        return self._clock


def pass_call(truth: Truth, prepared: Prepared, pass_: str) -> Callable[[], Any]:
    """The callable that one pass times. For a backward the forward runs now, on the current stream, and is kept."""
    operation, inputs = truth.operation, timed_inputs(truth.operation, truth.inputs)
    if pass_ == "forward":
        return prepared.forward
    if pass_ == "forward_backward":
        return lambda: gradients(operation, inputs, prepared, prepared.forward())
    outputs = prepared.forward()
    custom = prepared.backward
    if custom is not None:
        return lambda: custom(outputs)
    return autograd_call(operation, inputs, outputs)


def pass_truth(truth: Truth, prepared: Prepared, pass_: str) -> Truth:
    """What `pass_call` must compute: a backend's own backward takes the cotangents that it was prepared with."""
    return truth if pass_ == "forward" or prepared.backward is not None else truth.timed


def time_cpu(job: CaseJob, truth: Truth, prepared: Prepared, record: Record) -> None:
    """Wall time on the CPU, for code that runs there natively (never for the interpreter)."""
    headline = measure_host(pass_call(truth, prepared, record.pass_), job.measure)
    record.timer = "host"
    _store_headline(record, headline)
    record.call_ms = record.median_ms
    add_work(record, truth, job, None)


def time_device(
    session: Session, job: CaseJob, truth: Truth, prepared: Prepared, record: Record, baseline: Timed | None
) -> Any:
    """Every figure of one pass on the GPU. Returns what the timed launches wrote, for the check afterwards."""
    clock = session.clock
    call = pass_call(truth, prepared, record.pass_)
    clock.stream.synchronize()
    _store_memory(clock, call, prepared, record)
    timed = clock.prepare(call)
    try:
        headline, telemetry, seen = _watched(session, timed, baseline, job)
        if slowed(seen):  # heat or supply held the board back: once more
            headline, telemetry, seen = _watched(session, timed, baseline, job)
        record.timer = timed.timer
        _store_headline(record, headline)
        record.telemetry = seen
        _store_power(record, headline, telemetry)
        count = SIDE_SAMPLES if timed.device_ms < _LONG_MS else SIDE_SAMPLES // 2
        if job.measure.warm:
            clock.back_to_back(timed, SIDE_SETTLE_S, flush=False)
            record.warm_ms = median(clock.sample_warm(timed, count))
        if job.measure.call:
            _store_call(clock, call, record)
        _store_kernel(clock, prepared, record, count)
        if job.measure.split:
            _store_split(clock, call, prepared, record)
        if timed.reason:
            record.telemetry["no_graph"] = timed.reason
        add_work(record, truth, job, session)
        return _fresh_result(clock, timed, call)
    finally:
        timed.close()


def _watched(
    session: Session, timed: Timed, baseline: Timed | None, job: CaseJob
) -> tuple[Headline, Telemetry, dict[str, Any]]:
    telemetry = Telemetry(session.uuid)
    telemetry.start()
    try:
        headline = measure_device(session.clock, timed, baseline, job.measure)
        until = time.perf_counter()
    finally:
        telemetry.stop()
    return headline, telemetry, telemetry.summary(headline.began, until)


def slowed(seen: dict[str, Any]) -> bool:
    """Whether heat or a hardware limit held the board back; the software power cap is normal and does not count."""
    return any(reason in SLOWDOWNS for reason in seen.get("clock_reasons", []))


def _fresh_result(clock: DeviceClock, timed: Timed, call: Callable[[], Any]) -> Any:
    """What one more timed launch writes: into NaN where it is a graph's own memory."""
    with torch.cuda.stream(clock.stream):
        if timed.graph is None:
            result = call()
        else:
            result = timed.result
            for tensor in result.values():
                if 0 not in tensor.stride() or tensor.numel() == 0:
                    tensor.detach().fill_(torch.nan)
            timed.launch()
        # Cloned: the graph's memory goes when the timed callable is closed.
        result = {name: tensor.detach().clone() for name, tensor in result.items()}
    clock.stream.synchronize()
    return result


def _store_headline(record: Record, headline: Headline) -> None:
    summary = headline.summary
    record.median_ms = summary.median
    record.ci_ms = [summary.low, summary.high]
    record.samples_ms = [round(sample, 6) for sample in headline.samples]
    record.flags += headline.flags
    record.baseline_median_ms = median(headline.baseline)


def _store_power(record: Record, headline: Headline, telemetry: Telemetry) -> None:
    # Power while the candidate alone kept the board busy: interleaved samples would mix in the baseline's.
    settled = telemetry.summary((headline.began + headline.settled) / 2, headline.settled)
    if "watts" in settled and record.median_ms is not None:
        record.energy_j = settled["watts"] * record.median_ms / 1e3
        record.telemetry["settled_watts"] = settled["watts"]
        record.telemetry["settled_sm_mhz"] = settled["sm_mhz"]
    if slowed(record.telemetry):
        record.flags.append("throttled")
    if record.telemetry.get("other_processes"):
        record.flags.append("contended")


def _store_memory(clock: DeviceClock, call: Callable[[], Any], prepared: Prepared, record: Record) -> None:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.cuda.stream(clock.stream):
        result = call()
    clock.stream.synchronize()
    record.peak_bytes = torch.cuda.max_memory_allocated() - before
    if isinstance(result, dict):
        kept = sum(tensor.numel() * tensor.element_size() for tensor in result.values())
        record.workspace_bytes = max(0, record.peak_bytes - kept)


def _store_call(clock: DeviceClock, call: Callable[[], Any], record: Record) -> None:
    with torch.cuda.stream(clock.stream):
        record.call_ms = median(host_samples(call, SIDE_SAMPLES, seconds=0.1))
        if record.pass_ == "forward":
            with torch.no_grad():
                free = median(host_samples(call, SIDE_SAMPLES, seconds=0.1))
            if free is not None:
                record.split_ms = {**(record.split_ms or {}), "call_no_grad": free}


def _kernel_entry(prepared: Prepared, pass_: str) -> Callable[[], Any] | None:
    return {"forward": prepared.kernel_forward, "backward": prepared.kernel_backward}.get(pass_)


def _store_kernel(clock: DeviceClock, prepared: Prepared, record: Record, count: int) -> None:
    entry = _kernel_entry(prepared, record.pass_)
    if entry is None:
        return
    timed = clock.prepare(entry)
    try:
        clock.back_to_back(timed, SIDE_SETTLE_S)  # the host's figures came before: the board is idle
        record.kernel_ms = median(clock.sample([timed] * count)[0])
    finally:
        timed.close()


def _store_split(clock: DeviceClock, call: Callable[[], Any], prepared: Prepared, record: Record) -> None:
    """Device time by part of the pass, and what autograd adds to the host's."""
    kernels = kernel_times(clock, call)
    split = parts(kernels)
    if kernels:
        record.telemetry["kernels_ms"] = {short_name(name): round(ms, 6) for name, ms in kernels.items()}
    else:
        record.telemetry["no_split"] = "the profiler sees no kernels (is another profiler attached?)"
    entry = _kernel_entry(prepared, record.pass_)
    if entry is not None:
        with torch.cuda.stream(clock.stream):
            whole, alone = (median(host_samples(one, SIDE_SAMPLES, seconds=0.1)) for one in (call, entry))
        if whole is not None and alone is not None:
            split["autograd_host"] = max(0.0, whole - alone)
    record.split_ms = {**(record.split_ms or {}), **split} or None


def add_work(record: Record, truth: Truth, job: CaseJob, session: Session | None) -> None:
    """FLOPs and bytes of the pass, and with a median the rates and their shares of the limits."""
    work = truth.operation.work(truth.case, record.pass_)
    record.flops, record.bytes = work.flops, work.bytes
    if not record.median_ms:
        return
    record.tflops = work.flops / record.median_ms / 1e9
    record.tb_s = work.bytes / record.median_ms / 1e9
    if session is None or session.device != "cuda":
        return
    dtype = truth.case.dtype
    share: dict[str, float] = {}
    matmul, copy = job.ceilings.get(f"matmul_{dtype}"), job.ceilings.get("copy")
    if matmul:
        share["matmul"] = record.tflops / matmul
    if copy:
        share["copy"] = record.tb_s / copy
    peak = peak_of(session.board)
    if peak is None:
        record.flags.append("peak unknown")
    else:
        flops_peak = peak.fp32 if dtype == "fp32" else peak.tensor16
        compute = record.tflops / flops_peak
        share["datasheet"] = max(compute, record.tb_s / peak.tb_s)
        mhz = record.telemetry.get("settled_sm_mhz") or record.telemetry.get("sm_mhz")
        if mhz and dtype != "fp32":
            share["at_clock"] = record.tflops / (session.sms * peak.flops_per_sm_clock * mhz / 1e6)
    record.peak_share = share
