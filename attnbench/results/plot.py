"""Plots of a run: throughput over sequence length, speed-up by case, bandwidth of the residual phases."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from attnbench.errors import UserError
from attnbench.results.plot_cases import bandwidth, bandwidth_dots, by_case, reference_of, speed_up
from attnbench.results.plot_data import PASSES, by_speed, method, passes_of, rate_interval, rate_unit, reach
from attnbench.results.plot_style import (
    GREY,
    colour,
    headline,
    label_ends,
    line_style,
    margins,
    new_figure,
    short_name,
    tidy,
)
from attnbench.results.record import Record
from attnbench.results.runs import Run
from attnbench.results.store import safe_name

LEAST_SWEEP = 3
"""Sequence lengths that make a line worth drawing."""
MOST_BARS = 10
"""Shapes, of both phases together, that bars have room for."""


def plot_run(run: Run, out: Path | None = None, format: str = "png") -> list[Path]:
    """Draw everything that the run's timed rows allow; returns the files, none where nothing was timed.

    `out` defaults to the folder `plots` inside the run's own.

    Raises:
        UserError: the folder cannot be written.
    """
    folder = out or run.folder / "plots"
    return [_save(figure, folder / f"{name}.{format}") for name, figure in run_figures(run)]


def run_figures(run: Run) -> list[tuple[str, Figure]]:
    """Every figure that the run's timed rows allow, by a name for its file."""
    records = [r for r in run.records.values() if r.median_ms and r.outcome == "ok"]
    attention = [r for r in records if r.op == "attention"]
    figures: list[tuple[str, Figure]] = []
    sweeps = _sweeps(attention)
    for name, sweep in sweeps.items():
        figures.append((f"throughput-{name}", throughput(run, sweep, name)))
    if len(attention) > sum(map(len, sweeps.values())):
        figures.append(("throughput-by-case", by_case(run, attention)))
    reference = reference_of(records)
    if reference and (figure := speed_up(run, records, reference)) is not None:
        figures.append((f"speedup-over-{safe_name(short_name(reference))}", figure))
    residual = [r for r in records if r.op.startswith("attnres") and r.tb_s]
    if residual:
        few = len({(r.op, r.label) for r in residual}) <= MOST_BARS
        figures.append(("bandwidth-attnres", bandwidth(run, residual) if few else bandwidth_dots(run, residual)))
    return figures


def _save(figure: Figure, path: Path) -> Path:
    import matplotlib

    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    kind = path.suffix[1:]
    # No date and fixed ids, so that drawing the same run again gives the same bytes.
    metadata = {"Date": None} if kind == "svg" else {"Software": None}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with matplotlib.rc_context({"svg.hashsalt": "attnbench", "svg.fonttype": "none"}):
            figure.savefig(temporary, format=kind, metadata=metadata)
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise UserError(f"cannot write {path}: {error.strerror}. Choose another folder with --out.") from None
    return path


def _sweeps(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Dense square cases that differ in sequence length, batch and mask alone, by a name for the file."""
    groups = defaultdict(list)
    for r in records:
        case = r.case
        if case.get("layout", "dense") != "dense" or case.get("seqlen_q") != case.get("seqlen_k"):
            continue
        heads = f"h{case['heads']}" + (f"-{case['kv_heads']}" if case["kv_heads"] != case["heads"] else "")
        dim = f"d{case['head_dim']}" + (f"-{case['value_head_dim']}" if case.get("value_head_dim") else "")
        groups[f"{case['dtype']}-{heads}-{dim}"].append(r)
    return {n: g for n, g in groups.items() if len({r.case["seqlen_q"] for r in g}) >= LEAST_SWEEP}


def _thousands(value: float, _position: object = None) -> str:
    return f"{value / 1024:g}k" if value >= 1024 else f"{value:g}"


def throughput(run: Run, records: Sequence[Record], name: str) -> Figure:
    """TFLOP/s over sequence length: a row of panels a pass, a column a mask."""
    passes, backends = passes_of(records), by_speed(records)
    masks = sorted({bool(r.case["causal"]) for r in records})
    lengths = sorted({int(r.case["seqlen_q"]) for r in records})
    unit, scale = rate_unit([r.tflops for r in records], "TFLOP/s")
    names = max(0.95, 0.2 + 0.085 * max(len(short_name(b)) for b in backends))  # inches beside a panel
    panel = 3.3
    figure = new_figure(0.62 + (panel + names) * len(masks) + 0.35 * (len(masks) - 1), 1.2 + 2.9 * len(passes))
    tokens = {int(r.case["batch"]) * int(r.case["seqlen_q"]) for r in records}
    fixed = f", {_thousands(tokens.pop())} tokens" if len(tokens) == 1 else ""
    headline(figure, f"Attention {name.replace('-', ' ')}{fixed}", run, more=method(records))
    grid = figure.subplots(len(passes), len(masks), squeeze=False, sharex=True)
    margins(figure, left=0.62, right=names, top=0.2, bottom=0.5, wspace=(names + 0.35) / panel, hspace=0.22)
    dtype = str(records[0].case["dtype"])
    ceiling = (run.info.get("ceilings") or {}).get(f"matmul_{dtype}")
    for i, which in enumerate(passes):
        row = [r for r in records if r.pass_ == which]
        ends = [(rate, rate + rate_interval(r, rate)[1]) for r in row if (rate := (r.tflops or 0) * scale)]
        peak = max(reach(ends), ceiling * scale if ceiling else 0) or 1.0
        for j, causal in enumerate(masks):
            axes = grid[i][j]
            _lines(axes, [r for r in row if bool(r.case["causal"]) == causal], backends, lengths, scale, peak)
            axes.set_title(f"{PASSES[which]}, {'causal' if causal else 'full'}", fontsize=9.5, loc="left")
            if ceiling:
                axes.axhline(ceiling * scale, color=GREY, linewidth=0.9, linestyle=":")
                axes.text(lengths[0], ceiling * scale, "matmul, measured", fontsize=7.5, color=GREY, va="bottom")
            if j == 0:
                axes.set_ylabel(unit, fontsize=9)
            if i == len(passes) - 1:
                axes.set_xlabel("sequence length", fontsize=9)
    return figure


def _lines(
    axes: Axes, records: Sequence[Record], backends: Sequence[str], lengths: Sequence[int], scale: float, peak: float
) -> None:
    axes.set_ylim(0, peak * 1.08)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(list(lengths)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(_thousands))
    tidy(axes)
    ends: list[tuple[float, str, str, int]] = []
    for backend in backends:
        mine = sorted((r for r in records if r.backend == backend), key=lambda r: int(r.case["seqlen_q"]))
        if not mine:
            continue
        x = [int(r.case["seqlen_q"]) for r in mine]
        y = [(r.tflops or 0) * scale for r in mine]
        spread = list(zip(*(rate_interval(r, value) for r, value in zip(mine, y, strict=True)), strict=True))
        axes.errorbar(x, y, yerr=spread, elinewidth=0.9, capsize=2, **line_style(backend, backends))
        ends.append((y[-1], short_name(backend), colour(backend, backends), x[-1]))
    for end in {at for *_, at in ends}:  # a line that ends early carries its name there
        label_ends(axes, [(value, text, shade) for value, text, shade, at in ends if at == end], end)
