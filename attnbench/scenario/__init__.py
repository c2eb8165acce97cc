"""Scenario files: YAML text → validated models → a flat list of frozen cases.

`load` and `loads` import PyYAML and pydantic on their first call; the package itself loads neither.
"""

from __future__ import annotations

from pathlib import Path

from attnbench.scenario.errors import Problem, ScenarioError
from attnbench.scenario.plan import CheckPolicy, MeasurePolicy, PlannedCase, Scenario

__all__ = ["CheckPolicy", "MeasurePolicy", "PlannedCase", "Problem", "Scenario", "ScenarioError", "load", "loads"]


def load(path: str | Path) -> Scenario:
    """Read and validate a scenario file.

    Raises:
        ScenarioError: the file cannot be read, is not YAML, or asks for something that makes no sense; the message
            lists every problem with its place.
    """
    from attnbench.scenario.loader import load_file

    return load_file(path)


def loads(text: str, file: str = "<text>") -> Scenario:
    """Validate a scenario's text, as stored in a run. `file` is what messages call it. Raises as `load` does."""
    from attnbench.scenario.loader import load_text

    return load_text(text, file)
