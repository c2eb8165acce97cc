"""A comparison as text, Markdown and JSON: the rows that matter first, a plain sentence, and what to type next."""

from __future__ import annotations

import math
import shlex
from typing import Any

from attnbench.results.comparable import TOO_FEW, interleaved
from attnbench.results.compare import VERDICTS, Comparison, Row, Verdict
from attnbench.results.runs import Run
from attnbench.results.store import to_json_text
from attnbench.results.text import PASSES, Column, aligned, backend_name, markdown, paint, wrap

SAME_ROWS_SHOWN = 40
_COLUMNS = (
    Column("case"),
    Column("backend"),
    Column("pass"),
    Column("BASE ms", ">", drop=3),
    Column("NEW ms", ">", drop=2),
    Column("change", ">"),
    Column("95 % CI", ">", drop=4),
    Column("verdict", styled=True),
)


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f}%" if math.isfinite(ratio) else "?"


def milliseconds(value: float | None) -> str:
    """Four significant digits; empty for None."""
    if value is None:
        return ""
    return f"{value:.4g}" if value < 1000 else f"{value:.0f}"


def _cells(row: Row) -> list[str]:
    change = interval = ""
    if row.verdict == "same" and row.ratio is None:
        change = "not timed"
    if row.ratio is not None:
        change = _percent(row.ratio.value)
        interval = f"{_percent(row.ratio.low)} … {_percent(row.ratio.high)}"
    _, backend, which = row.key
    return [
        row.label,
        backend_name(backend),
        PASSES.get(which, which),
        milliseconds(row.base_ms),
        milliseconds(row.new_ms),
        change,
        interval,
        row.verdict,
    ]


def _ordered(rows: list[Row]) -> list[Row]:
    """By verdict, the worst change first among regressions."""

    def order(row: Row) -> tuple[int, float]:
        size = -abs(math.log(row.ratio.value)) if row.ratio and row.verdict in ("regressed", "improved") else 0.0
        return VERDICTS.index(row.verdict), size

    return sorted(rows, key=order)


def describe(run: Run) -> str:
    """`20261201-… (smoke, commit 0123456789, NVIDIA H200)`."""
    commit = f"commit {str(run.commit)[:10]}{' + changes' if run.dirty else ''}" if run.commit else "no commit"
    return f"{run.name} ({run.scenario}, {commit}, {run.gpu.get('name') or 'CPU'})"


def sentence(comparison: Comparison) -> str:
    """The whole comparison in plain words."""
    counts, rows = comparison.counts, comparison.rows
    if not rows:
        return "There is nothing to compare: neither run holds a case that was measured or checked."
    total = f"{len(rows)} row{'s' if len(rows) != 1 else ''}"
    found = ", ".join(f"{counts[v]} {v}" for v in VERDICTS if counts[v])
    text = f"Of {total}: {found}."
    slower = [r for r in rows if r.verdict == "regressed" and r.ratio]
    if slower:
        worst = max(slower, key=lambda r: r.ratio.value if r.ratio else 0)
        assert worst.ratio is not None
        who = f"{worst.label}, {backend_name(worst.key[1])} {worst.key[2]}"
        text += f" Worst: {who}, {worst.ratio.value:.3f} times the time of BASE."
    mean = comparison.mean()
    timed = sum(row.ratio is not None for row in rows)
    if mean is not None:
        value, half = mean
        faster = value <= 1
        times = 1 / value if faster else value
        spread = max(half / value * times, 0.001)
        text += (
            f" NEW ran {times:.3f} ± {spread:.3f} times {'faster' if faster else 'slower'} than BASE"
            f" over {timed} timed row{'s' if timed != 1 else ''} (geometric mean)."
        )
    elif timed:
        text += " No mean is given, since some times have no counterpart."
    if counts["ambiguous"]:
        text += " Ambiguous is neither better nor worse: measure again to tell."
    return text


def _scenario_path(run: Run) -> str:
    return str(run.info.get("scenario_file") or f"scenarios/{run.scenario}.yaml")


def next_commands(comparison: Comparison) -> dict[Verdict, str]:
    """For each verdict that asks for something: the command that takes it further."""
    found: dict[Verdict, str] = {}
    for verdict in VERDICTS:
        rows = [row for row in comparison.rows if row.verdict == verdict]
        if not rows or verdict in ("same", "improved"):
            continue
        run = comparison.new
        if verdict == "incomparable" and comparison.footing.reason and comparison.base.commit:
            scenario = shlex.quote(_scenario_path(comparison.base))
            if sides := _in_turns(comparison):
                found[verdict] = f"attnbench compare {sides} --rerun {scenario}"
            else:
                commit = shlex.quote(str(comparison.base.commit)[:10])
                found[verdict] = f"git switch --detach {commit} && attnbench run {scenario}"
            continue
        if verdict == "missing" and any("only in NEW" in r.reason or r.reason.startswith("BASE") for r in rows):
            run = comparison.base
        accuracy = [row for row in rows if row.failed or row.reason.startswith("less accurate")]
        what = "check --scenario" if verdict == "regressed" and len(accuracy) == len(rows) else "run"
        ids = list(dict.fromkeys(row.key[0] for row in rows))
        only = "".join(f" --only {i}" for i in ids) if what == "run" and len(ids) <= 4 else ""
        backends = "".join(f" --backend {shlex.quote(b)}" for b in dict.fromkeys(row.key[1] for row in rows))
        found[verdict] = f"attnbench {what} {shlex.quote(_scenario_path(run))}{only}{backends}"
        if what == "run" and verdict in ("regressed", "ambiguous") and (sides := _in_turns(comparison)):
            found[verdict] = f"attnbench compare {sides} --rerun {shlex.quote(_scenario_path(run))}{only}{backends}"
    return found


def _in_turns(comparison: Comparison) -> str:
    """`BASE NEW` for `--rerun`, where two different commits are known."""
    base, new = comparison.base, comparison.new
    if not base.commit or base.dirty or not new.commit:
        return ""
    if new.dirty:
        return f"{base.commit[:10]} ."
    return "" if base.commit == new.commit else f"{base.commit[:10]} {new.commit[:10]}"


_WHY: dict[Verdict, str] = {
    "regressed": "To see whether it stays, at NEW:",
    "ambiguous": "To narrow the interval, at each commit:",
    "incomparable": "To get a comparable BASE on this machine:",
    "missing": "To fill the gap:",
}


def _why(comparison: Comparison, verdict: Verdict) -> str:
    reasons = [row.reason for row in comparison.rows if row.verdict == verdict]
    if verdict == "incomparable" and all(TOO_FEW in reason for reason in reasons):
        return "For more samples, at each commit, with a larger `max_seconds` in the scenario's `measure:`:"
    if interleaved(comparison.base, comparison.new) and verdict == "ambiguous":
        return "To narrow the interval, with a larger `max_seconds` in the scenario's `measure:`:"
    if " --rerun " in next_commands(comparison)[verdict]:
        return "To be exact, both in turns on this machine:"
    return _WHY[verdict]


def as_text(comparison: Comparison, width: int | None) -> str:
    rows = _ordered(comparison.rows)
    hidden = 0
    if comparison.counts["same"] > SAME_ROWS_SHOWN:
        hidden = comparison.counts["same"]
        rows = [row for row in rows if row.verdict != "same"]
    parts = [f"BASE  {describe(comparison.base)}", f"NEW   {describe(comparison.new)}", ""]
    if rows:
        lines = aligned(_COLUMNS, [_cells(row) for row in rows], width=width).split("\n")
        parts.append(lines[0])
        for row, line in zip(rows, lines[1:], strict=False):
            parts.append(line)
            if row.reason:
                parts += [paint(part, "dim") for part in wrap(f"    {row.reason}", width, "    ")]
        parts += lines[1 + len(rows) :]
    if hidden:
        parts.append(f"… and {hidden} rows that are the same (--format json lists them).")
    parts.append("")
    parts += [line for note in comparison.notes for line in wrap(f"Note: {note}.", width, "      ")]
    for verdict, command in next_commands(comparison).items():
        parts += [*wrap(_why(comparison, verdict), width), f"    {command}"]
    parts += wrap(sentence(comparison), width)
    return "\n".join(parts)


def as_markdown(comparison: Comparison) -> str:
    rows = [row for row in _ordered(comparison.rows) if row.verdict != "same"]
    same = [row for row in comparison.rows if row.verdict == "same"]
    columns = (*_COLUMNS, Column("why"))
    parts = [
        f"**BASE** {describe(comparison.base)}  ",
        f"**NEW** {describe(comparison.new)}",
        "",
        sentence(comparison),
        "",
    ]
    if rows:
        parts += [markdown(columns, [[*_cells(row), row.reason] for row in rows]), ""]
    if same:
        body = markdown(columns, [[*_cells(row), row.reason] for row in same])
        parts += [f"<details><summary>{len(same)} the same</summary>", "", body, "", "</details>", ""]
    parts += [f"* {note}" for note in comparison.notes]
    parts += [f"* {_why(comparison, verdict)} `{command}`" for verdict, command in next_commands(comparison).items()]
    return "\n".join(parts).rstrip()


def _run_json(run: Run) -> dict[str, Any]:
    gpu = run.gpu.get("name")
    return {"run": run.name, "scenario": run.scenario, "commit": run.commit, "dirty": run.dirty, "gpu": gpu}


def as_json(comparison: Comparison, *, exit_code: int) -> str:
    mean = comparison.mean()
    rows = []
    for row in _ordered(comparison.rows):
        case_id, backend, which = row.key
        ratio = row.ratio
        rows.append(
            {
                "case_id": case_id,
                "label": row.label,
                "backend": backend,
                "pass": which,
                "verdict": row.verdict,
                "reason": row.reason,
                "base_ms": row.base_ms,
                "new_ms": row.new_ms,
                "ratio": ratio.value if ratio else None,
                "ci": [ratio.low, ratio.high] if ratio else None,
                "p": ratio.p if ratio else None,
                "views": row.views,
            }
        )
    data = {
        "base": _run_json(comparison.base),
        "new": _run_json(comparison.new),
        "threshold": comparison.threshold,
        "board_spread": comparison.footing.spread,
        "counts": comparison.counts,
        "geometric_mean": mean[0] if mean else None,
        "summary": sentence(comparison),
        "notes": comparison.notes,
        "next": next_commands(comparison),
        "exit_code": exit_code,
        "rows": rows,
    }
    return to_json_text(data, indent=2)
