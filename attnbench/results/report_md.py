"""A run in Markdown, for a pull request: what matters first, the rest folded away, within a comment's length."""

from __future__ import annotations

from collections.abc import Sequence

from attnbench.results.record import Record
from attnbench.results.report_data import (
    checks,
    facts,
    failures,
    outcome_counts,
    reproduction,
    tensor_names,
    verdict,
)
from attnbench.results.runs import Run
from attnbench.results.table import as_table, ordered, sentences
from attnbench.results.text import PASSES, Column, backend_name, markdown

MOST_LETTERS = 60_000
"""GitHub refuses a comment of more than 65,536."""
OPEN_ROWS = 30
MOST_FAILURES = 60
MARKS = {True: "✅", False: "❌", None: "⚠️"}


def as_markdown(run: Run) -> str:
    """The report as GitHub Markdown; tables that would make it too long are left out, and said to be."""
    rows = ordered(run.records.values())
    found = verdict(run)
    where = run.gpu.get("name") or "CPU"
    parts = [
        f"## {run.scenario} on {where}",
        f"{MARKS[found.good]} **{found.text}**",
        ", ".join(f"{count} {outcome}" for outcome, count in outcome_counts(rows)),
        "\n".join(f"{'  ' if line.startswith(' ') else ''}* {line.strip()}" for line in sentences(rows)),
        "\n".join(f"* Note: {note}" for note in run.notes),
        _failures(run, rows),
    ]
    folded = [
        ("All rows", as_table(rows, "md") if rows else "", len(rows) <= OPEN_ROWS),
        ("Errors by tensor, share of the budget", _checks(rows), False),
        ("Run it again", _commands(run, rows), False),
        ("Provenance", markdown([Column(""), Column("")], [list(pair) for pair in facts(run)]), False),
    ]
    used = sum(map(len, parts))
    left_out = []
    for title, body, shown in folded:
        if not body:
            continue
        if used + len(body) > MOST_LETTERS:
            left_out.append(title.lower())
            continue
        used += len(body)
        parts.append(f"<details{' open' if shown else ''}><summary>{title}</summary>\n\n{body}\n\n</details>")
    if left_out:
        parts.append(f"Left out for want of room: {', '.join(left_out)}. `attnbench report {run.name}` has them.")
    return "\n\n".join(part for part in parts if part) + "\n"


def _failures(run: Run, rows: Sequence[Record]) -> str:
    columns = [Column("case"), Column("backend"), Column("pass"), Column("outcome"), Column("reason")]
    wrong = failures(rows)
    body = [
        [r.label, backend_name(r.backend), PASSES.get(r.pass_, r.pass_), r.outcome, _one_line(r.reason or "")]
        for r in wrong[:MOST_FAILURES]
    ]
    more = len(wrong) - len(body)
    rest = f"\n\n… and {more} more." if more else ""
    return "### What went wrong\n\n" + markdown(columns, body) + rest if body else ""


def _one_line(text: str) -> str:
    """Without line breaks, tags or more than 300 letters: reasons hold compilers' and drivers' words."""
    line = " ".join(text.split())
    line = line if len(line) <= 300 else line[:299] + "…"
    return line.replace("&", "&amp;").replace("<", "&lt;")


def _checks(rows: Sequence[Record]) -> str:
    entries = checks(rows)
    names = tensor_names(entries)
    columns = [Column("case"), Column("backend"), *(Column(name, ">") for name in names)]
    body = []
    for entry in entries:
        cells = []
        for name in names:
            check = entry.tensors.get(name)
            text = f"{check.budget_ratio:.2f}" if check else ""
            cells.append(text if check is None or check.passed else f"**{text}**")
        body.append([entry.record.label, backend_name(entry.record.backend), *cells])
    return markdown(columns, body) if body else ""


def _commands(run: Run, rows: Sequence[Record]) -> str:
    """One command a case: all its backends at once."""
    cases: dict[str, list[Record]] = {}
    for r in rows:
        if r.outcome != "unsupported":
            cases.setdefault(r.case_id, []).append(r)
    lines = [f"{reproduction(run, *same)}  # {same[0].label}" for same in cases.values()]
    return "```sh\n" + "\n".join(lines) + "\n```" if lines else ""
