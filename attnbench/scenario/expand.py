"""Entries with defaults, matrix and exclude → planned cases, each case once."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

from attnbench.backends.names import BUILTIN, computes, custom_file, is_custom
from attnbench.errors import did_you_mean
from attnbench.scenario.build import DEFAULTS, DENSE, FIELDS, PACKED, SIZE, BadCase, build
from attnbench.scenario.case import AttentionCase, Case, Pass, op_name
from attnbench.scenario.errors import quoted
from attnbench.scenario.model import Check, Entry, ScenarioModel
from attnbench.scenario.models import MODELS
from attnbench.scenario.plan import CheckPolicy, PlannedCase
from attnbench.scenario.yaml_text import Path

MAX_CASES = 20_000
MAX_PLANNED_SEQUENCES = 2_000_000

Report = Callable[[Path, str], None]
"""Called with the path of what is wrong and a message; goes on to the next problem."""


def expand(
    model: ScenarioModel, data: dict[str, Any], report: Report, kernels_exist: bool = False
) -> tuple[PlannedCase, ...]:
    """Every planned case in the file's order; a matrix's first axis varies slowest.

    `data` is what `model` was made from: it has the order of keys. Problems go to `report`; the result means something
    only without any.
    """
    axes = [_axes(entry, given) for entry, given in zip(model.cases, data["cases"], strict=True)]
    check_backends(model.backends, ("backends",), report, kernels_exist)
    if model.baseline is not None:
        check_backends([model.baseline], ("baseline",), report, kernels_exist)
    check = check_policy(model.check, ("check",), report)
    if not _sizes_are_sane(axes, report):
        return ()
    plan = _Plan()
    sequences = 0
    for i, entry in enumerate(model.cases):
        path: Path = ("cases", i)
        if entry.backends is not None:
            check_backends(entry.backends, (*path, "backends"), report, kernels_exist)
        entry_check = check
        if entry.check is not None:
            merged = Check.model_construct(**{**model.check.model_dump(), **entry.check.model_dump(exclude_unset=True)})
            entry_check = check_policy(merged, (*path, "check"), report)
        passes = tuple(dict.fromkeys(entry.passes or model.measure.passes))
        for case, model_tag in _cases(model, entry, axes[i], path, report):
            sequences += len(case.seqlens_q) if isinstance(case, AttentionCase) else 0
            if sequences > MAX_PLANNED_SEQUENCES:
                report(path, f"more than {MAX_PLANNED_SEQUENCES:,} packed sequences over all cases; wanted fewer cases")
                return ()
            backends = _backends_of(model, entry, case, path, report)
            plan.add(case, backends, passes, (*(entry.tags or ()), *model_tag), entry.name or "", entry_check)
    used = {op_name(planned.case) for planned in plan.rows()}
    if model.baseline is not None and used and not any(computes(model.baseline, op) for op in used):
        report(("baseline",), f"{model.baseline} computes none of the scenario's operations: {', '.join(sorted(used))}")
    return tuple(plan.rows())


def check_backends(names: list[str], path: Path, report: Report, kernels_exist: bool) -> None:
    """Report names that are neither built in nor of the form of a user's own backend, and names given twice.

    With `kernels_exist` also a user's own file that is not there.
    """
    for i, name in enumerate(names):
        place = (*path, i) if len(path) > 1 or path == ("backends",) else path
        if name in names[:i]:
            report(place, f"backend {quoted(name)} is given twice")
        kernel = custom_file(name)
        if kernel and kernels_exist and not os.path.isfile(kernel):
            report(place, f"no file {quoted(kernel)}; paths are relative to the directory that attnbench is started in")
        if name not in BUILTIN and not is_custom(name):
            report(
                place,
                f"unknown backend {quoted(name)}; wanted one of {', '.join(BUILTIN)}, or your own as "
                f"package.module:object or path/to/file.py:object.{did_you_mean(name, BUILTIN)}",
            )


def check_policy(check: Check, path: Path, report: Report) -> CheckPolicy:
    if (check.rtol is None) != (check.atol is None):
        report(path, "`rtol` without `atol`, or the reverse; wanted both, or neither for the eager error budget")
    return CheckPolicy(**check.model_dump())


def _given(model: Any) -> dict[str, Any]:
    """Fields that the file gives, nulls included, without converting what they hold."""
    return {name: getattr(model, name) for name in type(model).model_fields if name in model.model_fields_set}


def _axes(entry: Entry, given: dict[str, Any]) -> dict[str, list[Any]]:
    values = _given(entry.matrix) if entry.matrix else {}
    return {name: values[name] for name in given.get("matrix") or () if values[name]}


def _sizes_are_sane(entries: list[dict[str, list[Any]]], report: Report) -> bool:
    total = 0
    for i, axes in enumerate(entries):
        count = math.prod(len(values) for values in axes.values())
        total += count
        if total > MAX_CASES:
            sizes = " × ".join(f"{name} {len(values)}" for name, values in axes.items())
            made = f"{sizes} makes {count:,} cases" if sizes else "this entry is one too many"
            before = f" after {total - count:,} before it" if total > count else ""
            report(("cases", i, "matrix"), f"{made}{before}; wanted at most {MAX_CASES:,} in a scenario")
            return False
    return True


def _cases(
    model: ScenarioModel, entry: Entry, axes: dict[str, list[Any]], path: Path, report: Report
) -> Iterator[tuple[Case, tuple[str, ...]]]:
    """Each case with the name of its model as a tag, where it has one."""
    fixed = {name: value for name, value in _given(entry).items() if name in FIELDS_OF_ALL}
    for name in (name for name in axes if name in fixed):
        report((*path, name), f"`{name}` is also an axis of `matrix`; wanted it in one place")
    ops = axes.get("op") or [fixed.get("op") or model.defaults.op or DEFAULTS["op"]]
    for name in (*fixed, *axes):
        if not any(name in FIELDS[op] for op in ops):
            where = (*path, "matrix", name) if name in axes else (*path, name)
            report(where, f"`{name}` does not belong to {ops[0]}; wanted {', '.join(FIELDS[ops[0]])}")
    rules = [_given(rule) for rule in entry.exclude or ()]
    if rules and not axes:
        report((*path, "exclude"), "`exclude` without `matrix` has nothing to leave out")
        rules = []
    unused, left = set(range(len(rules))), 0
    for indices in itertools.product(*(range(len(values)) for values in axes.values())):
        chosen = {name: axes[name][at] for name, at in zip(axes, indices, strict=True)}
        point = _overlay(_given(model.defaults), {**fixed, **chosen})
        hits = {r for r, rule in enumerate(rules) if _matches(point, rule)}
        unused -= hits
        if hits:
            continue
        left += 1
        try:
            yield build(point), (point["model"],) if "model" in point else ()
        except BadCase as error:
            report(_origin(error.field, path, dict(zip(axes, indices, strict=True)), fixed), str(error))
    if not left:
        report((*path, "exclude"), "leaves no case of this entry; wanted at least one")
    elif axes:
        for r in sorted(unused):
            report((*path, "exclude", r), "leaves out nothing: no combination of the matrix has these values")


FIELDS_OF_ALL = frozenset(itertools.chain.from_iterable(FIELDS.values()))


def _overlay(defaults: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """An entry's fields over its model's, over the defaults.

    Giving one field of a group takes back the defaults' others of it.
    """
    dropped: set[str] = set()
    for group in (SIZE, DENSE + PACKED):
        if any(own.get(name) is not None for name in group):
            dropped.update(group)
    if any(own.get(name) is not None for name in PACKED):
        dropped.update(SIZE)
    point = {name: value for name, value in defaults.items() if name not in dropped} | own
    op = point.get("op") or DEFAULTS["op"]
    if (model := point.get("model")) is not None:
        # A model goes before `defaults`, unless it is one of them itself.
        beside = own if own.get("model") is not None else point
        point |= {n: value for n, value in MODELS[model].fields(op).items() if beside.get(n) is None}
    return {name: value for name, value in point.items() if value is not None and name in FIELDS[op]}


def _matches(point: dict[str, Any], rule: dict[str, Any]) -> bool:
    for name, wanted in rule.items():
        value = point.get(name, DEFAULTS.get(name))
        if value is None or value not in (wanted if isinstance(wanted, list) else [wanted]):
            return False
    return bool(rule)


def _origin(field: str | None, path: Path, indices: dict[str, int], fixed: dict[str, Any]) -> Path:
    if field is None:
        return path
    for name in (field, "model"):  # what is not given anywhere may come from the model
        if name in indices:
            return (*path, "matrix", name, indices[name])
        if name in fixed:
            return (*path, name)
    return ("defaults", field)


def _backends_of(model: ScenarioModel, entry: Entry, case: Case, path: Path, report: Report) -> tuple[str, ...]:
    op = op_name(case)
    for i, name in enumerate(entry.backends or ()):
        if not computes(name, op):
            report((*path, "backends", i), f"{name} does not compute {op}; it computes {', '.join(BUILTIN[name])}")
    names = tuple(name for name in entry.backends or model.backends if computes(name, op))
    if not names and not entry.backends:
        able = ", ".join(name for name in BUILTIN if computes(name, op))
        report(path, f"no backend of the scenario computes {op}; wanted one of {able}")
    return names


class _Plan:
    """Planned cases with each case, backend and pass once; what an earlier entry has is not planned again."""

    def __init__(self) -> None:
        self.done: dict[tuple[str, str], set[str]] = {}
        self.planned: dict[tuple[str, tuple[Pass, ...], CheckPolicy], PlannedCase] = {}

    def add(
        self,
        case: Case,
        backends: tuple[str, ...],
        passes: tuple[Pass, ...],
        tags: tuple[str, ...],
        name: str,
        check: CheckPolicy,
    ) -> None:
        groups: dict[tuple[Pass, ...], list[str]] = {}
        for backend in backends:
            done = self.done.setdefault((case.case_id, backend), set())
            fresh = tuple(which for which in passes if which not in done)
            done.update(fresh)
            groups.setdefault(fresh, []).append(backend)
        for fresh, names in groups.items():
            key = (case.case_id, fresh or passes, check)
            before = self.planned.get(key)
            if before is None and not fresh:
                continue
            row = before or PlannedCase(case, (), fresh, (), name, check)
            self.planned[key] = PlannedCase(
                row.case,
                (*row.backends, *(names if fresh else ())),
                row.passes,
                tuple(dict.fromkeys((*row.tags, *tags))),
                row.name or name,
                check,
            )

    def rows(self) -> list[PlannedCase]:
        return list(self.planned.values())
