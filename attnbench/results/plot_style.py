"""How plots look: one colour a backend, told apart without colour vision too, labels beside what they name."""

from __future__ import annotations

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
_MARKERS = {"eager": "s", "compile": "D", "sdpa_flash": "^", "sdpa_cudnn": "v", "flex": "P", "fa4": "X", "fa3": "d"}
GREY = "#5a5a5a"


def short_name(backend: str) -> str:
    """A built-in backend's name; of a user's own the object's."""
    return backend.rsplit(":", 1)[-1]


def colour(backend: str, backends: Sequence[str]) -> str:
    own = [b for b in backends if b not in _COLOURS]
    return _COLOURS.get(backend) or _OWN[own.index(backend) % len(_OWN)]


def line_style(backend: str, backends: Sequence[str]) -> dict[str, Any]:
    """Ours and a user's own stand out by width and full markers; references are thin."""
    subject = backend not in REFERENCES
    return {
        "color": colour(backend, backends),
        "marker": _MARKERS.get(backend, "o"),
        "linewidth": 2.2 if subject else 1.2,
        "markersize": 6 if subject else 5,
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


def headline(figure: Figure, title: str, run: Run, *, more: str = "") -> float:
    """Title, and below it machine, commit and method; returns the height (0 to 1) that is left below them."""
    height = figure.get_figheight()
    left = 0.14 / figure.get_figwidth()
    figure.text(left, 1 - 0.12 / height, title, fontsize=12.5, fontweight="bold", va="top", color="#202020")
    figure.text(left, 1 - 0.38 / height, provenance(run, more), fontsize=8, va="top", color=GREY)
    return 1 - 0.72 / height


def provenance(run: Run, more: str = "") -> str:
    cap = run.gpu.get("power_cap_w")
    machine = str(run.gpu.get("name") or "CPU") + (f", {cap:.0f} W" if cap else "")
    commit = f"commit {str(run.commit)[:10]}{' + changes' if run.dirty else ''}" if run.commit else "no commit"
    packages = run.info.get("packages") or {}
    versions = ", ".join(f"{name} {packages[name]}" for name in ("torch", "triton") if name in packages)
    parts = [machine, commit, versions, str(run.info.get("started_at", ""))[:10], more]
    return "  ·  ".join(part for part in parts if part)


def label_ends(axes: Axes, ends: Sequence[tuple[float, str, str]], x: float, *, size: float = 8.5) -> None:
    """Names at the right ends of lines, (y, text, colour) each, moved apart where they would overlap."""
    low, high = axes.get_ylim()
    points = axes.get_window_extent().height / axes.figure.dpi * 72
    gap = (high - low) * (size * 1.15) / points
    placed: list[float] = []
    order = sorted(ends)
    for y, _, _ in order:
        placed.append(max(y, placed[-1] + gap) if placed else y)
    # Pushed upwards only, the stack may have left the top: push back down from there.
    top = high
    for i in range(len(placed) - 1, -1, -1):
        placed[i] = min(placed[i], top)
        top = placed[i] - gap
    for (_, text, shade), y in zip(order, placed, strict=True):
        axes.annotate(
            text, (x, y), xytext=(7, 0), textcoords="offset points", va="center", color=shade, fontsize=size,
            annotation_clip=False,
        )  # fmt: skip


def key_row(figure: Figure, axes: Axes, backends: Sequence[str], top: float, *, bars: bool = False) -> None:
    """One row of names with their marks under the headline, for figures whose marks have no room for labels."""
    from matplotlib.lines import Line2D

    handles = []
    for backend in backends:
        style = {**line_style(backend, backends), "linestyle": "none"}
        if bars:
            style |= {"marker": "s", "markersize": 8, "markerfacecolor": style["color"]}
        handles.append(Line2D([], [], **style, label=short_name(backend)))
    left = axes.get_position().x0
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(left, top), ncols=len(backends), frameon=False,
        fontsize=8.5, handletextpad=0.2, columnspacing=1.4, borderaxespad=0,
    )  # fmt: skip
