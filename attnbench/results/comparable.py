"""What may be compared with what: reasons against, and how far to trust."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from attnbench.results.record import Record
from attnbench.results.runs import Run, boards_of

BOARD_SPREAD = 0.05
"""How far two boards of one model and power cap are taken to lie apart; a run may store a measured `board_spread`."""

CPU_SPREAD = 0.08
"""How far two runs on one CPU are taken to lie apart: other processes and clock steps move times by that much."""

TOO_FEW = "5 are the least that can be judged"

_POLICY = ("duty",)
_VERSIONS = ("torch", "triton", "cuda-core")


@dataclass
class Footing:
    """On what footing two runs meet: a reason why not, an allowance for other hardware, and notes for the reader."""

    reason: str | None = None
    spread: float = 0.0
    same_kernels: bool = False
    """Both ran the same kernel sources: what autotuning chose is then a matter of chance, not of the commit."""
    in_turns: bool = False
    """Measured A B B A with each other: what shifts whole runs met both."""
    notes: list[str] = field(default_factory=list)


def footing(base: Run, new: Run) -> Footing:
    """Whether the two runs' figures may meet at all, by device, GPU model, power cap, policy and format of timing."""
    for name in ("device", "gpu model", "power cap", "machine", *_POLICY):
        one, other = _trait(base, name), _trait(new, name)
        if one != other and not (one is None or other is None):
            return Footing(f"{name} differs: {one} → {other}")
    hashes = [run.info.get("kernel_hash") for run in (base, new)]
    found = Footing(same_kernels=hashes[0] is not None and hashes[0] == hashes[1])
    one, other = ({gpu.get("uuid") for gpu in boards_of(run.info)} - {None} for run in (base, new))
    if one and other and (one != other or len(one) > 1):
        found.spread = max(float(run.info.get("board_spread") or BOARD_SPREAD) for run in (base, new))
        number = "two" if len(one) == len(other) == 1 else "several"
        found.notes.append(
            f"{number} boards of one model: the threshold is widened by {found.spread:.0%}; measure both on one to be "
            "exact"
        )
    if interleaved(base, new):
        found.in_turns = True
        found.notes.append(f"measured in turns ({new.info['interleaved']['order']}) on one machine")
    elif new.info.get("device") == "cpu":
        found.spread = CPU_SPREAD
        found.notes.append(f"timed on a CPU: the threshold is widened by {CPU_SPREAD:.0%}")
    for name in _VERSIONS:
        one, other = ((run.info.get("packages") or {}).get(name) for run in (base, new))
        if one != other:
            found.notes.append(f"{name} changed: {one} → {other}")
    if base.gpu.get("driver") != new.gpu.get("driver"):
        found.notes.append(f"driver changed: {base.gpu.get('driver')} → {new.gpu.get('driver')}")
    for side, run in (("BASE", base), ("NEW", new)):
        if run.dirty:
            found.notes.append(f"{side} had uncommitted changes on top of {str(run.commit)[:10]}")
        if not run.finished:
            found.notes.append(f"{side} did not finish; `attnbench run … --resume` goes on with it")
    return found


def interleaved(base: Run, new: Run) -> bool:
    """Whether the two runs were measured in turns with each other."""
    pairs = ((run.info.get("interleaved") or {}, other) for run, other in ((base, new), (new, base)))
    return all(told.get("with") == other.name for told, other in pairs)


def _trait(run: Run, name: str) -> Any:
    if name == "gpu model":
        return run.gpu.get("name")
    if name == "power cap":
        cap = run.gpu.get("power_cap_w")
        return None if cap is None else f"{float(cap):.0f} W"
    if name == "device":
        return run.info.get("device")
    if name == "machine":
        return run.info.get("platform") if run.info.get("device") == "cpu" else None
    return (run.info.get("measure") or {}).get(name)


def reason_against(base: Record, new: Record) -> str | None:
    """Why these two records' times may not meet, or None."""
    if base.timer != new.timer:
        return f"timer differs: {base.timer} → {new.timer}"
    for record, side in ((base, "BASE"), (new, "NEW")):
        if record.median_ms is None or not 0 < record.median_ms < float("inf"):
            return f"{side} has no usable time ({record.median_ms})"
        if len(record.samples_ms) < 5:
            return f"{side} has {len(record.samples_ms)} samples; {TOO_FEW}"
    return None


def near_identity(record: Record) -> tuple[Any, ...]:
    """Equal for records that would be one case but for dtype, layout or seed: near misses worth naming."""
    rest = sorted((k, str(v)) for k, v in record.case.items() if k not in ("dtype", "layout", "seed"))
    return (record.backend, record.pass_, *rest)


def differing_fields(base: Record, new: Record) -> str:
    """`dtype bf16 → fp16`, for two records of one near identity."""
    names = [k for k in ("dtype", "layout", "seed") if base.case.get(k) != new.case.get(k)]
    return ", ".join(f"{k} {base.case.get(k, 'default')} → {new.case.get(k, 'default')}" for k in names)
