"""Plots with one row or one group of bars a case: throughput, speed-up, and the residual phases' bandwidth."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from attnbench.results.plot_data import PASSES, by_speed, method, passes_of, rate_interval, rate_unit, reach
from attnbench.results.plot_style import (
    GREY,
    colour,
    headline,
    key_height,
    key_row,
    line_style,
    margins,
    new_figure,
    short_name,
    tidy,
)
from attnbench.results.record import Record
from attnbench.results.runs import Run
from attnbench.results.table import REFERENCES

_UNFUSED = ("eager", "compile")
LEAST_GAP = 0.11
"""Between ticks, as a share of a panel's width: a label's own width."""
RESIDUAL_TITLE = "Attention residuals, bandwidth over the least bytes"


def reference_of(records: Sequence[Record]) -> str | None:
    """The scenario's baseline; else eager, else the first backend that another one can be held against."""
    backends = list(dict.fromkeys(r.backend for r in records))
    named = [r.baseline for r in records if r.baseline in backends and r.baseline != r.backend]
    choice = (
        max(set(named), key=named.count) if named else next((b for b in ("eager", *REFERENCES) if b in backends), None)
    )
    return choice if len(backends) > 1 else None


def _name(record: Record) -> str:
    return record.label if record.op == "attention" else f"phase {record.op[-1]}, {record.label}"


def _dots(
    run: Run,
    records: Sequence[Record],
    title: str,
    label: str,
    value: Callable[[Record], float | None],
    *,
    times: bool = False,
    ceiling: tuple[str, float] | None = None,
) -> Figure:
    """One row a case, one mark a backend, one panel a pass. `times`: a log axis of factors, not one from 0."""
    passes, backends = passes_of(records), by_speed(records)
    cases = list(dict.fromkeys((r.op, r.case_id) for r in records))
    names = {r.case_id: _name(r) for r in records}
    height = 0.24 * len(cases)
    margin = 0.35 + 0.071 * max(map(len, names.values()))  # inches that the longest name takes
    figure = new_figure(margin + 0.4 + 3.9 * len(passes), 1.75 + height)
    headline(figure, title, run, more=method(records))
    margins(figure, left=margin, right=0.25, top=key_height(figure, backends), bottom=0.5, wspace=0.08)
    panels = figure.subplots(1, len(passes), squeeze=False, sharey=True, sharex=True)[0]
    rows = {case_id: i for i, (_, case_id) in enumerate(cases)}
    for axes, which in zip(panels, passes, strict=True):
        tidy(axes, grid="both")
        if times:
            axes.set_xscale("log")
        for backend in backends:
            found = [
                (v, rows[r.case_id], r)
                for r in records
                if r.backend == backend and r.pass_ == which and (v := value(r))
            ]
            if not found:
                continue
            spread = list(zip(*(rate_interval(r, v) for v, _, r in found), strict=True))
            style = {**line_style(backend, backends), "linestyle": "none"}
            axes.errorbar([v for v, *_ in found], [y for _, y, _ in found], xerr=spread, elinewidth=0.9, **style)
        axes.set_title(PASSES[which], fontsize=9.5, loc="left")
        axes.set_xlabel(label, fontsize=9)
        if ceiling:
            axes.axvline(ceiling[1], color=GREY, linewidth=0.9, linestyle=":")
            axes.annotate(
                f"{ceiling[0]}, measured",
                (ceiling[1], 1),
                xycoords=("data", "axes fraction"),
                xytext=(0, 3),
                textcoords="offset points",
                ha="right",
                fontsize=7.5,
                color=GREY,
            )
    if times:
        _times_axis(panels[0])
    else:
        ends = [(v, v + rate_interval(r, v)[1]) for r in records if (v := value(r))]
        panels[0].set_xlim(0, 1.05 * max(reach(ends), ceiling[1] if ceiling else 0) or 1.0)
    for axes in panels if times else ():
        axes.axvline(1, color="#909090", linewidth=1)
    panels[0].set_yticks(range(len(cases)), [names[case_id] for _, case_id in cases])
    panels[0].set_ylim(len(cases) - 0.4, -0.6)
    key_row(figure, backends)
    return figure


def _times_axis(axes: Axes) -> None:
    """A log axis of factors with as many ticks as their labels have room for."""
    low, high = axes.get_xlim()
    low, high = min(low, 0.9), max(high, 1.1)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    choices = [[s * 10.0**e for e in decades for s in steps] for steps in ((1, 2, 5), (1, 3), (1,))]
    choices += [[10.0**e for e in decades if e % step == 0] for step in (2, 3)]
    if high < 5:
        choices += [[n * step for n in range(1, int(high / step) + 1)] for step in (0.5, 0.2, 0.1, 0.05, 0.02)]
    room = LEAST_GAP * math.log(high / low)
    shown = [[t for t in choice if low <= t <= high] for choice in choices]
    ticks = max((c for c in shown if all(math.log(b / a) >= room for a, b in pairwise(c))), key=len)
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}×"))


def by_case(run: Run, records: Sequence[Record]) -> Figure:
    """Throughput of every attention case; with the measured matmul ceiling where all share one dtype."""
    unit, scale = rate_unit([r.tflops for r in records], "TFLOP/s")
    dtypes = {str(r.case["dtype"]) for r in records}
    ceiling = (run.info.get("ceilings") or {}).get(f"matmul_{dtypes.pop()}") if len(dtypes) == 1 else None
    return _dots(
        run,
        records,
        "Attention throughput by case",
        unit,
        lambda r: r.tflops * scale if r.tflops else None,
        ceiling=("matmul", ceiling * scale) if ceiling else None,
    )


def speed_up(run: Run, records: Sequence[Record], reference: str) -> Figure | None:
    """Times faster than the reference: against its interleaved median where the record has one.

    None where no case has both. PyTorch without a fused kernel is left out beside a faster reference: it would squeeze
    the others into a corner, and the plots of throughput have it.
    """
    measured = {(r.case_id, r.pass_): r.median_ms for r in records if r.backend == reference}

    def times(r: Record) -> float | None:
        if r.backend in _UNFUSED and reference not in _UNFUSED:
            return None
        interleaved = r.baseline_median_ms if r.baseline == reference else None
        other = interleaved or measured.get((r.case_id, r.pass_))
        return other / r.median_ms if other and r.median_ms and r.backend != reference else None

    shown = [r for r in records if times(r)]
    name = short_name(reference)
    return _dots(run, shown, f"Speed-up over {name}", f"speed, {name} = 1×", times, times=True) if shown else None


def bandwidth(run: Run, records: Sequence[Record]) -> Figure:
    """TB/s over the least bytes: bars by shape, a row of panels a phase, a column a pass."""
    passes, backends = passes_of(records), by_speed(records)
    phases = sorted({r.op for r in records})
    figure = new_figure(1.0 + 4.6 * len(passes), 1.75 + 2.6 * len(phases))
    headline(figure, RESIDUAL_TITLE, run, more=method(records))
    grid = figure.subplots(len(phases), len(passes), squeeze=False, sharey=True)
    margins(figure, left=0.62, right=0.2, top=key_height(figure, backends), bottom=0.75, wspace=0.06, hspace=0.6)
    ceiling = (run.info.get("ceilings") or {}).get("copy")
    unit, scale = rate_unit([r.tb_s for r in records], "TB/s")
    for i, phase in enumerate(phases):
        for j, which in enumerate(passes):
            axes = grid[i][j]
            tidy(axes)
            _bars(axes, [r for r in records if (r.op, r.pass_) == (phase, which)], backends, scale)
            axes.set_title(f"phase {phase[-1]}, {PASSES[which]}", fontsize=9.5, loc="left")
            if ceiling:
                axes.axhline(ceiling * scale, color=GREY, linewidth=0.9, linestyle=":")
                axes.annotate(
                    "copy, measured",
                    (1, ceiling * scale),
                    xycoords=("axes fraction", "data"),
                    xytext=(0, 2),
                    textcoords="offset points",
                    va="bottom",
                    ha="right",
                    fontsize=7.5,
                    color=GREY,
                )
            if j == 0:
                axes.set_ylabel(unit, fontsize=9)
    key_row(figure, backends, bars=True)
    return figure


def bandwidth_dots(run: Run, records: Sequence[Record]) -> Figure:
    """The same as one row a shape, for runs with many."""
    unit, scale = rate_unit([r.tb_s for r in records], "TB/s")
    copy = (run.info.get("ceilings") or {}).get("copy")
    return _dots(
        run,
        records,
        RESIDUAL_TITLE,
        unit,
        lambda r: r.tb_s * scale if r.tb_s else None,
        ceiling=("copy", copy * scale) if copy else None,
    )


def _bars(axes: Axes, records: Sequence[Record], backends: Sequence[str], scale: float) -> None:
    labels = list(dict.fromkeys(r.label for r in records))
    wide = min(0.8 / len(backends), 0.25)
    for k, backend in enumerate(backends):
        mine = [r for r in records if r.backend == backend]
        x = [labels.index(r.label) + (k - (len(backends) - 1) / 2) * wide for r in mine]
        y = [(r.tb_s or 0.0) * scale for r in mine]
        if not mine:
            continue
        spread = list(zip(*(rate_interval(r, v) for r, v in zip(mine, y, strict=True)), strict=True))
        axes.bar(
            x,
            y,
            wide * 0.92,
            yerr=spread,
            color=colour(backend, backends),
            error_kw={"elinewidth": 0.8, "ecolor": "#303030"},
        )
        for at, value in zip(x, y, strict=True):
            axes.annotate(
                f"{value:.2f}" if value >= 0.1 else f"{value:.1g}",
                (at, value),
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
                va="bottom",
                fontsize=6.5,
                color=colour(backend, backends),
            )
    axes.set_xticks(range(len(labels)), [label.replace(" ", "\n") for label in labels])  # narrow enough for any bars
    axes.set_xlim(-0.5, max(len(labels), 2) - 0.5)
