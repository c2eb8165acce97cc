"""`attnbench build`: compiles every native kernel ahead of time and says what the compiler made of it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from attnbench.errors import UserError, did_you_mean
from attnbench.results.store import to_json_text
from attnbench.results.text import Column, aligned, comma_separated, markdown, terminal_width

_COLUMNS = [
    Column("backend", drop=3),
    Column("kernel", shrink=True, fold=True),
    Column("registers", ">"),
    Column("spills", ">"),
    Column("shared", ">", drop=2),
    Column("SASS", drop=4),
    Column("seconds", ">"),
]


def build(*, backend: Sequence[str] = (), force: bool = False, format: str = "table", jobs: int | None = None) -> int:
    """Build all specialisations of the named backends (default: all native ones) in `jobs` processes (default: one a
    core). Needs no GPU. Returns 0, or 3 where a build failed, spilled registers or had its wgmma serialised.

    Raises:
        UserError: a backend is not a native one.
    """
    from kernels_native import catalogue

    for name in backend:
        if name not in catalogue.BACKENDS:
            raise UserError(
                f"no native backend {name!r}: want {' or '.join(catalogue.BACKENDS)}."
                + did_you_mean(name, catalogue.BACKENDS)
            )
    wanted = list(catalogue.specialisations(backend or catalogue.BACKENDS))
    rows = []
    progress = sys.stderr.isatty()
    for row in catalogue.describe_all(wanted, jobs=jobs or _cores(), force=force):
        rows.append(row)
        if progress:
            print(f"\r{len(rows)}/{len(wanted)} built", end="", file=sys.stderr, flush=True)
    if progress:
        print("\r\x1b[K", end="", file=sys.stderr)
    _print(rows, format)
    failed = [row for row in rows if "error" in row]
    for row in failed:
        print(f"attnbench build: {row['error']}", file=sys.stderr)
    return 3 if failed else 0


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _print(rows: list[dict[str, Any]], format: str) -> None:
    if format == "json":
        print(to_json_text(rows, indent=2))
        return
    cells = [_cells(row) for row in rows]
    if format == "csv":
        print(comma_separated([column.title for column in _COLUMNS], cells))
    elif format == "md":
        print(markdown(_COLUMNS, cells))
    else:
        short = [[backend, re.sub(r" \w+=0\b", "", kernel), *rest] for backend, kernel, *rest in cells]
        print(aligned(_COLUMNS, short, width=terminal_width()))
        if short != cells:
            print("Macros that are 0 are left out of the kernels' names; --format csv has them.")


def _cells(row: dict[str, Any]) -> list[str]:
    name = row["name"].split(": ", 1)[-1]
    if "error" in row:
        return [row["backend"], name, "-", "-", "-", "build failed", "-"]
    sass = " ".join(f"{name} {count}" for name, count in row["sass"].items() if count)
    seconds = "cached" if row["cached"] else f"{row['seconds']:.2f}"
    return [
        row["backend"],
        name,
        str(row["registers"]),
        str(row["spill_bytes"]),
        f"{row['shared_bytes'] / 1024:.0f} KiB",
        sass,
        seconds,
    ]
