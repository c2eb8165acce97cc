"""`attnbench compare BASE NEW`."""

from __future__ import annotations

import gc
import re
from pathlib import Path

from attnbench.errors import UserError
from attnbench.results.compare import compare as compare_runs
from attnbench.results.compare_view import as_json, as_markdown, as_text
from attnbench.results.runs import find_pair
from attnbench.results.text import terminal_width


def compare(*, base: str, new: str, threshold: str, format: str, allow_missing: bool, results: Path) -> int:
    """Print the comparison; exit code 1 regressed, 3 cases could not run, 4 nothing to compare or cases missing."""
    least = parse_threshold(threshold)
    gc.disable()  # ten thousand records stay to the end, and walking through them takes half a second
    try:
        return _compare(base, new, least, format, allow_missing, results)
    finally:
        gc.enable()


def _compare(base: str, new: str, least: float, format: str, allow_missing: bool, results: Path) -> int:
    pair = find_pair(base, new, results)
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
