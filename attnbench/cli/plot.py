"""`attnbench plot RUN`."""

from __future__ import annotations

from pathlib import Path

from attnbench.results.runs import find_run


def plot(*, run: str, out: Path | None, format: str, results: Path) -> int:
    """Draw a stored run; print the files. A run without a timed row draws nothing, and says so."""
    stored = find_run(run, results)
    from attnbench.results.plot import plot_run

    paths = plot_run(stored, out, format)
    for path in paths:
        print(path)
    if not paths:
        print(f"{stored.folder} has no timed row to draw: on a GPU, `attnbench run` times what passes its check")
    return 0
