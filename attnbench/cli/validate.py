"""`attnbench validate`: check scenario files and show what they come to."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attnbench.scenario import ScenarioError, load

if TYPE_CHECKING:
    from attnbench.scenario import PlannedCase, Scenario

MOST_ROWS = 40


def validate(scenario: str | Path | Sequence[str | Path]) -> int:
    """Check each file; print its cases. Returns 0, or 2 where any file has a problem."""
    files = [scenario] if isinstance(scenario, str | Path) else list(scenario)
    code = 0
    for file in files:
        try:
            _show(load(file))
        except ScenarioError as error:
            sys.stdout.flush()
            print(error, file=sys.stderr)
            code = 2
    return code


def _show(scenario: Scenario) -> None:
    plan = scenario.plan()
    cases = len({planned.case.case_id for planned in plan})
    rows = sum(len(planned.backends) * len(planned.passes) for planned in plan)
    print(f"{scenario.file}: {scenario.name}: {_count(cases, 'case')}, {_count(rows, 'row')} (case, backend and pass)")
    width = max(shutil.get_terminal_size((80, 24)).columns, 40)
    labels = [planned.case.label for planned in plan[:MOST_ROWS]]
    column = max(len(label) for label in labels)
    for label, planned in zip(labels, plan, strict=False):
        print(_cut(f"  {planned.case.case_id}  {label:<{column}}  {_who(planned)}", width))
    if len(plan) > MOST_ROWS:
        print(f"  … and {len(plan) - MOST_ROWS} more")


def _who(planned: PlannedCase) -> str:
    return f"{'+'.join(planned.passes)}: {', '.join(planned.backends)}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
