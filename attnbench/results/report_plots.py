"""Figures of a report: the roofline, and any figure as SVG inside a page, in the page's colours.

Roofline: Williams, Waterman and Patterson, Communications of the ACM 52(4), 2009. Intensity is exact FLOPs over the
least bytes of a pass, both as stored, so a case has one place on the axis whatever kernel ran it.
"""

from __future__ import annotations

import colorsys
import html
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from attnbench.results.plot_data import PASSES, by_speed, passes_of, rate_unit
from attnbench.results.plot_style import (
    GREY,
    colour,
    headline,
    key_height,
    key_row,
    margins,
    marker,
    new_figure,
    tidy,
)
from attnbench.results.record import Record
from attnbench.results.report_data import anchor
from attnbench.results.runs import Run
from attnbench.results.table import REFERENCES


@dataclass(frozen=True)
class Roof:
    """`compute` in TFLOP/s and `memory` in TB/s."""

    name: str
    compute: float
    memory: float
    measured: bool

    def at(self, intensity: np.ndarray) -> np.ndarray:
        """TFLOP/s that this roof allows at each FLOP/byte."""
        return np.minimum(self.compute, self.memory * intensity)


def roofs(run: Run, dtypes: Sequence[str]) -> list[Roof]:
    """The measured and the datasheet roof of every dtype, as far as the run knows them."""
    ceilings, peak = run.info.get("ceilings") or {}, run.gpu.get("peak") or {}
    found = []
    for dtype in dtypes:
        matmul, copy = ceilings.get(f"matmul_{dtype}"), ceilings.get("copy")
        if matmul and copy:
            found.append(Roof(dtype, matmul, copy, True))
    for name, kinds in (("tensor16", ("bf16", "fp16")), ("fp32", ("fp32",))):
        if peak.get(name) and peak.get("tb_s") and any(dtype in kinds for dtype in dtypes):
            found.append(Roof("fp32" if name == "fp32" else "16-bit", peak[name], peak["tb_s"], False))
    return found


def _drawn(records: Sequence[Record]) -> list[Record]:
    return [r for r in records if r.outcome == "ok" and r.median_ms and r.tflops and r.flops and r.bytes]


def roofline(run: Run, records: Sequence[Record]) -> Figure | None:
    """TFLOP/s over FLOP/byte of every timed row, a panel a pass, under the roofs; None where nothing was timed.

    Points link to `#anchor` of their row.
    """
    rows = _drawn(records)
    if not rows:
        return None
    backends, passes = by_speed(rows), passes_of(rows)
    unit, scale = rate_unit([r.tflops for r in rows], "TFLOP/s")
    over = roofs(run, sorted({str(r.case.get("dtype")) for r in rows}))
    figure = new_figure(1.0 + 4.3 * len(passes), 5.0)
    headline(figure, "Roofline: rate over arithmetic intensity", run, more="exact FLOPs over the least bytes")
    margins(figure, left=0.72, right=0.2, top=key_height(figure, backends), bottom=0.55, wspace=0.06)
    panels = figure.subplots(1, len(passes), squeeze=False, sharex=True, sharey=True)[0]
    intensity = [(r.flops or 1) / (r.bytes or 1) for r in rows]
    rates = [(r.tflops or 0) * scale for r in rows]
    low, high = min(intensity) / 2.5, max(intensity) * 2.5
    top = max([*rates, *(scale * float(roof.at(np.array([high]))[0]) for roof in over)])
    bottom = min([*rates, *(scale * float(roof.at(np.array([low]))[0]) for roof in over)])
    for axes, which in zip(panels, passes, strict=True):
        axes.set_xscale("log")
        axes.set_yscale("log")
        for axis, span in ((axes.xaxis, high / low), (axes.yaxis, top / bottom)):
            if span < 1000:
                axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_formatter(NullFormatter())
        tidy(axes, grid="both")
        _roofs(axes, over, low, high, scale)
        for backend in backends:
            _points(axes, [r for r in rows if (r.backend, r.pass_) == (backend, which)], backends, scale)
        axes.set_title(PASSES[which], fontsize=9.5, loc="left")
        axes.set_xlabel("arithmetic intensity, FLOP/byte", fontsize=9)
    panels[0].set_xlim(low, high)
    panels[0].set_ylim(bottom / 2, top * 2)
    panels[0].set_ylabel(unit, fontsize=9)
    key_row(figure, backends)
    return figure


def _roofs(axes: Axes, over: Sequence[Roof], low: float, high: float, scale: float) -> None:
    x = np.geomspace(low, high, 200)
    for roof in over:
        style = "-" if roof.measured else "--"
        axes.plot(x, scale * roof.at(x), color=GREY, linewidth=1.1 if roof.measured else 0.9, linestyle=style, zorder=1)
        source = "measured" if roof.measured else "datasheet"
        sloped = roof.memory * high < roof.compute  # the flat part lies beyond the axis
        text = f"{roof.memory:.3g} TB/s {source}" if sloped else f"{roof.name} {roof.compute:.0f} TFLOP/s {source}"
        below = sloped and roof.measured  # where a slope leaves room: under its left end, over its right one
        at = low if below else high
        axes.annotate(
            text,
            (at, scale * float(roof.at(np.array([at]))[0])),
            xytext=(12, -2) if below else (-2, 2),
            textcoords="offset points",
            ha="left" if below else "right",
            va="top" if below else "bottom",
            fontsize=7.5,
            color=GREY,
        )


def _points(axes: Axes, records: Sequence[Record], backends: Sequence[str], scale: float) -> None:
    if not records:
        return
    backend = records[0].backend
    shade = colour(backend, backends)
    own = backend not in REFERENCES
    points = axes.scatter(
        [(r.flops or 1) / (r.bytes or 1) for r in records],
        [(r.tflops or 0) * scale for r in records],
        s=(110 if backend == "sm90" else 44) if own else 30,
        marker=marker(backend, backends),
        facecolors=shade if own else "white",
        edgecolors=shade,
        linewidths=1.0,
        zorder=3 if own else 2,
    )
    points.set_urls([f"#{anchor(r)}" for r in records])


def inline_svg(figure: Figure, titles: Mapping[str, str]) -> tuple[str, set[str]]:
    """The figure as an `<svg>` element whose colours are CSS variables `--s-rrggbb`, and the colours that occur.

    `titles` gives what is shown over a link, by its anchor.
    """
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "attnbench", "svg.fonttype": "none"}):
        figure.savefig(out, format="svg", metadata={"Date": None}, transparent=True)
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) width="([\d.]+)pt"', r'\1 style="width:\2pt" role="img"', text, count=1)
    text = re.sub(r'\sid="(?:figure|axes|patch|line2d|text|matplotlib\.[a-z0-9]+|xtick|ytick|[A-Za-z]+)_\d+"', "", text)
    used: set[str] = set()

    def variable(found: re.Match[str]) -> str:
        used.add(found[1])
        return f"var(--s-{found[1]})"

    text = re.sub(r"(?<=: )#([0-9a-f]{6})\b", variable, text)

    def link(found: re.Match[str]) -> str:
        told = html.escape(titles.get(found[1], ""))
        return f'<a href="#{found[1]}"><title>{told}</title>'

    return re.sub(r'<a xlink:href="#([^"]+)"[^>]*>', link, text), used


def in_the_dark(shade: str) -> str:
    """A colour `rrggbb` as it is shown on a dark page: greys turned round, others light enough to be read."""
    red, green, blue = (int(shade[i : i + 2], 16) / 255 for i in (0, 2, 4))
    hue, light, saturation = colorsys.rgb_to_hls(red, green, blue)
    light = 0.93 - 0.81 * light if saturation < 0.12 else max(light, 0.62)
    return "".join(f"{round(255 * part):02x}" for part in colorsys.hls_to_rgb(hue, light, saturation))


def strip_svg(record: Record, reach: float, *, width: int = 120, height: int = 16) -> str:
    """Every sample as a stroke, from `-reach` to `reach` around the median (shares of it), with the interval behind.

    Samples beyond stand at the edge.
    """
    median = record.median_ms or 1.0

    def place(ms: float) -> float:
        return width / 2 * (1 + max(-1.0, min(1.0, (ms / median - 1) / reach)))

    low, high = record.ci_ms or (median, median)
    left, right = place(low), max(place(high), place(low) + 1)
    strokes = "".join(f"M{place(ms):.1f} 3V{height - 3}" for ms in record.samples_ms)
    return (
        f'<svg class="strip" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{len(record.samples_ms)} samples"><rect x="{left:.1f}" y="0" width="{right - left:.1f}" '
        f'height="{height}"/><path d="{strokes}"/></svg>'
    )


def strip_reach(records: Sequence[Record]) -> float:
    """One scale for all strips of a run: wide enough for 95 % of the samples, between 1 % and 20 % of the median."""
    away = [abs(ms / r.median_ms - 1) for r in records if r.median_ms for ms in r.samples_ms]
    return min(0.2, max(0.01, float(np.quantile(away, 0.95)))) if away else 0.01
