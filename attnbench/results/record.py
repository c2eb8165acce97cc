"""One finished case and pass, as stored: a line of `cases.jsonl`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

FORMAT_VERSION = 1

OUTCOMES = (
    "ok",
    "checked",  # right, but not timed (under the interpreter)
    "check-failed",
    "unsupported",
    "build-failed",
    "oom",
    "skipped-memory",
    "illegal-access",
    "timeout",
    "crashed",
)
"""Every way in which a planned case can end. `ok` and `checked` are good; `unsupported` is as planned."""

GOOD = frozenset({"ok", "checked", "unsupported"})
"""Outcomes that ask for nothing."""
COULD_NOT_RUN = frozenset({"build-failed", "oom", "skipped-memory", "illegal-access", "timeout", "crashed"})


@dataclass
class TensorCheck:
    """One tensor against fp64: the error budget of design.md, `Numbers`."""

    max_abs: float
    rel_fro: float
    budget_ratio: float  # 1.0 is the whole budget; more fails
    passed: bool
    worst: list[int] = field(default_factory=list)  # coordinate of the largest error
    message: str = ""


@dataclass
class Record:
    """One case, backend and pass. Times in milliseconds; None where there is no such figure."""

    case_id: str
    op: str
    case: dict[str, Any]
    label: str
    backend: str
    pass_: str  # "pass" in JSON: forward, backward, forward_backward or check
    outcome: str
    board: str | None = None
    """UUID of the board that ran it; None on the CPU."""
    ran_by: str | None = None
    reason: str | None = None
    flags: list[str] = field(default_factory=list)
    median_ms: float | None = None
    ci_ms: list[float] | None = None
    samples_ms: list[float] = field(default_factory=list)
    baseline: str | None = None  # the backend interleaved with this one
    baseline_median_ms: float | None = None
    timer: str | None = None  # "graph", "events" or "host"
    kernel_ms: float | None = None
    call_ms: float | None = None
    warm_ms: float | None = None
    split_ms: dict[str, float] | None = None
    tflops: float | None = None
    tb_s: float | None = None
    flops: int | None = None
    bytes: int | None = None
    peak_share: dict[str, float] | None = None  # {"matmul": …, "copy": …, "datasheet": …}
    energy_j: float | None = None
    workspace_bytes: int | None = None
    peak_bytes: int | None = None
    build_s: float | None = None
    tune_s: float | None = None
    tuned: dict[str, Any] | None = None
    check: dict[str, TensorCheck] = field(default_factory=dict)
    batch_variant: list[str] | None = None
    """Tensors in which a sequence has other bits alone than in its batch; None where that was not asked."""
    telemetry: dict[str, Any] = field(default_factory=dict)
    stderr_tail: list[str] = field(default_factory=list)
    finished_at: str | None = None  # UTC, ISO 8601
    version: int = FORMAT_VERSION

    def reading(self, name: str) -> float | None:
        """A positive telemetry figure (`sm_mhz`, `watts` …), or None."""
        value = self.telemetry.get(name)
        return float(value) if isinstance(value, int | float) and value > 0 else None

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        data["pass"] = data.pop("pass_")
        # Seven digits are finer than any clock here, and halve the file and the time that reading it takes.
        data["samples_ms"] = [float(f"{sample:.7g}") for sample in self.samples_ms]
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Record:
        """The record of one line, whose dictionary it takes over; fields that a later attnbench added are ignored."""
        data["pass_"] = data.pop("pass")
        for name in data.keys() - _FIELDS:
            del data[name]
        data["check"] = {k: _check_from_json(v) for k, v in data.get("check", {}).items()}
        for name in _FLOATS:
            if isinstance(data.get(name), str):
                data[name] = float(data[name])
        if data.get("ci_ms"):
            data["ci_ms"] = [float(x) for x in data["ci_ms"]]
        return cls(**data)


_FLOATS = ("median_ms", "baseline_median_ms", "kernel_ms", "call_ms", "warm_ms", "tflops", "tb_s", "energy_j")
_FIELDS = frozenset(f.name for f in fields(Record))


def _check_from_json(data: dict[str, Any]) -> TensorCheck:
    # NaN and infinities are stored as strings.
    return TensorCheck(
        float(data["max_abs"]),
        float(data["rel_fro"]),
        float(data["budget_ratio"]),
        data["passed"],
        data.get("worst", []),
        data.get("message", ""),
    )
