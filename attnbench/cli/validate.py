"""`attnbench validate`: check scenario files and show what they come to."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attnbench.scenario import ScenarioError, load
from attnbench.scenario.case import op_name

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
    common = Counter(_who(planned) for planned in plan).most_common(1)[0][0]
    print(f"{scenario.file}: {scenario.name}: {_count(cases, 'case')}, {_count(rows, 'row')} (case, backend and pass)")
    print(f"  {common}")
    shown = [(op_name(planned.case), planned.case.label) for planned in plan[:MOST_ROWS]]
    ops, labels = (max(len(row[i]) for row in shown) for i in (0, 1))
    for (op, label), planned in zip(shown, plan, strict=False):
        who = "" if _who(planned) == common else _who(planned)
        _print(f"  {planned.case.case_id}  {op:<{ops}}  {label:<{labels}}  {who}".rstrip())
    if len(plan) > MOST_ROWS:
        print(f"  … and {len(plan) - MOST_ROWS:,} more")


def _who(planned: PlannedCase) -> str:
    return f"{', '.join(planned.backends)} · {', '.join(planned.passes)}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _print(line: str) -> None:
    width = shutil.get_terminal_size().columns
    print(line if not sys.stdout.isatty() or len(line) <= width else line[: width - 1] + "…")
