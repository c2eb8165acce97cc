"""What plots take from records: who is shown in which order, in which unit, with which interval."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from attnbench.results.record import Record

PASSES = {"forward": "forward", "backward": "backward", "forward_backward": "forward + backward"}


def by_speed(records: Sequence[Record]) -> list[str]:
    """Backends, the fastest first by their best share of each case; stable for equal ones."""
    fastest: dict[tuple[str, str], float] = {}
    for r in records:
        key = (r.case_id, r.pass_)
        fastest[key] = min(fastest.get(key, r.median_ms or 0), r.median_ms or 0)
    shares = defaultdict(list)
    for r in records:
        shares[r.backend].append(fastest[r.case_id, r.pass_] / (r.median_ms or 1))
    return sorted(shares, key=lambda b: -sum(shares[b]) / len(shares[b]))


def passes_of(records: Sequence[Record]) -> list[str]:
    found = {r.pass_ for r in records}
    return [which for which in PASSES if which in found]


def method(records: Sequence[Record]) -> str:
    """How the times were taken, in words."""
    clock = "host time" if all(r.timer == "host" for r in records) else "device time, cold L2"
    return f"{clock}, median and 95 % interval"


def rate_unit(values: Iterable[float | None], unit: str) -> tuple[str, float]:
    """`unit` (`TFLOP/s`, `TB/s`), or with G for T where nothing reaches a quarter of one (a CPU); and the factor."""
    largest = max((v for v in values if v), default=0.0)
    return (unit, 1.0) if largest >= 0.25 or unit[0] != "T" else ("G" + unit[1:], 1e3)


def reach(values: Iterable[tuple[float, float]]) -> float:
    """Where an axis of rates ends, of (rate, end of its interval) each: an interval that never settled runs off it."""
    pairs = list(values)
    return min(max((end for _, end in pairs), default=0.0), 1.25 * max((value for value, _ in pairs), default=0.0))


def rate_interval(r: Record, value: float) -> tuple[float, float]:
    """A rate's distances down and up to the ends of its interval."""
    if not r.ci_ms or not r.median_ms or min(r.ci_ms) <= 0:
        return 0.0, 0.0
    return max(0.0, value - value * r.median_ms / r.ci_ms[1]), max(0.0, value * r.median_ms / r.ci_ms[0] - value)
