"""`attnbench history CASE-GLOB`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from attnbench.cli.compare import parse_threshold
from attnbench.results.history import arrange, collect, commit_order
from attnbench.results.history_view import as_csv, as_json, as_markdown, as_text
from attnbench.results.runs import NoBaseline, find_runs
from attnbench.results.text import terminal_width


def history(
    *,
    case: str,
    backend: Sequence[str],
    pass_: Sequence[str],
    threshold: str,
    dirty: bool,
    format: str,
    results: Path,
) -> int:
    """Print the medians of the cases that match over commits, with their steps.

    Raises:
        NoBaseline: no stored run has such a case.
    """
    least = parse_threshold(threshold)
    unreadable: list[str] = []
    runs = list(reversed(find_runs(results, unreadable)))
    for message in unreadable:
        print(f"attnbench history: left out: {message}", file=sys.stderr)
    series, left_out = collect(runs, case, backends=backend, passes=pass_, dirty=dirty)
    if not series:
        dirt = f" ({left_out} with uncommitted changes were left out: --dirty)" if left_out else ""
        raise NoBaseline(
            f"no run under {results} has a case that matches {case!r}{dirt}. `attnbench list runs` shows what there is"
        )
    order = commit_order({entry.commit for one in series for entry in one.entries})
    arrange(series, order, least)
    if format == "json":
        print(as_json(series, least))
    elif format == "csv":
        print(as_csv(series))
    elif format == "md":
        print(as_markdown(series, least))
    else:
        print(as_text(series, least, terminal_width()))
        if order is None:
            print("Note: in order of time, since git here does not know all of these commits.")
        if left_out:
            plural = "s" if left_out > 1 else ""
            print(f"Note: {left_out} run{plural} with uncommitted changes left out (--dirty takes them in).")
    return 0
