"""How plots look: one colour a backend, told apart without colour vision too, labels beside what they name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnbench.results.runs import Run
from attnbench.results.table import REFERENCES

# Okabe and Ito's set and darker neighbours, so that thin lines and letters stay legible on white.
_COLOURS = {
    "eager": "#767676",
    "compile": "#9a8c7c",
    "sdpa_flash": "#4aa3d8",
    "sdpa_cudnn": "#0060a0",
    "flex": "#c05f94",
    "fa3": "#5aae8c",
    "fa4": "#00805c",
    "triton": "#d98c00",
    "sm90_mma": "#8c4a1f",
    "sm90": "#d04a00",
    "flash_attn_res": "#0060a0",
    "liger": "#00805c",
    "fla": "#c05f94",
}
_OWN = ("#000000", "#6a3d9a", "#a11d33", "#3b6b00")
_MARKERS = {
    "eager": "s",
    "compile": "D",
    "sdpa_flash": "^",
    "sdpa_cudnn": "v",
    "flex": "P",
    "fa3": "d",
    "fa4": "X",
    "triton": "o",
    "sm90_mma": "h",
    "sm90": "*",
    "flash_attn_res": "v",
    "liger": "X",
    "fla": "P",
}
_OWN_MARKERS = ("p", "<", ">", "8")
GREY = "#5a5a5a"
HEAD = 0.72  # inches
EDGE = 0.14
BETWEEN = "  ·  "


def short_name(backend: str) -> str:
    """A built-in backend's name; of a user's own `file:object`, or the file alone where the object is `backend`."""
    place, _, name = backend.rpartition(":")
    if not place:
        return backend
    module = place.rsplit("/", 1)[-1].removesuffix(".py").rsplit(".", 1)[-1]
    return module if name == "backend" else f"{module}:{name}"


def colour(backend: str, backends: Sequence[str]) -> str:
    own = [b for b in backends if b not in _COLOURS]
    return _COLOURS.get(backend) or _OWN[own.index(backend) % len(_OWN)]


def marker(backend: str, backends: Sequence[str]) -> str:
    own = [b for b in backends if b not in _COLOURS]
    return _MARKERS.get(backend) or _OWN_MARKERS[own.index(backend) % len(_OWN_MARKERS)]


def line_style(backend: str, backends: Sequence[str]) -> dict[str, Any]:
    """Ours and a user's own stand out by width and full markers; references are thin."""
    subject = backend not in REFERENCES
    return {
        "color": colour(backend, backends),
        "marker": marker(backend, backends),
        "linewidth": 2.2 if subject else 1.2,
        "markersize": 10 if backend == "sm90" else 6 if subject else 5,
        "markerfacecolor": colour(backend, backends) if subject else "white",
        "linestyle": "--" if backend in ("eager", "compile") else "-",
        "zorder": 3 if subject else 2,
    }


def new_figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), dpi=160, facecolor="white")


def tidy(axes: Axes, *, grid: str = "y") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#b0b0b0")
    axes.tick_params(colors="#404040", labelsize=8.5, length=3)
    axes.grid(axis=grid, color="#e4e4e4", linewidth=0.8)  # type: ignore[arg-type]
    axes.set_axisbelow(True)


def headline(figure: Figure, title: str, run: Run, *, more: str = "") -> None:
    """Title, and below it machine, commit and method: the uppermost `HEAD` inches."""
    height = figure.get_figheight()
    left = EDGE / figure.get_figwidth()
    figure.text(left, 1 - 0.12 / height, title, fontsize=12.5, fontweight="bold", va="top", color="#202020")
    figure.text(left, 1 - 0.38 / height, _lines(figure, provenance(run, more)), fontsize=8, va="top", color=GREY)


def _lines(figure: Figure, parts: Sequence[str]) -> str:
    """The parts in lines that fit the figure; two fit under the title."""
    room = (figure.get_figwidth() - 2 * EDGE) / 0.061  # letters
    lines: list[str] = []
    for part in parts:
        if lines and len(longer := f"{lines[-1]}{BETWEEN}{part}") <= room:
            lines[-1] = longer
        else:
            lines.append(part)
    return "\n".join(lines)


def margins(
    figure: Figure, *, left: float, right: float, top: float, bottom: float, wspace: float, hspace: float = 0.2
) -> None:
    """Inches around the panels, `top` counted from below the headline; spaces between them in panel sizes."""
    width, height = figure.get_size_inches()
    figure.subplots_adjust(
        left=left / width,
        right=1 - right / width,
        top=1 - (HEAD + top) / height,
        bottom=bottom / height,
        wspace=wspace,
        hspace=hspace,
    )


def provenance(run: Run, more: str = "") -> list[str]:
    """Machine, commit, versions, day, `more`, and which backends were checked alone: what the plots lack."""
    timed = {r.backend for r in run.records.values() if r.median_ms}
    checked = dict.fromkeys(r.backend for r in run.records.values() if r.outcome == "checked")
    untimed = ", ".join(short_name(backend) for backend in checked if backend not in timed)
    cap = run.gpu.get("power_cap_w")
    machine = str(run.gpu.get("name") or "CPU") + (f", {cap:.0f} W" if cap else "")
    commit = f"commit {str(run.commit)[:10]}{' + changes' if run.dirty else ''}" if run.commit else "no commit"
    packages = run.info.get("packages") or {}
    versions = ", ".join(f"{name} {packages[name]}" for name in ("torch", "triton") if name in packages)
    parts = [machine, commit, versions, str(run.info.get("started_at", ""))[:10], more]
    parts.append(f"checked, not timed: {untimed}" if untimed else "")
    return [part for part in parts if part]


def label_ends(axes: Axes, ends: Sequence[tuple[float, str, str]], x: float, *, size: float = 8.5) -> None:
    """Names at the right ends of lines, (y, text, colour) each, moved apart where they would overlap."""
    low, high = axes.get_ylim()
    points = axes.get_window_extent().height / axes.figure.dpi * 72
    gap = (high - low) * (size * 1.15) / points
    order = sorted(ends)
    # Pool neighbours that would overlap, each pool centred on its lines: isotonic regression on y less the stack's own
    # height (Barlow et al., Statistical Inference under Order Restrictions, 1972).
    pools: list[list[float]] = []
    for i, (y, _, _) in enumerate(order):
        pools.append([y - i * gap])
        while len(pools) > 1 and sum(pools[-2]) / len(pools[-2]) > sum(pools[-1]) / len(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    level = [sum(pool) / len(pool) for pool in pools for _ in pool]
    placed = [y + i * gap for i, y in enumerate(level)]
    below = min(0.0, (placed[0] if placed else low) - low)
    placed = [y - below for y in placed]
    for (_, text, shade), y in zip(order, placed, strict=True):
        axes.annotate(
            text,
            (x, y),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            color=shade,
            fontsize=size,
            annotation_clip=False,
        )


def _key_columns(figure: Figure, backends: Sequence[str]) -> int:
    widest = 0.45 + 0.08 * max(len(short_name(b)) for b in backends)  # inches
    return max(1, min(len(backends), int((figure.get_figwidth() - 2 * EDGE) / widest)))


def key_height(figure: Figure, backends: Sequence[str]) -> float:
    """Inches that `key_row` needs below the headline, the panels' titles included."""
    return 0.3 + 0.19 * math.ceil(len(backends) / _key_columns(figure, backends))


def key_row(figure: Figure, backends: Sequence[str], *, bars: bool = False) -> None:
    """Names with their marks under the headline, for figures whose marks have no room for labels."""
    from matplotlib.lines import Line2D

    handles = []
    for backend in backends:
        style = {**line_style(backend, backends), "linestyle": "none"}
        if bars:
            style |= {"marker": "s", "markersize": 8, "markerfacecolor": style["color"]}
        handles.append(Line2D([], [], **style, label=short_name(backend)))
    columns = _key_columns(figure, backends)
    # Legends fill column by column; names read row by row.
    handles = [handles[i] for c in range(columns) for i in range(c, len(handles), columns)]
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(EDGE / figure.get_figwidth(), 1 - HEAD / figure.get_figheight()),
        ncols=columns,
        frameon=False,
        fontsize=8.5,
        handletextpad=0.2,
        columnspacing=1.4,
        borderaxespad=0,
        borderpad=0,
    )
