"""What is wrong with a scenario file, and where: all problems of one file, in line order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from attnbench.errors import UserError

MOST_SHOWN = 50


@dataclass(frozen=True, order=True)
class Problem:
    """One mistake. Lines and columns count from 1; 0 means that the problem has no place in the text."""

    line: int
    column: int
    field: str
    message: str

    def show(self, file: str) -> str:
        place = f"{file}:{self.line}" if self.line else file
        return f"{place}: {self.field}: {self.message}" if self.field else f"{place}: {self.message}"


class ScenarioError(UserError):
    """A scenario cannot be used. Prints one `file:line: field: what was wrong; wanted …` line per problem.

    `file`, `line`, `column` and `message` are those of the first problem; `problems` holds all of them.
    """

    def __init__(self, file: str, problems: Iterable[Problem]) -> None:
        self.file = file
        self.problems = tuple(sorted(set(problems)))
        first = self.problems[0]
        self.line, self.column, self.message = first.line, first.column, first.message
        lines = [problem.show(file) for problem in self.problems[:MOST_SHOWN]]
        if len(self.problems) > MOST_SHOWN:
            lines.append(f"{file}: and {len(self.problems) - MOST_SHOWN} more problems")
        super().__init__("\n".join(lines))


def quoted(value: object, most: int = 60) -> str:
    """A value from the file for a message, cut to `most` characters."""
    text = repr(value)
    return text if len(text) <= most else text[: most - 1] + "…"
