"""What the board did while a row was measured: clocks, power, temperature and why the clock moved.

Read through NVML by UUID: CUDA's device order, `CUDA_VISIBLE_DEVICES` and NVML's order all differ, a UUID does not.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import Any

CLOCK_REASONS = {
    0x2: "application clocks",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clocks",
}
"""NVML's clock-event bits. 0x1 (idle) is left out: an idle board is not a slowed one."""
SLOWDOWNS = ("hardware slowdown", "software thermal slowdown", "hardware thermal slowdown", "hardware power brake")
_POWER_INSTANT = 186  # NVML_FI_DEV_POWER_INSTANT: nvmlDeviceGetPowerUsage is a one-second mean on Ampere and later


def open_board(uuid: str | None) -> Any | None:
    """NVML handle of the board with this UUID (its `GPU-` prefix may be missing); None without NVML or board."""
    if not uuid:
        return None
    with contextlib.suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        return pynvml.nvmlDeviceGetHandleByUUID(name)
    return None


def reasons(bits: int) -> list[str]:
    """The names of the clock-event bits that are set."""
    return [name for bit, name in CLOCK_REASONS.items() if bits & bit]


def watts(handle: Any) -> float | None:
    """Momentary board power in watts; the driver's running mean where the momentary field is not offered."""
    import pynvml

    with contextlib.suppress(Exception):
        value = pynvml.nvmlDeviceGetFieldValues(handle, [_POWER_INSTANT])[0]
        if value.nvmlReturn == 0 and value.value.uiVal:
            return float(value.value.uiVal) / 1e3
    with contextlib.suppress(Exception):
        return float(pynvml.nvmlDeviceGetPowerUsage(handle)) / 1e3
    return None


def other_processes(handle: Any) -> list[int]:
    """Process ids on the board other than ours.

    In a container NVML may give the host's ids, our own among them: what is no process here cannot be told from us, and
    is left out.
    """
    import pynvml

    with contextlib.suppress(Exception):
        found = {p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)} - {os.getpid()}
        return sorted(pid for pid in found if os.path.exists(f"/proc/{pid}"))
    return []


class Telemetry:
    """Samples one board in a thread, about every `interval` seconds, between `start()` and `stop()`."""

    def __init__(self, uuid: str | None, interval: float = 0.02) -> None:
        self._handle = open_board(uuid)
        self._interval = interval
        self._rows: list[tuple[float, int, int, float | None, int]] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def available(self) -> bool:
        return self._handle is not None

    def start(self) -> None:
        self._rows = []
        if self._handle is None:
            return
        self._stop.clear()
        self._thread = threading.Thread(target=self._loop, name="telemetry", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None

    def _loop(self) -> None:
        import pynvml

        read_reasons = getattr(
            pynvml, "nvmlDeviceGetCurrentClocksEventReasons", pynvml.nvmlDeviceGetCurrentClocksThrottleReasons
        )
        while not self._stop.is_set():
            with contextlib.suppress(pynvml.NVMLError):
                self._rows.append(
                    (
                        time.perf_counter(),
                        pynvml.nvmlDeviceGetClockInfo(self._handle, pynvml.NVML_CLOCK_SM),
                        pynvml.nvmlDeviceGetClockInfo(self._handle, pynvml.NVML_CLOCK_MEM),
                        watts(self._handle),
                        int(read_reasons(self._handle)),
                    )
                )
            self._stop.wait(self._interval)

    def summary(self, since: float = 0.0, until: float = float("inf")) -> dict[str, Any]:
        """Means over the samples between two `time.perf_counter()` readings; empty without NVML or samples."""
        rows = [r for r in self._rows if since <= r[0] <= until]
        if not rows:
            return {}
        power = [r[3] for r in rows if r[3] is not None]
        bits = 0
        for row in rows:
            bits |= row[4]
        out: dict[str, Any] = {
            "samples": len(rows),
            "sm_mhz": round(sum(r[1] for r in rows) / len(rows), 1),
            "sm_mhz_min": min(r[1] for r in rows),
            "mem_mhz": max(r[2] for r in rows),
            "clock_reasons": reasons(bits),
        }
        if power:
            out["watts"] = round(sum(power) / len(power), 1)
            out["watts_max"] = round(max(power), 1)
        with contextlib.suppress(Exception):
            import pynvml

            out["celsius"] = int(pynvml.nvmlDeviceGetTemperature(self._handle, pynvml.NVML_TEMPERATURE_GPU))
        others = other_processes(self._handle)
        if others:
            out["other_processes"] = others
        return out
