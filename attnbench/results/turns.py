"""Two turns of one row, A and A of A B B A, as one record: all samples of both, nothing dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from attnbench.results.record import Record

_MEANS = ("kernel_ms", "call_ms", "warm_ms", "baseline_median_ms", "energy_j")
_READINGS = ("sm_mhz", "watts", "settled_sm_mhz", "settled_watts", "mem_mhz", "celsius")


def joined(first: Record, second: Record) -> Record:
    """The row of both turns: median and interval over all samples, means of the other figures, flags of either.

    Where the second turn did not end well, that is what the row is: its record, with the first turn's check.
    """
    if second.outcome != "ok" or not second.samples_ms:
        return replace(second, check=first.check)
    if first.outcome != "ok" or not first.samples_ms:
        return first
    import numpy as np

    from attnbench.measure.stats import median_interval

    samples = [*first.samples_ms, *second.samples_ms]
    median = float(np.median(samples))
    scale = (first.median_ms or median) / median
    out = replace(
        first,
        flags=list(dict.fromkeys([*first.flags, *second.flags])),
        samples_ms=samples,
        median_ms=median,
        ci_ms=list(median_interval(samples)),
        tflops=first.tflops * scale if first.tflops else None,
        tb_s=first.tb_s * scale if first.tb_s else None,
        peak_share={name: share * scale for name, share in first.peak_share.items()} if first.peak_share else None,
        telemetry=_telemetry(first.telemetry, second.telemetry),
        finished_at=second.finished_at,
    )
    for name in _MEANS:
        setattr(out, name, _mean([getattr(first, name), getattr(second, name)]))
    return out


def _mean(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None


def _telemetry(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    out = {**second, **first}
    for name in _READINGS:
        if name in first and name in second:
            out[name] = (first[name] + second[name]) / 2
    for name, pick in (("sm_mhz_min", min), ("watts_max", max)):
        if name in first and name in second:
            out[name] = pick(first[name], second[name])
    for name in ("clock_reasons", "other_processes"):
        both = list(dict.fromkeys([*first.get(name, []), *second.get(name, [])]))
        if both or name in out:
            out[name] = both
    return out


def alone(record: Record, ours: Sequence[int | None]) -> Record:
    """The record without our own other worker among the processes on the board, and not `contended` for its sake."""
    others = [pid for pid in record.telemetry.get("other_processes", []) if pid not in ours]
    if others or "other_processes" not in record.telemetry:
        return record
    telemetry = {name: value for name, value in record.telemetry.items() if name != "other_processes"}
    return replace(record, telemetry=telemetry, flags=[flag for flag in record.flags if flag != "contended"])
