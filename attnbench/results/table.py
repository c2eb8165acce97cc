"""A run as a table, one line a (case, backend, pass), and as plain sentences."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from attnbench.results.compare_view import milliseconds
from attnbench.results.plot_data import rate_unit
from attnbench.results.record import COULD_NOT_RUN, Record
from attnbench.results.runs import Run
from attnbench.results.statistics import Ratio, geometric_mean, ratio_of_medians, run_to_run
from attnbench.results.store import to_json_text
from attnbench.results.text import (
    PASSES,
    Column,
    aligned,
    backend_name,
    comma_separated,
    markdown,
    paint,
    terminal_width,
    wrap,
)

REFERENCES = ("eager", "compile", "sdpa_flash", "sdpa_cudnn", "flex", "fa4", "fa3", "flash_attn_res", "liger", "fla")
"""Backends that others are measured against. Every other one (ours, and a user's own) is a subject of sentences."""

Figures = dict[str, Any]
COLUMNS: tuple[tuple[str, Column], ...] = (
    ("case", Column("case")),
    ("backend", Column("backend")),
    ("pass", Column("pass")),
    ("median_ms", Column("median ms", ">")),
    ("spread", Column("± 95 %", ">", drop=2)),
    ("tflops", Column("TFLOP/s", ">")),
    ("tb_s", Column("TB/s", ">", drop=4)),
    ("matmul_share", Column("of matmul", ">", drop=6)),
    ("copy_share", Column("of copy", ">", drop=7)),
    ("vs_baseline", Column("× baseline", ">", drop=3)),
    ("vs_eager", Column("× eager", ">", drop=8)),
    ("sm_mhz", Column("MHz", ">", drop=9)),
    ("power_w", Column("W", ">", drop=10)),
    ("budget", Column("error", ">", drop=5)),
    ("outcome", Column("outcome", styled=True)),
    ("flags", Column("flags", drop=11)),
)
_EXTRA = ("case_id", "op", "ci_low_ms", "ci_high_ms", "samples", "baseline", "timer", "kernel_ms", "call_ms", "warm_ms")
_EXTRA_END = ("energy_j", "peak_bytes", "ran_by", "reason")


def ordered(records: Iterable[Record]) -> list[Record]:
    """Cases in order of appearance, and the passes of each together."""
    rows = list(records)
    cases = {case_id: i for i, case_id in enumerate(dict.fromkeys(r.case_id for r in rows))}
    passes = {which: i for i, which in enumerate(("check", "forward", "backward", "forward_backward"))}
    return sorted(rows, key=lambda r: (cases[r.case_id], passes.get(r.pass_, 9)))


def figures(records: Iterable[Record]) -> list[Figures]:
    """The table's figures, raw: one dictionary a record, in the order of `ordered`."""
    rows = ordered(records)
    eager = {(r.case_id, r.pass_): r.median_ms for r in rows if r.backend == "eager"}
    return [_figures(record, eager.get((record.case_id, record.pass_))) for record in rows]


def _figures(r: Record, eager_ms: float | None) -> Figures:
    share = r.peak_share or {}
    worst = max(r.check.values(), key=lambda c: c.budget_ratio, default=None)
    low, high = r.ci_ms if r.ci_ms else (None, None)

    def times_faster(other_ms: float | None) -> float | None:
        return other_ms / r.median_ms if other_ms and r.median_ms else None

    return {
        "case_id": r.case_id,
        "op": r.op,
        "case": r.label,
        "backend": r.backend,
        "pass": r.pass_,
        "median_ms": r.median_ms,
        "ci_low_ms": low,
        "ci_high_ms": high,
        "samples": len(r.samples_ms) or None,
        "spread": (high - low) / (2 * r.median_ms) if r.median_ms and low is not None and high is not None else None,
        "tflops": r.tflops,
        "tb_s": r.tb_s,
        "matmul_share": share.get("matmul"),
        "copy_share": share.get("copy"),
        "baseline": r.baseline,
        "vs_baseline": times_faster(r.baseline_median_ms) if r.baseline != r.backend else None,
        "vs_eager": times_faster(eager_ms) if r.backend != "eager" else None,
        "sm_mhz": r.reading("sm_mhz"),
        "power_w": r.reading("watts"),
        "budget": worst.budget_ratio if worst else None,
        "timer": r.timer,
        "kernel_ms": r.kernel_ms,
        "call_ms": r.call_ms,
        "warm_ms": r.warm_ms,
        "energy_j": r.energy_j,
        "peak_bytes": r.peak_bytes,
        "outcome": r.outcome,
        "flags": ", ".join(r.flags),
        "ran_by": r.ran_by,
        "reason": r.reason,
    }


def cell(name: str, row: Figures, scales: dict[str, float]) -> str:
    """One figure as the table shows it; `scales` has the factors of `rate_unit` by column."""
    value = row[name]
    if value is None:
        return ""
    if name == "backend":
        return backend_name(value)
    if name == "pass":
        return PASSES.get(str(value), str(value))
    if name == "median_ms":
        return milliseconds(value)
    if name == "spread":
        return f"{100 * value:.1f}%" if value < 1 else ">100%"
    if name == "flags":
        return ", ".join(flag for flag in value.split(", ") if flag != "interpreted")  # `checked` says so already
    value *= scales.get(name, 1.0) if isinstance(value, float) else 1
    if name.endswith("_share"):
        return f"{100 * value:.0f}%"
    if name in ("tflops", "sm_mhz", "power_w"):
        return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
    if name in ("tb_s", "vs_baseline", "vs_eager", "budget"):
        if 0 < value < 0.01:
            return f"{value:.1g}"
        return f"{value:.2f}" if value < 100 else f"{value:.0f}"
    return str(value)


def _remark(row: Figures, *, flags: bool) -> str:
    ran_by = f"ran by {row['ran_by']}" if row["ran_by"] else ""
    return ", ".join(part for part in (cell("flags", row, {}) if flags else "", ran_by, row["reason"]) if part)


def as_table(records: Iterable[Record], format: str = "table") -> str:
    """The records as an aligned table that fits the terminal, or as json, csv (raw figures) or md."""
    rows = figures(records)
    if format == "json":
        return to_json_text(rows, indent=2)
    if format == "csv":
        names = ["case_id", "op", *(name for name, _ in COLUMNS), *_EXTRA[2:], *_EXTRA_END]
        return comma_separated(names, [[row[name] for name in names] for row in rows])
    scales, columns = {}, []
    for name, column in COLUMNS:
        if name in ("tflops", "tb_s"):
            unit, scales[name] = rate_unit([row[name] for row in rows], column.title)
            column = replace(column, title=unit)
        columns.append(column)
    cells = [[cell(name, row, scales) for name, _ in COLUMNS] for row in rows]
    if format == "md":
        used = [i for i in range(len(columns)) if any(row[i] for row in cells)]
        body = [[*(line[i] for i in used), _remark(row, flags=False)] for line, row in zip(cells, rows, strict=True)]
        return markdown([*(columns[i] for i in used), Column("remark")], body)
    width = terminal_width()
    lines = aligned(columns, cells, width=width).split("\n")
    out = lines[:1]
    hidden = "flags" not in lines[0]
    for row, line in zip(rows, lines[1:], strict=False):
        out.append(line)
        if remark := _remark(row, flags=hidden):
            out += [paint(part, "dim") for part in wrap(f"    {remark}", width, "    ")]
    return "\n".join(out + lines[1 + len(rows) :])


def machine(run: Run) -> str:
    """Where and on what a run was made: `NVIDIA H200, 700 W; matmul 671 TFLOP/s, copy 4.28 TB/s; commit …`."""
    parts = [str(run.gpu.get("name") or "CPU")]
    if cap := run.gpu.get("power_cap_w"):
        parts[0] += f", {cap:.0f} W"
    ceilings = run.info.get("ceilings") or {}
    measured = [
        f"{k.replace('_', ' ')} {v:.0f} TFLOP/s" for k, v in ceilings.items() if re.fullmatch(r"matmul_?[^_]*", k)
    ]
    measured += [f"copy {ceilings['copy']:.2f} TB/s"] if ceilings.get("copy") else []
    if measured:
        parts.append("measured here: " + ", ".join(measured))
    parts.append(f"commit {str(run.commit)[:10]}{' + changes' if run.dirty else ''}" if run.commit else "no commit")
    parts.append(str(run.folder))
    return "; ".join(parts) + "."


def sentences(records: Iterable[Record]) -> list[str]:
    """What the run says: per operation and pass, each subject against each reference; then what went wrong.

    A geometric mean is over the cases that both backends take, and withheld where one of those has no time.
    """
    rows = list(records)
    out = []
    groups = dict.fromkeys((r.op, r.pass_) for r in rows if r.pass_ != "check")
    for op, which in groups:
        group = [r for r in rows if (r.op, r.pass_) == (op, which)]
        backends = list(dict.fromkeys(r.backend for r in group))
        subjects = [b for b in backends if b not in REFERENCES] or [b for b in backends if b != "eager"][:1]
        for subject in subjects:
            others = [b for b in backends if b != subject and (b in REFERENCES or subjects.index(subject) == 0)]
            told = [line for other in others if (line := _against(group, subject, other))]
            if told:
                out.append(f"{backend_name(subject)}, {op} {which}:")
                out += [f"  {line}" for line in told]
    return out + _troubles(rows)


def _against(group: Sequence[Record], subject: str, other: str) -> str:
    one = {r.case_id: r for r in group if r.backend == subject and r.outcome != "unsupported"}
    two = {r.case_id: r for r in group if r.backend == other and r.outcome != "unsupported"}
    shared = [case_id for case_id in one if case_id in two]
    if not shared or all(one[c].median_ms is None or two[c].median_ms is None for c in shared):
        return ""
    over = f"{len(shared)} case{'s' if len(shared) > 1 else ''}"
    ratios: list[Ratio] = []
    for case_id in shared:
        a, b = one[case_id], two[case_id]
        if not a.median_ms or not b.median_ms:
            continue
        a_ci, b_ci = a.ci_ms or [a.median_ms] * 2, b.ci_ms or [b.median_ms] * 2
        # The baseline's turns between this one's samples met the same clocks; its own row may not have.
        b_ms = (a.baseline_median_ms if a.baseline == other else None) or b.median_ms
        b_ci = [x * b_ms / b.median_ms for x in b_ci]
        allowance = run_to_run(a.timer)
        ratios.append(ratio_of_medians(a.median_ms, a_ci, b_ms, b_ci, allowance=allowance))
    if len(ratios) < len(shared):
        gone = len(shared) - len(ratios)
        have = "has" if gone == 1 else "have"
        return f"no mean against {backend_name(other)}: {gone} of {over} {have} no time on one side"
    value, half = geometric_mean(ratios)
    word = "faster" if value >= 1 else "slower"
    times = value if value >= 1 else 1 / value
    spread = max(half * times / value, 0.01)
    told = f"ran {times:.2f} ± {spread:.2f} times {word} than {backend_name(other)} over {over}" + (
        " (geometric mean)" if len(shared) > 1 else ""
    )
    return f"{told}: too uncertain to tell" if times - half * times / value <= 1 else told


def _troubles(rows: Sequence[Record]) -> list[str]:
    out = []
    for outcome in ("checked", "check-failed", *sorted(COULD_NOT_RUN), "unsupported"):
        found = [r for r in rows if r.outcome == outcome]
        if found:
            backends = ", ".join(dict.fromkeys(backend_name(r.backend) for r in found))
            more = ", not timed" if outcome == "checked" else ""
            out.append(f"{len(found)} row{'s' if len(found) > 1 else ''} {outcome}{more} ({backends}).")
    flagged = [r for r in rows if "unconverged" in r.flags]
    if flagged:
        rows_did = "row did" if len(flagged) == 1 else "rows did"
        out.append(f"{len(flagged)} {rows_did} not settle within the time cap: raise `max_seconds` in `measure:`.")
    return out
