"""A scenario file, read and validated; every problem found is reported with its place."""

from __future__ import annotations

import os
from pathlib import Path as FilePath
from typing import Any

from pydantic import ValidationError

from attnbench.scenario import yaml_text
from attnbench.scenario.errors import Problem, ScenarioError
from attnbench.scenario.expand import Report, expand
from attnbench.scenario.explain import explain, kind_of
from attnbench.scenario.model import ScenarioModel
from attnbench.scenario.plan import CheckPolicy, MeasurePolicy, Scenario
from attnbench.scenario.yaml_text import Document, Path, dotted


def load_file(path: str | FilePath) -> Scenario:
    """See `attnbench.scenario.load`."""
    file = os.fspath(path)
    return load_text(_read(file), file, kernels_exist=True)


def _read(file: str) -> str:
    def refuse(message: str, line: int = 0, column: int = 0) -> ScenarioError:
        return ScenarioError(file, [Problem(line, column, "", message)])

    try:
        size = os.stat(file).st_size
        if os.path.isdir(file):
            raise refuse("is a directory; wanted a scenario file (.yaml)")
        if not os.path.isfile(file):
            raise refuse("is not a regular file; wanted a scenario file (.yaml)")
        if size > 4 * yaml_text.MAX_CHARACTERS:
            raise refuse(f"{size:,} bytes; wanted a scenario of at most {yaml_text.MAX_CHARACTERS:,} characters")
        with open(file, "rb") as stream:
            data = stream.read()
    except FileNotFoundError:
        raise refuse("no such file; `attnbench list scenarios` shows those that come along") from None
    except (OSError, ValueError) as error:
        raise refuse(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        line, column = before.count(b"\n") + 1, len(before) - before.rfind(b"\n")
        what = f"byte 0x{data[error.start]:02X} is not UTF-8; wanted a text file in UTF-8"
        raise refuse(what, line, column) from None


def load_text(text: str, file: str = "<text>", kernels_exist: bool = False) -> Scenario:
    """See `attnbench.scenario.loads`. With `kernels_exist`, files of a user's own kernels must be there."""
    document = yaml_text.parse(text.removeprefix("\ufeff"), file)
    problems = list(document.problems)
    if not isinstance(document.data, dict):
        what = f"{kind_of(document.data)}; wanted a mapping with `name`, `backends` and `cases`"
        raise ScenarioError(file, problems or [Problem(*document.place(()), "", what)])

    def report(path: Path, message: str) -> None:
        problems.append(Problem(*document.place(path, key=True), dotted(path), message))

    try:
        model = ScenarioModel.model_validate(document.data)
    except ValidationError as error:
        found = explain(error, document)
        _judge_the_rest(document, found, report, kernels_exist)
        raise ScenarioError(file, problems + list(found.values())) from None

    planned = expand(model, document.data, report, kernels_exist)
    if problems:
        raise ScenarioError(file, problems)
    measure = model.measure.model_dump()
    return Scenario(
        file=file,
        text=text,
        name=model.name,
        description=model.description,
        backends=tuple(model.backends),
        baseline=model.baseline,
        measure=MeasurePolicy(**{**measure, "passes": tuple(dict.fromkeys(measure["passes"]))}),
        check=CheckPolicy(**model.check.model_dump()),
        planned=planned,
    )


def _judge_the_rest(document: Document, found: dict[Path, Problem], report: Report, kernels_exist: bool) -> None:
    """Report what else is wrong, so that a file is put right in one go: entries of the right form are expanded."""
    if any(path[:1] == ("defaults",) or path == ("cases",) for path in found):
        return
    broken_keys = {path[0] for path in found if path and path[0] != "cases"}
    broken_entries = {path[1] for path in found if len(path) > 1 and path[0] == "cases"}
    kept = [i for i in range(len(document.data.get("cases") or ())) if i not in broken_entries]
    data: dict[str, Any] = {"name": "x", "backends": ["eager"]}
    data |= {key: value for key, value in document.data.items() if key not in broken_keys}
    data["cases"] = [document.data["cases"][i] for i in kept] or [{}]
    try:
        model = ScenarioModel.model_validate(data)
    except ValidationError:
        return

    def place(path: Path, message: str) -> None:
        if path[0] == "cases":
            if not kept:
                return
            path = ("cases", kept[int(path[1])], *path[2:])
        report(path, message)

    expand(model, data, place, kernels_exist)
