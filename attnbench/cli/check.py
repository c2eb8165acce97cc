"""`attnbench check`: outputs and gradients against fp64, over the built-in corpus or a scenario."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from attnbench import ops
from attnbench.backends import judged, ours
from attnbench.backends.names import BUILTIN, computes, is_custom
from attnbench.cli.run import exit_code
from attnbench.errors import UserError, did_you_mean
from attnbench.measure import sweep
from attnbench.measure.check_order import compile_first, worker_count
from attnbench.measure.job import CaseJob, Row
from attnbench.measure.jobs import check_backend_names, choose_device, memory_bytes, merged, seconds
from attnbench.measure.supervisor import Supervisor
from attnbench.results.record import Record
from attnbench.results.store import to_json_text
from attnbench.results.text import comma_separated, paint
from attnbench.scenario.case import DTYPES, AttnresCase, op_name
from attnbench.scenario.plan import CheckPolicy

SMALL_BYTES = 10 << 30
"""Predicted memory below which entries are checked side by side on one board."""
HARNESS_NAMES = {"dx": "grad_x", "dq": "grad_q", "dout": "grad_y0", "dlse": "grad_l0"}
"""Gradients of phase 2 as the harness whose cases `phase2_backward.yaml` holds calls them."""


def check(
    *,
    op: Sequence[str] = (),
    dtype: Sequence[str] = (),
    backend: Sequence[str] = (),
    scenario: Path | None = None,
    device: str | None = None,
    format: str = "table",
) -> int:
    """Print the error of every tensor of every entry beside its budget.

    Returns 0 when every judged backend (ours, and the user's own) is right or states that it does not take an entry, 1
    when one is wrong, 3 when an entry could not be run.
    """
    _known("operation", op, ops.NAMES)
    _known("dtype", dtype, DTYPES)
    check_backend_names(backend)
    where = choose_device(device)
    jobs = _scenario_jobs(scenario, backend, where) if scenario is not None else _corpus_jobs(backend, where)
    jobs = [job for job in jobs if (not op or op_name(job.case) in op) and (not dtype or job.case.dtype in dtype)]
    if not jobs:
        raise UserError(
            f"nothing to check: no entry is of operation {list(op) or 'any'} and dtype {list(dtype) or 'any'}"
        )
    finished: dict[int, list[Record]] = {}
    try:
        guesses = {id(job): sum(seconds(job, row) for row in job.rows) for job in jobs}
        with sweep.progress(sum(guesses.values()), sum(len(job.rows) for job in jobs)) as step:
            for job, found in _results(jobs, where):
                finished[id(job)] = found
                if format == "table":
                    print("\n".join(line for record in found for line in lines(job, record)), flush=True)
                step(job.name or job.case.label, guesses[id(job)], len(found))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    records = [record for job in jobs for record in finished[id(job)]]
    if format == "table":
        print(summary(records))
    else:
        print(as_data(records, format))
    return exit_code([record for record in records if judged(record.backend)])


def _results(jobs: Sequence[CaseJob], device: str) -> Iterator[tuple[CaseJob, list[Record]]]:
    """Each job with its records as they finish: small ones side by side, then those that need the board alone."""
    small = [job for job in jobs if memory_bytes(job) < SMALL_BYTES]
    large = [job for job in jobs if memory_bytes(job) >= SMALL_BYTES]
    own = dict.fromkeys(row.backend for job in jobs for row in job.rows if is_custom(row.backend))
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(Supervisor(device))
        hello = first.start()
        if own:
            first.load(list(own))
        count = worker_count(len(small), os.cpu_count() or 1, hello.memory_bytes, SMALL_BYTES)
        if count > 1:
            os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
        supervisors = [first, *(stack.enter_context(Supervisor(device)) for _ in range(count - 1))]
        yield from sweep.execute_parallel(supervisors, compile_first(small))
        for supervisor in supervisors[1:]:
            supervisor.close()
        yield from sweep.execute_parallel(supervisors[:1], large)


def _known(what: str, given: Sequence[str], known: Sequence[str]) -> None:
    for word in given:
        if word not in known:
            raise UserError(f"unknown {what} {word!r}; want one of {', '.join(known)}.{did_you_mean(word, known)}")


def _scenario_jobs(path: Path, chosen: Sequence[str], device: str) -> list[CaseJob]:
    from attnbench import scenario as scenarios

    plan = scenarios.load(path)
    jobs = []
    for entry in plan.plan():
        names = chosen or entry.backends
        rows = tuple(Row(name, ("check",)) for name in names if computes(name, op_name(entry.case)))
        if rows:
            policy = replace(entry.check, enabled=True)
            jobs.append(CaseJob(entry.case, rows, device, plan.measure, policy, timed=False, name=entry.name))
    return merged(jobs)


def _corpus_jobs(chosen: Sequence[str], device: str) -> list[CaseJob]:
    from attnbench.ops.corpus import corpus

    # Native kernels cannot run without a GPU at all; asked for by name, they say so.
    names = chosen or [name for name in BUILTIN if ours(name) and (device == "cuda" or name == "triton")]
    jobs = []
    for entry in corpus(device):
        rows = tuple(Row(name, ("check",)) for name in names if computes(name, op_name(entry.case)))
        if rows:
            policy = CheckPolicy(repeats=entry.repeats)
            jobs.append(
                CaseJob(
                    entry.case,
                    rows,
                    device,
                    check=policy,
                    timed=False,
                    layout=entry.layout,
                    alone=entry.alone,
                    name=entry.name,
                )
            )
    return jobs


def lines(job: CaseJob, record: Record) -> list[str]:
    """An entry's verdict and one line a tensor."""
    if job.check.rtol is not None and record.check and isinstance(job.case, AttnresCase):
        return _harness_lines(job.case, record)
    name = f"{job.name}: " if job.name else ""
    layout = f" [{job.layout}]" if job.layout else ""
    style = {"checked": "green", "unsupported": "dim"}.get(record.outcome, "red")
    word = {"checked": "ok"}.get(record.outcome, record.outcome)
    flags = f"  ({', '.join(record.flags)})" if record.flags else ""
    head = f"{paint(word, style):<12} {record.backend:<10} {name}{record.label}{layout}{flags}"
    out = [head]
    if record.batch_variant:
        out.append(f"    a sequence alone has other bits than in its batch: {', '.join(record.batch_variant)}")
    if record.reason and record.outcome != "checked":
        out.append(f"    {record.reason}")
    for tensor, found in record.check.items():
        mark = "" if found.passed else paint("  FAILED", "red")
        out.append(
            f"    {tensor:<5} max abs {found.max_abs:.3e}  rel Frobenius {found.rel_fro:.3e}  "
            f"budget {found.budget_ratio:6.3f}  worst at {found.worst}{mark}"
        )
    return out


def _harness_lines(case: AttnresCase, record: Record) -> list[str]:
    """An entry with fixed tolerances, in the form of the harness that set them."""
    out = [
        "",
        f"{record.backend}: rows={case.rows}, D={case.hidden}, dtype={case.dtype}, include_lse_grad={case.lse_grad}",
    ]
    shown = {name: found for name, found in record.check.items() if name in HARNESS_NAMES} or record.check
    for name, found in shown.items():
        out.append(
            f"{HARNESS_NAMES.get(name, name):>10}: max_abs={found.max_abs:.6e}, {found.message.replace(' ', '=')}"
        )
    if record.outcome == "checked":
        return [*out, "PASS"]
    return [*out, f"FAIL {record.reason or record.outcome}"]


def summary(records: Sequence[Record]) -> str:
    """One sentence a backend: right, wrong, not run, unsupported."""
    out = [""]
    for name in dict.fromkeys(record.backend for record in records):
        mine = [record for record in records if record.backend == name]
        count = {outcome: sum(r.outcome == outcome for r in mine) for outcome in dict.fromkeys(r.outcome for r in mine)}
        right = count.pop("checked", 0)
        rest = "".join(f", {number} {outcome}" for outcome, number in count.items())
        ratios = [found.budget_ratio for r in mine if r.outcome == "checked" for found in r.check.values()]
        worst = f"; largest error {max(ratios):.2f} of its budget" if ratios else ""
        worst += _invariance(mine)
        note = "" if judged(name) else " (not judged: does not set the exit code)"
        out.append(f"{name}: {right} of {len(mine)} entries ok{rest}{worst}{note}")
    return "\n".join(out)


def _invariance(records: Sequence[Record]) -> str:
    asked = [record.batch_variant for record in records if record.batch_variant is not None]
    if not asked:
        return ""
    same = sum(not names for names in asked)
    return f"; a sequence alone has the bits that it has in a batch in {same} of {len(asked)} entries"


def as_data(records: Sequence[Record], format: str) -> str:
    """The records as JSON, or one line a tensor as CSV or Markdown."""
    if format == "json":
        return to_json_text([record.to_json() for record in records], indent=2)
    titles = ("outcome", "backend", "label", "tensor", "max_abs", "rel_fro", "budget_ratio", "worst", "reason")
    rows: list[tuple[object, ...]] = []
    for r in records:
        if not r.check:
            rows.append((r.outcome, r.backend, r.label, "", "", "", "", "", r.reason or ""))
        for name, t in r.check.items():
            worst = " ".join(map(str, t.worst))
            rows.append((r.outcome, r.backend, r.label, name, t.max_abs, t.rel_fro, t.budget_ratio, worst, t.message))
    if format == "csv":
        return comma_separated(titles, rows)
    head = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    return "\n".join(head + ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows])
