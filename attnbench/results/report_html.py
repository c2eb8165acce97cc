"""A run as one HTML file that needs nothing else: no network, no other file."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from importlib.resources import files

from attnbench.results.plot_data import rate_unit
from attnbench.results.plot_style import colour
from attnbench.results.record import Record
from attnbench.results.report_data import (
    Checked,
    anchor,
    checks,
    facts,
    failures,
    outcome_counts,
    reproduction,
    tensor_names,
    verdict,
)
from attnbench.results.report_detail import detail
from attnbench.results.report_plots import in_the_dark, inline_svg, roofline, strip_reach, strip_svg
from attnbench.results.runs import Run
from attnbench.results.store import to_json_text
from attnbench.results.table import COLUMNS, Figures, cell, figures, ordered, sentences
from attnbench.results.text import PASSES, backend_name

MOST_DETAILED = 1000
"""With more rows a page would be too heavy for a phone: plots with a line a case, and samples, are then left out."""
TEXT_COLUMNS = ("case", "backend", "pass", "outcome", "flags")
PRECISE = ("tflops", "tb_s")


def as_html(run: Run) -> str:
    """The whole page."""
    rows = ordered(run.records.values())
    backends = list(dict.fromkeys(r.backend for r in rows))
    plots, used = _plots(run, rows)
    used |= {colour(backend, backends)[1:] for backend in backends}
    sections = [
        ("summary", "Summary", _summary(run, rows)),
        ("failures", "What went wrong", _failures(run, rows)),
        ("plots", "Plots", plots),
        ("rows", "All rows", _table(run, rows, backends)),
        ("checks", "Errors by tensor", _checks(checks(rows), backends)),
        ("telemetry", "Telemetry", _telemetry(rows, backends)),
        ("provenance", "Provenance", _provenance(run)),
    ]
    shown = [(name, title, body) for name, title, body in sections if body]
    where = run.gpu.get("name") or "CPU"
    title = f"{run.scenario} on {where}"
    links = "".join(f'<a href="#{name}">{title}</a>' for name, title, _ in shown)
    body = "\n".join(f'<section id="{name}"><h2>{heading}</h2>\n{text}</section>' for name, heading, text in shown)
    day = str(run.info.get("started_at") or "")[:10]
    commit = f"commit {str(run.commit)[:10]}{' with uncommitted changes' if run.dirty else ''}" if run.commit else ""
    below = " · ".join(html.escape(part) for part in (run.name, commit, day) if part)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{html.escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>\n{_asset('report.css')}{_colours(used)}</style>\n</head>\n<body>\n"
        f'<h1>{html.escape(title)}</h1>\n<p class="muted">{below}</p>\n<nav>{links}</nav>\n{body}\n'
        f"<script>\n{_asset('report.js')}</script>\n</body>\n</html>\n"
    )


def _asset(name: str) -> str:
    return files("attnbench.results").joinpath(name).read_text(encoding="utf-8")


def _colours(used: Iterable[str]) -> str:
    """The figures' colours as CSS variables, for a light and for a dark screen."""
    shades = sorted(used)
    light = "".join(f"--s-{shade}:#{shade};" for shade in shades)
    dark = "".join(f"--s-{shade}:#{in_the_dark(shade)};" for shade in shades)
    return f":root{{{light}}}\n@media screen and (prefers-color-scheme: dark){{:root{{{dark}}}}}\n"


def _summary(run: Run, rows: Sequence[Record]) -> str:
    found = verdict(run)
    kind = {True: "good", False: "bad", None: "warn"}[found.good]
    tiles = [(str(count), outcome) for outcome, count in outcome_counts(rows)]
    tiles += [(str(len({r.case_id for r in rows})), "cases"), (str(len({r.backend for r in rows})), "backends")]
    boxes = "".join(f'<div class="tile"><b>{number}</b><span>{name}</span></div>' for number, name in tiles)
    said = "".join(
        f"<li{' class=sub' if line.startswith(' ') else ''}>{html.escape(line.strip())}</li>"
        for line in sentences(rows)
    )
    notes = "".join(f'<p class="warn">{html.escape(note)}</p>' for note in run.notes)
    return (
        f'<p class="verdict {kind}">{html.escape(found.text)}</p>\n<div class="tiles">{boxes}</div>\n{notes}'
        f'<ul class="said">{said}</ul>\n'
    )


def _name(backend: str, backends: Sequence[str]) -> str:
    shade = colour(backend, backends)[1:]
    short = html.escape(backend_name(backend))
    return f'<i class="dot" style="background:var(--s-{shade})"></i><span title="{html.escape(backend)}">{short}</span>'


def _failures(run: Run, rows: Sequence[Record]) -> str:
    """One row for all that ended alike: one case, outcome and reason."""
    alike: dict[tuple[str, str, str | None], list[Record]] = {}
    for r in failures(rows):
        alike.setdefault((r.case_id, r.outcome, r.reason), []).append(r)
    body = []
    for same in alike.values():
        r = same[0]
        who = ", ".join(
            f'{html.escape(backend_name(one.backend))} <a href="#{anchor(one)}">{PASSES.get(one.pass_, one.pass_)}</a>'
            for one in same
        )
        tail = html.escape("\n".join(r.stderr_tail))
        last = f"<details><summary>last words</summary><pre>{tail}</pre></details>" if tail else ""
        body.append(
            f'<tr class="row"><td>{html.escape(r.label)}</td><td class="wrap">{who}</td>'
            f'<td class="bad">{r.outcome}</td><td class="wrap">{html.escape(r.reason or "")}{last}<br>'
            f'<code class="muted">{html.escape(reproduction(run, *same))}</code></td></tr>\n'
        )
    heads = [("case", ""), ("backend and pass", ""), ("outcome", ""), ("reason, and how to see it again", "")]
    return _sheet("stack", heads, body) if body else ""


def _plots(run: Run, rows: Sequence[Record]) -> tuple[str, set[str]]:
    from attnbench.results.plot import run_figures
    from attnbench.results.plot_cases import reference_of, speed_up

    timed = [r for r in rows if r.outcome == "ok" and r.median_ms]
    small = len(rows) <= MOST_DETAILED
    found = [figure for _, figure in run_figures(run)] if small else []
    if (first := roofline(run, rows)) is not None:
        found.insert(0, first)
    if small and reference_of(timed) != "eager" and (eager := speed_up(run, timed, "eager")) is not None:
        found.append(eager)
    titles = {anchor(r): f"{r.label}, {backend_name(r.backend)} {r.pass_}: {r.median_ms:.4g} ms" for r in timed}
    out, used = [], set()
    for figure in found:
        text, colours = inline_svg(figure, titles)
        used |= colours
        out.append(f"<figure>{text}</figure>\n")
    return "".join(out), used


def _sheet(kind: str, heads: Sequence[tuple[str, str]], body: Sequence[str]) -> str:
    """A sortable table in a box that scrolls sideways; `heads` are (title, class), of which `plain` sorts nothing."""
    cells = "".join(
        f'<th scope="col">{html.escape(title)}</th>'
        if name == "plain"
        else f'<th scope="col" class="{name}"><button type="button">{html.escape(title)}</button></th>'
        for title, name in heads
    )
    classes = f' class="{kind}"' if kind else ""
    rows = "".join(body)
    table = f"<table{classes}><thead><tr>{cells}</tr></thead>\n<tbody>\n{rows}</tbody></table>"
    return f'<div class="scroll">{table}</div>\n'


def _table(run: Run, rows: Sequence[Record], backends: Sequence[str]) -> str:
    if not rows:
        return '<p class="muted">None: the run ended before its first row.</p>\n'
    numbers = figures(rows)
    reach = strip_reach(rows) if len(rows) <= MOST_DETAILED else None
    titles = {name: column.title for name, column in COLUMNS if any(row[name] not in (None, "") for row in numbers)}
    first = [*TEXT_COLUMNS[:4]]
    rest = [name for name in titles if name not in (*first, "sm_mhz", "power_w")]  # telemetry has a table of its own
    columns = [(name, titles[name]) for name in (*first, *rest)]
    scales, heads = {}, [("", "plain")]
    for name, title in columns:
        if name in PRECISE:
            title, scales[name] = rate_unit([row[name] for row in numbers], title)
        heads.append((title, "" if name in TEXT_COLUMNS else "n"))
        if name == "spread" and reach:
            heads.append(("samples", "plain"))
    body = []
    for r, row in zip(rows, numbers, strict=True):
        cells = "".join(_cells(r, row, name, scales, reach, backends) for name, _ in columns)
        folded = detail(run, r, whole=reach is not None)
        body.append(
            f'<tr class="row" id="{anchor(r)}"><td><button class="more" type="button" aria-expanded="false" '
            f'aria-label="detail"></button></td>{cells}</tr>\n'
            f'<tr class="detail" hidden><td colspan="{len(heads)}"><div>{folded}</div></td></tr>\n'
        )
    strips = (
        f"Samples: each as a stroke, ± {100 * reach:.2g} % around the median; the band is its 95 % interval."
        if reach
        else f"More than {MOST_DETAILED:,} rows: their samples and the plots by case are left out; the run has them."
    )
    return (
        '<p class="muted">A click on a head sorts; the arrow at the left of a row opens its figures, and the command '
        f"that runs it again. {strips}</p>\n"
        '<p><input id="filter" type="search" placeholder="filter: causal sm90 fwd" aria-label="filter rows"></p>\n'
        + _sheet("rows", heads, body)
    )


def _cells(
    r: Record, row: Figures, name: str, scales: dict[str, float], reach: float | None, backends: Sequence[str]
) -> str:
    text = html.escape(cell(name, row, scales))
    if name == "backend":
        return f'<td data-v="{html.escape(r.backend)}">{_name(r.backend, backends)}</td>'
    if name == "outcome":
        kind = {"ok": "good", "checked": "good", "unsupported": "muted"}.get(r.outcome, "bad")
        return f'<td class="{kind}">{text}</td>'
    if name in TEXT_COLUMNS:
        return f"<td{' class=flag' if name == 'flags' else ''}>{text}</td>"
    value = row[name]
    out = f'<td class="n" data-v="{"" if value is None else f"{value:.6g}"}">{text}</td>'
    if name == "spread" and reach:
        out += f"<td>{strip_svg(r, reach) if r.samples_ms and r.median_ms else ''}</td>"
    return out


def _checks(entries: Sequence[Checked], backends: Sequence[str]) -> str:
    if not entries:
        return ""
    names = tensor_names(entries)
    body = []
    for entry in entries:
        cells = ""
        for name in names:
            check = entry.tensors.get(name)
            if check is None:
                cells += '<td data-v=""></td>'
                continue
            ratio = check.budget_ratio
            kind = "n" if check.passed and ratio <= 0.5 else "n high" if check.passed else "n over"
            told = f"max |error| {check.max_abs:.3g} at {check.worst}, relative Frobenius {check.rel_fro:.3g}"
            told += f"; {check.message}" if check.message else ""
            cells += f'<td class="{kind}" data-v="{ratio}" title="{html.escape(told)}">{ratio:.2f}</td>'
        r = entry.record
        body.append(
            f'<tr class="row"><td>{html.escape(r.label)}</td><td data-v="{html.escape(r.backend)}">'
            f"{_name(r.backend, backends)}</td>{cells}</tr>\n"
        )
    heads = [("case", ""), ("backend", ""), *((name, "n") for name in names)]
    return (
        '<p class="muted">Share of the error budget against fp64: 1 is all of it. Above a half is tinted, a failure '
        "filled. Each is the worst of the row's passes.</p>\n" + _sheet("", heads, body)
    )


_READINGS = (
    ("SM MHz", "sm_mhz", "{:.0f}"),
    ("lowest", "sm_mhz_min", "{:.0f}"),
    ("memory MHz", "mem_mhz", "{:.0f}"),
    ("W", "watts", "{:.0f}"),
    ("most W", "watts_max", "{:.0f}"),
    ("°C", "celsius", "{:.0f}"),
)


def _telemetry(rows: Sequence[Record], backends: Sequence[str]) -> str:
    seen = [r for r in rows if r.telemetry.get("sm_mhz") and r.median_ms]
    if not seen:
        return ""
    heads = [("case", ""), ("backend", ""), ("pass", ""), *((title, "n") for title, _, _ in _READINGS)]
    heads += [("mJ a call", "n"), ("TFLOP/s a W", "n"), ("SM Mcycles", "n"), ("of peak at clock", "n")]
    heads += [("clock held by", ""), ("others on the board", "")]
    body = []
    for r in seen:
        mhz, watts = (
            r.reading("settled_sm_mhz") or r.reading("sm_mhz"),
            r.reading("settled_watts") or r.reading("watts"),
        )
        share = (r.peak_share or {}).get("at_clock")
        numbers = [(r.reading(key), text) for _, key, text in _READINGS]
        numbers += [(1e3 * r.energy_j if r.energy_j else None, "{:,.1f}")]
        numbers += [(r.tflops / watts if r.tflops and watts else None, "{:.2g}")]
        numbers += [(r.median_ms * mhz / 1e3 if r.median_ms and mhz else None, "{:.3g}")]
        numbers += [(share, "{:.0%}")]
        figures_ = "".join(
            f'<td class="n" data-v="{"" if value is None else f"{value:.6g}"}">'
            f"{'' if value is None else text.format(value)}</td>"
            for value, text in numbers
        )
        reasons = ", ".join(map(str, r.telemetry.get("clock_reasons") or []))
        others = ", ".join(map(str, r.telemetry.get("other_processes") or []))
        body.append(
            f'<tr class="row"><td>{html.escape(r.label)}</td><td data-v="{html.escape(r.backend)}">'
            f"{_name(r.backend, backends)}</td><td>{PASSES.get(r.pass_, r.pass_)}</td>{figures_}"
            f"<td>{html.escape(reasons)}</td><td>{html.escape(others)}</td></tr>\n"
        )
    return _sheet("", heads, body)


def _provenance(run: Run) -> str:
    pairs = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>" for name, value in facts(run))
    scenario = html.escape(str(run.info.get("scenario_text") or ""))
    stored = html.escape(to_json_text({k: v for k, v in run.info.items() if k != "scenario_text"}, indent=2))
    out = f'<dl class="facts">{pairs}</dl>\n'
    if scenario:
        out += f"<details><summary>the scenario</summary><pre>{scenario}</pre></details>\n"
    return out + f"<details><summary>run.json</summary><pre>{stored}</pre></details>\n"
