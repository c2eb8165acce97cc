"""The GPU as NVML describes it: identity, clocks, power cap and modes. Imports no torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from attnbench.measure.telemetry import other_processes, reasons, watts


@dataclass(frozen=True)
class Board:
    """One GPU. Fields that the driver does not offer are None; `error` says why there is no board at all."""

    name: str
    uuid: str
    driver: str | None = None
    cuda_driver: str | None = None
    memory_bytes: int | None = None
    sm_mhz: int | None = None
    sm_mhz_max: int | None = None
    mem_mhz: int | None = None
    power_w: float | None = None
    power_cap_w: float | None = None
    power_cap_default_w: float | None = None
    celsius: int | None = None
    persistence: bool | None = None
    mig: bool | None = None
    ecc: bool | None = None
    compute_mode: int | None = None
    clock_reasons: tuple[str, ...] = ()
    other_processes: tuple[int, ...] = ()
    pci_bus_id: str | None = None


def boards() -> tuple[list[Board], str | None]:
    """Every board that NVML sees, in NVML's order, and the reason when there is none."""
    try:
        import pynvml
    except ImportError:
        return [], "the Python package nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return [], f"NVML is not usable: {error}"
    found = [_describe(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(pynvml.nvmlDeviceGetCount())]
    return found, None if found else "NVML sees no board"


def board(uuid: str | None) -> Board | None:
    """The board with this UUID (its `GPU-` prefix may be missing)."""
    from attnbench.measure.telemetry import open_board

    handle = open_board(uuid)
    return None if handle is None else _describe(handle)


def visible_uuids() -> list[str] | None:
    """UUIDs or indices that CUDA_VISIBLE_DEVICES names; None where it is not set."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if value is None else [part.strip() for part in value.split(",") if part.strip()]


def _describe(handle: Any) -> Board:
    import pynvml as n

    def ask(call: Callable[[], Any]) -> Any:
        with contextlib.suppress(n.NVMLError, AttributeError):
            return call()
        return None

    def milliwatts(value: int | None) -> float | None:
        return None if value is None else value / 1e3

    def flag(value: Any) -> bool | None:
        return None if value is None else bool(value)

    version = ask(n.nvmlSystemGetCudaDriverVersion)
    mig = ask(lambda: n.nvmlDeviceGetMigMode(handle)[0])
    ecc = ask(lambda: n.nvmlDeviceGetEccMode(handle)[0])
    read_reasons = getattr(
        n, "nvmlDeviceGetCurrentClocksEventReasons", getattr(n, "nvmlDeviceGetCurrentClocksThrottleReasons", None)
    )
    memory = ask(lambda: n.nvmlDeviceGetMemoryInfo(handle).total)
    bus = ask(lambda: n.nvmlDeviceGetPciInfo(handle).busId)
    return Board(
        name=_text(ask(lambda: n.nvmlDeviceGetName(handle))) or "unknown",
        uuid=_text(ask(lambda: n.nvmlDeviceGetUUID(handle))) or "unknown",
        driver=_text(ask(n.nvmlSystemGetDriverVersion)),
        cuda_driver=f"{version // 1000}.{version % 1000 // 10}" if version else None,
        memory_bytes=memory,
        sm_mhz=ask(lambda: n.nvmlDeviceGetClockInfo(handle, n.NVML_CLOCK_SM)),
        sm_mhz_max=ask(lambda: n.nvmlDeviceGetMaxClockInfo(handle, n.NVML_CLOCK_SM)),
        mem_mhz=ask(lambda: n.nvmlDeviceGetClockInfo(handle, n.NVML_CLOCK_MEM)),
        power_w=watts(handle),
        power_cap_w=milliwatts(ask(lambda: n.nvmlDeviceGetEnforcedPowerLimit(handle))),
        power_cap_default_w=milliwatts(ask(lambda: n.nvmlDeviceGetPowerManagementDefaultLimit(handle))),
        celsius=ask(lambda: n.nvmlDeviceGetTemperature(handle, n.NVML_TEMPERATURE_GPU)),
        persistence=flag(ask(lambda: n.nvmlDeviceGetPersistenceMode(handle))),
        mig=flag(mig),
        ecc=flag(ecc),
        compute_mode=ask(lambda: n.nvmlDeviceGetComputeMode(handle)),
        clock_reasons=tuple(reasons(int(ask(lambda: read_reasons(handle)) or 0))) if read_reasons else (),
        other_processes=tuple(other_processes(handle)),
        pci_bus_id=_text(bus),
    )


def _text(value: Any) -> str | None:
    return value.decode() if isinstance(value, bytes) else value
