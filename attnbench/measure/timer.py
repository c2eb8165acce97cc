"""Clocks: device time by CUDA graph or by queued events, and host time.

A device sample is the span between two events on one stream around one call. Two things would spoil it and are kept
out: host time (the launches of a whole batch are queued behind a sleeping kernel, and each sample proves afterwards
that its launch was queued before the device reached it) and a warm L2 (a buffer of twice its size is written before
each sample, outside the span). Both are discussed in docs/measuring.md.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Call = Callable[[], Any]
_MAX_SLEEP_MS = 200.0


@dataclass
class Timed:
    """One callable made ready for device timing on `stream`.

    `timer` is "graph" or "events"; `result` the tensors that each launch writes (graph) or None; `reason` says why no
    graph was captured. `host_ms`/`device_ms` are estimates of one launch, used to size the queue.
    """

    launch: Call
    timer: str
    stream: torch.cuda.Stream
    result: Any = None
    graph: torch.cuda.CUDAGraph | None = None
    reason: str | None = None
    host_ms: float = 0.05
    device_ms: float = 0.05

    def close(self) -> None:
        """Give the graph's memory back."""
        self.result = None
        self.launch = _closed
        if self.graph is not None:
            self.graph.reset()
            self.graph = None


def _closed() -> None:
    raise RuntimeError("this timed callable was closed")


@dataclass
class DeviceClock:
    """Device time on one GPU. Not thread-safe; one per worker process."""

    stream: torch.cuda.Stream = field(default_factory=torch.cuda.Stream)
    flush_l2: bool = True

    def __post_init__(self) -> None:
        device = torch.cuda.current_device()
        l2 = int(torch.cuda.get_device_properties(device).L2_cache_size) or 64 << 20
        # Twice the size: L2 is hashed and set-associative, so writing exactly its size leaves residue.
        self._flush = torch.empty(2 * l2, dtype=torch.int8, device=device)
        with torch.cuda.stream(self.stream):
            self.flush()  # CUDA loads a kernel at its first launch, and then waits for whatever the device is doing
        self._cycles_per_ms = self._calibrate_sleep()

    def _calibrate_sleep(self) -> float:
        """Cycles that the sleeping kernel takes in a millisecond; corrected by every batch, since the clock moves."""
        cycles = 10_000_000
        spans = []
        with torch.cuda.stream(self.stream):
            for _ in range(8):  # an idle board needs some of them to reach its clock
                start, end = _event(), _event()
                start.record()
                torch.cuda._sleep(cycles)
                end.record()
                end.synchronize()
                spans.append(start.elapsed_time(end))
        return cycles / min(spans)

    def flush(self) -> None:
        """Evict the L2 cache by writing twice its size, on the current stream."""
        self._flush.zero_()

    def evict(self) -> None:
        """The same by a kernel that also reads, and that a profile tells from other fills."""
        self._flush.bitwise_not_()

    def prepare(self, call: Call, *, graph: bool = True, warm_up: int = 3) -> Timed:
        """Warm `call` up on this clock's stream and capture it; falls back to plain launches where capture fails.

        Whatever `call` raises while warming up is the caller's to handle; only a failing capture falls back.
        """
        with torch.cuda.stream(self.stream):
            for _ in range(warm_up):
                call()
        self.stream.synchronize()
        timed = Timed(launch=call, timer="events", stream=self.stream)
        if graph:
            reason = self._waits(call)
            timed = Timed(call, "events", self.stream, reason=reason) if reason else self._capture(call)
        self._estimate(timed)
        return timed

    def _waits(self, call: Call) -> str | None:
        """Why `call` cannot be captured: it waits for the device. Asked first: a failed capture leaves traces."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.cuda.stream(self.stream):
                call()
        except RuntimeError as error:
            if "synchronizing CUDA operation" not in str(error):
                raise
            return "not captured: it waits for the device in every call"
        finally:
            torch.cuda.set_sync_debug_mode("default")
        self.stream.synchronize()
        return None

    def _capture(self, call: Call) -> Timed:
        """`call` as a graph; as plain launches, with the reason, where it cannot be captured."""
        graph = torch.cuda.CUDAGraph()
        failure: Exception | None = None
        result = None
        torch.cuda.synchronize()
        # Not torch.cuda.graph(): that empties the allocator's cache, which here costs more than the capture.
        with torch.cuda.stream(self.stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                result = call()
            except Exception as error:
                failure = error
            try:
                graph.capture_end()
            except Exception as error:
                failure = failure or error
                _undo_capture(graph)
        torch.cuda.synchronize()  # raises where the context is lost
        if failure is not None:
            reason = f"not captured: {_first_line(failure)}"
            return Timed(launch=call, timer="events", stream=self.stream, reason=reason)
        timed = Timed(launch=graph.replay, timer="graph", stream=self.stream, result=result, graph=graph)
        with torch.cuda.stream(self.stream):
            timed.launch()
        self.stream.synchronize()
        return timed

    def _estimate(self, timed: Timed) -> None:
        hosts: list[float] = []
        devices: list[float] = []
        with torch.cuda.stream(self.stream):
            for _ in range(3):
                self.stream.synchronize()
                start, end = _event(), _event()
                if hosts:  # queued behind a sleep, or a slow launch would count as device time
                    torch.cuda._sleep(int(min(2 * max(hosts) + 0.1, _MAX_SLEEP_MS) * self._cycles_per_ms))
                began = time.perf_counter()
                start.record()
                timed.launch()
                end.record()
                hosts.append(1e3 * (time.perf_counter() - began))
                end.synchronize()
                devices.append(start.elapsed_time(end))
        timed.host_ms, timed.device_ms = min(hosts), max(min(devices), 1e-3)

    def sample(self, order: Sequence[Timed]) -> tuple[list[float], bool]:
        """Cold (or warm, without `flush_l2`) device time of each launch of `order`, in milliseconds.

        The second value is False when some launch may have reached an idle device, so that its span holds host time.
        """
        return self._sample(order, self.flush_l2)

    def sample_warm(self, timed: Timed, count: int) -> list[float]:
        """Device time with whatever the previous call left in L2."""
        return self._sample([timed] * count, False)[0]

    def _sample(self, order: Sequence[Timed], flush: bool) -> tuple[list[float], bool]:
        flush_ms = self._flush.numel() / 3e9 if flush else 0.0
        lag = 0.0  # how far the device must lag behind at the start for the host to stay ahead to the end
        queued = 0.0
        for timed in order:
            queued += timed.host_ms + 0.03
            lag = max(lag, queued)
            queued -= timed.device_ms + flush_ms
        sleep_ms = min(0.1 + 1.5 * lag, _MAX_SLEEP_MS)
        for _ in range(3):
            samples, ahead, late_ms = self._batch(order, flush, sleep_ms)
            if ahead or sleep_ms >= _MAX_SLEEP_MS:
                break
            sleep_ms = min(2 * sleep_ms + late_ms, _MAX_SLEEP_MS)
        return samples, ahead

    def _batch(self, order: Sequence[Timed], flush: bool, sleep_ms: float) -> tuple[list[float], bool, float]:
        spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = [(_event(), _event()) for _ in order]
        origin, awake = _event(), _event()
        cycles = int(sleep_ms * self._cycles_per_ms)
        queued_at = []
        with torch.cuda.stream(self.stream):
            self.stream.synchronize()
            origin.record()
            began = time.perf_counter()
            torch.cuda._sleep(cycles)
            awake.record()
            for timed, (start, end) in zip(order, spans, strict=True):
                if flush:
                    self.flush()
                start.record()
                timed.launch()
                end.record()
                queued_at.append(1e3 * (time.perf_counter() - began))
        self.stream.synchronize()
        self._cycles_per_ms = cycles / max(origin.elapsed_time(awake), 1e-3)
        late = [queued - origin.elapsed_time(start) for queued, (start, _) in zip(queued_at, spans, strict=True)]
        samples = [start.elapsed_time(end) for start, end in spans]
        return samples, max(late) <= 0, max(0.0, *late)

    def back_to_back(self, timed: Timed, seconds: float, *, flush: bool = True) -> tuple[int, float]:
        """Keep the device busy with `timed` and flushes for about `seconds`; gives calls, and ms per call and flush."""
        count = 0
        began = time.perf_counter()
        step = max(1, min(200, int(10 / (timed.device_ms + 0.05))))
        with torch.cuda.stream(self.stream):
            while time.perf_counter() - began < seconds:
                for _ in range(step):
                    if flush and self.flush_l2:
                        self.flush()
                    timed.launch()
                count += step
                self.stream.synchronize()
        return count, 1e3 * (time.perf_counter() - began) / count


def host_samples(call: Call, count: int, *, seconds: float = 0.5) -> list[float]:
    """Host time of `call` until it returns, without waiting for the device, in milliseconds.

    Consecutive calls are not synchronised (a launch into a non-empty queue is what a training loop sees), but the queue
    is drained often enough never to block on a full one.
    """
    samples = []
    cuda = torch.cuda.is_available()
    began = time.perf_counter()
    for index in range(count):
        if cuda and index % 5 == 0:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        samples.append(1e3 * (time.perf_counter() - start))
        if time.perf_counter() - began > seconds and len(samples) >= 3:
            break
    if cuda:
        torch.cuda.synchronize()
    return samples


def _undo_capture(graph: torch.cuda.CUDAGraph) -> None:
    """What a failing `capture_end` leaves undone: the memory pool, and the random generator's capturing state."""
    device = torch.cuda.current_device()
    with contextlib.suppress(Exception):
        torch._C._cuda_endAllocateToPool(device, graph.pool())
    generator = torch.cuda.default_generators[device]
    seed = generator.initial_seed()
    generator.graphsafe_set_state(torch.Generator(device=f"cuda:{device}").graphsafe_get_state())
    generator.manual_seed(seed)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:200]
