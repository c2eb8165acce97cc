"""From a scenario to jobs: which rows of which cases, and what they are expected to take. Imports no torch."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import lru_cache

from attnbench import ops
from attnbench.backends.names import BUILTIN, computes, is_custom
from attnbench.errors import UserError, did_you_mean
from attnbench.measure import interpreter
from attnbench.measure.job import CaseJob, Row
from attnbench.measure.memory import MATERIALISING, needed
from attnbench.ops.base import Work
from attnbench.scenario.case import Case, op_name
from attnbench.scenario.plan import PlannedCase, Scenario

_GUESS_TFLOPS = {"eager": 40.0, "compile": 60.0}
_GUESS_FP64_TFLOPS = 15.0
_GUESS_TB_S = 1.5
_CPU_TFLOPS = 0.02


def choose_device(asked: str | None) -> str:
    """`asked`, or "cuda" where the driver shows a board that is not hidden from CUDA, else "cpu"."""
    if asked is not None:
        return asked
    from attnbench.measure.board import boards

    if os.environ.get("CUDA_VISIBLE_DEVICES", "unset").strip() in ("", "-1"):
        return "cpu"
    found, _ = boards()
    return "cuda" if found else "cpu"


def check_backend_names(names: Sequence[str]) -> None:
    """Raises UserError for a name that is neither built in nor of the form of a user's own backend."""
    for name in names:
        if name not in BUILTIN and not is_custom(name):
            raise UserError(
                f"unknown backend {name!r}.{did_you_mean(name, BUILTIN)} `attnbench list backends` shows the built-in "
                "ones; your own is written package.module:object or path/to/file.py:object"
            )


def default_baseline(op: str, device: str) -> str:
    """What rows are interleaved with where the scenario names nothing."""
    return "sdpa_cudnn" if device == "cuda" and op == "attention" else "eager"


def select(planned: Sequence[PlannedCase], only: Sequence[str]) -> list[PlannedCase]:
    """Cases whose label, id, entry name or tag matches one of the globs; a glob without wildcards matches a part.

    Raises:
        UserError: nothing matches.
    """
    if not only:
        return list(planned)
    globs = [glob if set(glob) & set("*?[") else f"*{glob}*" for glob in only]

    def hit(entry: PlannedCase) -> bool:
        words = (entry.case.label, entry.case.case_id, entry.name, *entry.tags)
        return any(fnmatch.fnmatchcase(word, glob) for word in words for glob in globs)

    found = [entry for entry in planned if hit(entry)]
    if not found:
        shown = "\n  ".join(entry.case.label for entry in planned[:10])
        raise UserError(f"--only {' '.join(only)}: no case matches. The scenario has, for example:\n  {shown}")
    return found


def rows_of(entry: PlannedCase, chosen: Sequence[str], everywhere: Collection[str]) -> list[Row]:
    """The rows of one case. `chosen` backends that the scenario itself plans stay where it plans them."""
    names: Sequence[str] = entry.backends
    if chosen:
        names = [name for name in chosen if name in entry.backends or name in everywhere]
    return [Row(name, tuple(entry.passes)) for name in names if computes(name, op_name(entry.case))]


def plan_jobs(scenario: Scenario, device: str, chosen: Sequence[str] = (), only: Sequence[str] = ()) -> list[CaseJob]:
    """One job a case, in the scenario's order, its baseline's row first.

    Raises:
        UserError: an unknown backend, or nothing is left to run.
    """
    check_backend_names(chosen)
    planned = scenario.plan()
    known = {name for entry in planned for name in entry.backends}
    everywhere = [name for name in chosen if name not in known]
    jobs = []
    for entry in select(planned, only):
        rows = rows_of(entry, chosen, everywhere)
        if not rows:
            continue
        baseline = scenario.baseline or default_baseline(op_name(entry.case), device)
        rows.sort(key=lambda row: row.backend != baseline)
        interleaved = baseline if device == "cuda" and baseline != "eager" else None
        jobs.append(
            CaseJob(
                entry.case,
                tuple(rows),
                device,
                measure=scenario.measure,
                check=entry.check,
                baseline=interleaved,
                name=entry.name,
            )
        )
    if not jobs:
        raise UserError(
            f"nothing to run: no case of {scenario.name} has {', '.join(chosen)}. "
            f"The scenario's backends are {', '.join(sorted(known))}"
        )
    return merged(jobs)


def merged(jobs: Sequence[CaseJob]) -> list[CaseJob]:
    """Jobs of the same case become one, so that its references are made once; rows keep their first place."""
    by_case: dict[tuple[str, str], CaseJob] = {}
    for job in jobs:
        key = (job.case.case_id, job.layout)
        if key not in by_case:
            by_case[key] = job
            continue
        rows = {row.backend: row.passes for row in by_case[key].rows}
        for row in job.rows:
            rows[row.backend] = tuple(dict.fromkeys((*rows.get(row.backend, ()), *row.passes)))
        by_case[key] = replace(by_case[key], rows=tuple(Row(name, passes) for name, passes in rows.items()))
    return list(by_case.values())


def without(job: CaseJob, done: Collection[tuple[str, str, str]]) -> CaseJob | None:
    """The job without the rows in `done` (case id, backend, pass); None where nothing is left."""
    case_id = job.case.case_id
    rows = []
    for row in job.rows:
        passes = tuple(pass_ for pass_ in row.passes if (case_id, row.backend, pass_) not in done)
        if passes:
            rows.append(Row(row.backend, passes))
    return replace(job, rows=tuple(rows)) if rows else None


def memory_bytes(job: CaseJob) -> int:
    """Predicted peak of a case: its largest row, the check included."""
    operation = ops.operation(op_name(job.case))
    one_of_each = {row.backend in MATERIALISING: row.backend for row in job.rows}  # others of its kind need the same
    return max(needed(operation, job.case, name, checked=job.check.enabled) for name in one_of_each.values())


@lru_cache(maxsize=64)  # asked for each row of a case in turn
def _work(case: Case) -> Work:
    return ops.operation(op_name(case)).work(case, "forward_backward")


def seconds(job: CaseJob, row: Row) -> float:
    """A rough guess of what one row takes, its share of the case's references included; for bars and plans."""
    work = _work(job.case)
    if job.device == "cpu":
        if row.backend in ("eager", "compile"):
            each = work.flops / (_CPU_TFLOPS * 1e12)
            warm = 6.0 if row.backend == "compile" else 0.0
            timed = min(job.measure.max_seconds, job.measure.samples * each + 0.05) if job.timed else 0.0
            return warm + 6 * each + 0.05 + len(row.passes) * timed
        return 0.1 + min(interpreter.steps(job.case), interpreter.MOST_STEPS) * 6e-3
    each = max(work.flops / (_GUESS_TFLOPS.get(row.backend, 400.0) * 1e12), work.bytes / (_GUESS_TB_S * 1e12))
    reference = 2 * work.flops / (_GUESS_FP64_TFLOPS * 1e12) / len(job.rows)
    policy = job.measure
    timed = policy.min_seconds + min(policy.max_seconds, 2 * policy.samples * (each + 1e-4)) + 0.1
    return 0.3 + reference + (len(row.passes) * timed if job.timed else 0.0)
