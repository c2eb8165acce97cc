"""Series over commits as text, Markdown, JSON and CSV: their shape in one line, the steps, and what to type next."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from typing import Any

from attnbench.results.changepoints import Step
from attnbench.results.compare_view import milliseconds
from attnbench.results.history import Entry, Series, also_changed, utc
from attnbench.results.store import to_json_text
from attnbench.results.text import Column, aligned, backend_name, comma_separated, markdown, paint, wrap

BARS = "▁▂▃▄▅▆▇█"
LEAST_SPAN = 0.04
"""What the height of the bars spans at least, as a share: noise must not look like a mountain."""
FULL_SERIES = 3
"""More series than this are shown by their shape alone."""
_COLUMNS = (
    Column("date"),
    Column("commit"),
    Column("median ms", ">"),
    Column("± 95 %", ">", drop=1),
    Column("change", ">"),
    Column("outcome", styled=True),
    Column("run", drop=2),
)


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """The newest `width` values as bars; taller is slower."""
    shown = [math.log(value) for value in values][-width:]
    if not shown:
        return ""
    middle, span = (max(shown) + min(shown)) / 2, max(max(shown) - min(shown), LEAST_SPAN)
    places = ((value - middle) / span + 0.5 for value in shown)
    return "".join(BARS[min(len(BARS) - 1, max(0, int(place * len(BARS))))] for place in places)


def title(series: Series) -> str:
    return f"{series.label}, {backend_name(series.backend)} {series.pass_}, {series.machine}"


def _commit(entry: Entry) -> str:
    return f"{entry.commit[:10]}{'+' if entry.run.dirty else ''}" if entry.commit else "no commit"


def step_words(series: Series, step: Step) -> str:
    """`+3.1 % slower since 0123456789 (0.5286 → 0.5441 ms; before: abcdef0123)`, and what else changed there."""
    timed = series.timed
    bounds = [0, *(s.at for s in series.steps), len(timed)]
    i = bounds.index(step.at)
    sides = (timed[bounds[i - 1] : step.at], timed[step.at : bounds[i + 1]])
    before, after = (_middle([entry.record.median_ms or 0.0 for entry in side]) for side in sides)
    last, first = timed[step.at - 1], timed[step.at]
    word = "slower" if step.ratio > 1 else "faster"
    text = f"{100 * (step.ratio - 1):+.1f} % {word} since {_commit(first)}: "
    text += f"{milliseconds(before)} → {milliseconds(after)} ms (medians of {len(sides[0])} and {len(sides[1])} runs; "
    text += f"{_commit(last)} is the last before)"
    also = also_changed(last.run, first.run)
    return text + (f"; there too: {', '.join(also)}" if also else "")


def _middle(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def next_command(series: Series, step: Step) -> str:
    """What says for certain whether a step is the commit's: both sides, in turns on one board."""
    last, first = series.timed[step.at - 1], series.timed[step.at]
    scenario = str(first.run.info.get("scenario_file") or f"scenarios/{first.run.scenario}.yaml")
    if not last.commit or not first.commit or last.commit == first.commit:
        return f"attnbench compare {shlex.quote(str(last.run.folder))} {shlex.quote(str(first.run.folder))}"
    words = ["attnbench", "compare", last.commit[:10], first.commit[:10], "--rerun", scenario]
    words += ["--only", series.case_id, "--backend", series.backend]
    return shlex.join(words)


def odd_newest(series: Series, threshold: float) -> str:
    """A sentence where the newest run alone lies off the level before it, which one run cannot decide."""
    timed = series.timed
    start = series.steps[-1].at if series.steps else 0
    level = timed[start:-1]
    if len(level) < 2:
        return ""
    size = (timed[-1].record.median_ms or 0.0) / _middle([entry.record.median_ms or 0.0 for entry in level]) - 1
    if abs(math.log1p(size)) < math.log1p(threshold):
        return ""
    word = "slower" if size > 0 else "faster"
    return f"The newest run is {100 * abs(size):.1f} % {word} than the level before; one run cannot tell: run it again."


def as_text(series: Sequence[Series], threshold: float, width: int | None) -> str:
    parts = []
    for one in series:
        values = [entry.record.median_ms or 0.0 for entry in one.timed]
        parts += [paint(line, "bold") for line in wrap(title(one), width)]
        count = f"{_count(len(one.entries), 'run')} of {_count(len({e.commit for e in one.entries}), 'commit')}"
        ends = " → ".join(dict.fromkeys(milliseconds(value) for value in (values[0], values[-1]))) if values else ""
        bars = sparkline(values, max(10, min(60, (width or 100) - 40)))
        parts.append(f"  {bars}  {ends} ms, {count}" if values else f"  never timed, {count}")
        if len(series) <= FULL_SERIES:
            table = aligned(_COLUMNS, _rows(one), width=width - 2 if width else None)
            parts += [f"  {line}" for line in table.split("\n")]
        for step in one.steps:
            style = "red" if step.ratio > 1 else "green"
            parts += [paint(line, style) for line in wrap(f"  {step_words(one, step)}", width, "    ")]
            parts.append(f"    {next_command(one, step)}")
        if odd := odd_newest(one, threshold):
            parts += wrap(f"  {odd}", width, "    ")
        parts.append("")
    return "\n".join(parts + wrap(summary(series, threshold), width))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def summary(series: Sequence[Series], threshold: float) -> str:
    """The whole in one sentence."""
    found = [step for one in series for step in one.steps]
    slower = sum(step.ratio > 1 for step in found)
    where = f"of {100 * threshold:g} % or more in {len(series)} series"
    if not found:
        return f"No step {where}."
    counts = [f"{slower} to slower"] if slower else []
    counts += [f"{len(found) - slower} to faster"] if len(found) > slower else []
    return f"{_count(len(found), 'step')} {where}: {', '.join(counts)}."


def _rows(series: Series) -> list[list[str]]:
    timed = series.timed
    marks = {id(timed[step.at]): f"{100 * (step.ratio - 1):+.1f}%" for step in series.steps}
    rows = []
    for entry in series.entries:
        r = entry.record
        spread = ""
        if r.ci_ms and r.median_ms:
            spread = f"{100 * (r.ci_ms[1] - r.ci_ms[0]) / (2 * r.median_ms):.1f}%"
        rows.append(
            [
                utc(entry.when)[:10],
                _commit(entry),
                milliseconds(r.median_ms),
                spread,
                marks.get(id(entry), ""),
                r.outcome,
                entry.run.name,
            ]
        )
    return rows


def as_markdown(series: Sequence[Series], threshold: float) -> str:
    parts = [summary(series, threshold)]
    for one in series:
        values = [entry.record.median_ms or 0.0 for entry in one.timed]
        parts.append(f"### {title(one)}\n\n`{sparkline(values)}`")
        lines = [f"* {step_words(one, step)}. `{next_command(one, step)}`" for step in one.steps]
        parts += ["\n".join(lines)] if lines else []
        body = markdown(_COLUMNS, _rows(one))
        parts.append(f"<details><summary>{len(one.entries)} runs</summary>\n\n{body}\n\n</details>")
    return "\n\n".join(parts)


def as_json(series: Sequence[Series], threshold: float) -> str:
    data = {
        "threshold": threshold,
        "summary": summary(series, threshold),
        "series": [
            {
                "case_id": one.case_id,
                "label": one.label,
                "backend": one.backend,
                "pass": one.pass_,
                "machine": one.machine,
                "entries": [_entry(entry) for entry in one.entries],
                "steps": [_step(one, step) for step in one.steps],
            }
            for one in series
        ],
    }
    return to_json_text(data, indent=2)


def _entry(entry: Entry) -> dict[str, Any]:
    r = entry.record
    return {
        "run": entry.run.name,
        "commit": entry.run.commit,
        "dirty": entry.run.dirty,
        "time": utc(entry.when),
        "outcome": r.outcome,
        "median_ms": r.median_ms,
        "ci_ms": r.ci_ms,
        "sm_mhz": r.reading("sm_mhz"),
    }


def _step(series: Series, step: Step) -> dict[str, Any]:
    last, first = series.timed[step.at - 1], series.timed[step.at]
    return {
        "since": first.run.commit,
        "last_before": last.run.commit,
        "ratio": step.ratio,
        "p": step.p,
        "also": also_changed(last.run, first.run),
        "next": next_command(series, step),
    }


def as_csv(series: Sequence[Series]) -> str:
    names = ("case_id", "label", "backend", "pass", "machine")
    more = ("run", "commit", "dirty", "time", "outcome", "median_ms", "sm_mhz")
    rows = []
    for one in series:
        for entry in one.entries:
            told = _entry(entry)
            rows.append([one.case_id, one.label, one.backend, one.pass_, one.machine, *(told[name] for name in more)])
    return comma_separated([*names, *more], rows)
