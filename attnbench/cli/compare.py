"""`attnbench compare BASE NEW`."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from attnbench.errors import UserError
from attnbench.results.compare import compare as compare_runs
from attnbench.results.compare_view import as_json, as_markdown, as_text
from attnbench.results.runs import Run, find_pair
from attnbench.results.text import terminal_width

INTERRUPTED = 130


def compare(
    *,
    base: str,
    new: str,
    threshold: str,
    format: str,
    allow_missing: bool,
    results: Path,
    rerun: Path | None = None,
    backend: Sequence[str] = (),
    only: Sequence[str] = (),
    device: str | None = None,
) -> int:
    """Print the comparison; exit code 1 regressed, 3 cases could not run, 4 nothing to compare or cases missing.

    With `rerun`, a scenario, both sides are measured first, in turns; `backend`, `only` and `device` are as for `run`.
    """
    least = parse_threshold(threshold)
    if rerun is not None:
        from attnbench.cli.rerun import rerun as measure

        try:
            pair = measure(base, new, rerun, backend=backend, only=only, device=device, results=results)
        except KeyboardInterrupt:
            print("interrupted; the cases that were finished are stored", file=sys.stderr)
            return INTERRUPTED
        return _show(pair, least, format, allow_missing)
    if backend or only or device:
        raise UserError("--only, --backend and --device choose what --rerun measures: give it a scenario")
    gc.disable()  # ten thousand records stay to the end, and walking through them takes half a second
    try:
        return _show(find_pair(base, new, results), least, format, allow_missing)
    finally:
        gc.enable()


def _show(pair: tuple[Run, Run], least: float, format: str, allow_missing: bool) -> int:
    comparison = compare_runs(*pair, threshold=least)
    code = comparison.exit_code(allow_missing=allow_missing)
    if format == "json":
        print(as_json(comparison, exit_code=code))
    elif format == "md":
        print(as_markdown(comparison))
    else:
        print(as_text(comparison, terminal_width()))
    return code


def parse_threshold(text: str) -> float:
    """`2%` or `0.02` as 0.02. Raises UserError for anything else, a bare `2` included: it could mean either."""
    match = re.fullmatch(r"\s*(\d*\.?\d+)\s*(%?)\s*", text)
    value = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    if not 0 <= value < 1 or (match and not match[2] and value >= 0.5):
        raise UserError(f"--threshold {text!r}: wanted a percentage such as 2%, or a fraction such as 0.02")
    return value
