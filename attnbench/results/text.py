"""Aligned text tables that fit the terminal, and the same rows as Markdown or CSV.

Plain strings on purpose: importing a terminal library would cost a fifth of the start-up budget.
"""

from __future__ import annotations

import csv
import io
import os
import shutil
import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

_CODES = {"red": "31", "green": "32", "yellow": "33", "dim": "2", "bold": "1"}
STYLES = {
    "ok": "green",
    "checked": "green",
    "improved": "green",
    "regressed": "red",
    "check-failed": "red",
    "ambiguous": "yellow",
    "incomparable": "yellow",
    "missing": "yellow",
    "same": "dim",
    "unsupported": "dim",
}
"""Colour by what a cell of a `styled` column says; other words there (`oom`, `crashed` …) are red."""


@dataclass(frozen=True)
class Column:
    """A column. Where the terminal is too narrow, columns go in order of `drop`, largest first; 0 always stays."""

    title: str
    align: str = "<"
    drop: int = 0
    styled: bool = False
    shrink: bool = False  # loses letters, down to 20, before any column goes; else the first one does so last
    fold: bool = False  # what is too long goes on in lines below instead of ending in an ellipsis


PASSES = {"forward": "fwd", "backward": "bwd", "forward_backward": "fwd+bwd"}
"""Short names of passes, so that eighty columns have room for figures."""


def backend_name(backend: str) -> str:
    """A backend as tables show it: of a user's own file, `my_kernel.py:MINE` without the folders."""
    return backend.rsplit("/", 1)[-1]


def terminal_width() -> int | None:
    """Columns to fit into: those of the terminal or of COLUMNS; None (no limit) in a pipe."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit():
        return shutil.get_terminal_size((80, 24)).columns
    return None


def colours() -> bool:
    """Whether to colour: on a terminal that can, unless NO_COLOR is set (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, style: str | None) -> str:
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if style and colours() else text


def text_width(text: str) -> int:
    """Terminal cells: East Asian wide characters take two, combining marks none."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _pad(text: str, width: int, align: str) -> str:
    space = " " * (width - text_width(text))
    return space + text if align == ">" else text + space


def _shorten(text: str, width: int) -> str:
    while text_width(text) > width and text:
        text = text[:-2] + "…" if text.endswith("…") else text[:-1] + "…"
    return text


def aligned(columns: Sequence[Column], rows: Sequence[Sequence[str]], *, width: int | None = None) -> str:
    """One line a row, columns two spaces apart. What does not fit `width` is left out, and named in a last line."""
    keep = list(range(len(columns)))
    wide = [max([text_width(c.title), *(text_width(row[i]) for row in rows)]) for i, c in enumerate(columns)]
    full = list(wide)
    keep = [i for i in keep if any(row[i] for row in rows)] or keep  # a column without a single figure says nothing
    hidden: list[str] = []
    for i in keep:
        if width and columns[i].shrink and (over := sum(wide[j] + 2 for j in keep) - 2 - width) > 0:
            wide[i] = max(min(20, wide[i]), wide[i] - over)
    while width and sum(wide[i] + 2 for i in keep) - 2 > width:
        least = max(keep, key=lambda i: (columns[i].drop, i))
        if columns[least].drop == 0:
            break
        keep.remove(least)
        hidden.insert(0, columns[least].title)
    for i in keep:
        if width and columns[i].shrink and (spare := width + 2 - sum(wide[j] + 2 for j in keep)) > 0:
            wide[i] = min(full[i], wide[i] + spare)  # room that dropped columns left
    if width and (over := sum(wide[i] + 2 for i in keep) - 2 - width) > 0:
        wide[keep[0]] = max(12, wide[keep[0]] - over)
    lines = ["  ".join(_pad(columns[i].title, wide[i], columns[i].align) for i in keep).rstrip()]
    lines[0] = paint(lines[0], "bold")
    for row in rows:
        folded = {i: wrap(row[i], wide[i])[1:] for i in keep if columns[i].fold and text_width(row[i]) > wide[i]}
        cells = []
        for i in keep:
            text = wrap(row[i], wide[i])[0] if i in folded else row[i]
            cell = _pad(_shorten(text, wide[i]), wide[i], columns[i].align)
            style = STYLES.get(row[i].split(" ")[0], "red") if columns[i].styled and row[i] else None
            cells.append(paint(cell, style))
        lines.append("  ".join(cells).rstrip())
        for n in range(max(map(len, folded.values()), default=0)):
            rest = [folded[i][n] if n < len(folded.get(i, ())) else "" for i in keep]
            lines.append("  ".join(_pad(cell, wide[i], "<") for i, cell in zip(keep, rest, strict=True)).rstrip())
    if hidden:
        note = f"Not shown for want of width: {', '.join(hidden)} (a wider terminal, or --format csv, has them)."
        lines += [paint(line, "dim") for line in wrap(note, width)]
    return "\n".join(lines)


def wrap(text: str, width: int | None = None, indent: str = "") -> list[str]:
    """Lines of at most `width` cells, later ones indented; words (and commands) are never broken."""
    import textwrap

    if not width:
        return [text]
    return textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def markdown(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> str:
    """A GitHub table; pipes in cells are escaped."""
    lines = [
        "| " + " | ".join(c.title for c in columns) + " |",
        "|" + "|".join("---:" if c.align == ">" else "---" for c in columns) + "|",
    ]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def comma_separated(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """CSV with a header; None is an empty cell."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(titles)
    writer.writerows(["" if cell is None else cell for cell in row] for row in rows)
    return out.getvalue().rstrip("\n")
