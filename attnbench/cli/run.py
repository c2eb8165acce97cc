"""`attnbench run SCENARIO.yaml`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from attnbench import scenario as scenarios
from attnbench.backends import judged
from attnbench.backends.names import custom_file, is_custom
from attnbench.measure import sweep
from attnbench.measure.job import CaseJob, Hello
from attnbench.measure.jobs import choose_device, memory_bytes, plan_jobs, seconds, without
from attnbench.measure.provenance import provenance
from attnbench.measure.supervisor import Supervisor
from attnbench.results.record import COULD_NOT_RUN, Record
from attnbench.results.runs import Key, Run, find_resumable, newest_run, read_run, same_run
from attnbench.results.split_text import split_table
from attnbench.results.store import RunWriter
from attnbench.results.table import as_table, sentences
from attnbench.results.text import Column, aligned, terminal_width, wrap

INTERRUPTED = 130


def run(
    *,
    scenario: Path,
    backend: Sequence[str] = (),
    only: Sequence[str] = (),
    out: Path = Path("results"),
    resume: bool = False,
    only_failed: bool = False,
    dry_run: bool = False,
    device: str | None = None,
    format: str = "table",
    detail: bool = False,
) -> int:
    """Check and time a scenario's cases, store the run, print its table; `detail` also says where each row's time goes.

    Returns 0 when all is good, 1 when a judged backend failed its check, 3 when cases could not be run, and 130 after
    Ctrl-C, with every finished case stored.
    """
    plan = scenarios.load(scenario)
    if detail:
        plan = replace(plan, measure=replace(plan.measure, split=True))
    where = choose_device(device)
    jobs = plan_jobs(plan, where, backend, only)
    failed_in = None
    if only_failed:
        failed_in = newest_run(out, plan.name, where)
        jobs = [left for job in jobs if (left := without(job, keys_of(job) - failed_in.bad())) is not None]
        print(f"--only-failed: of {failed_in.folder}", file=sys.stderr)
        if not jobs:
            print("nothing to do: nothing of this selection failed there")
            return 0
    if dry_run:
        print(plan_text(jobs))
        return 0
    with Supervisor(where) as supervisor:
        hello = supervisor.start()
        own = dict.fromkeys(row.backend for job in jobs for row in job.rows if is_custom(row.backend))
        if own:
            supervisor.load(list(own))
        with sweep.gpu_lock(hello.uuid):
            folder, interrupted = _sweep(supervisor, hello, plan, jobs, out, resume, failed_in)
    stored = read_run(folder)
    _show(stored, format)
    if detail and format == "table" and (split := split_table(stored.records.values())):
        print(f"\nWhere the time goes, ms:\n{split}")
    if interrupted:
        print(f"interrupted; what was finished is in {folder} (go on with --resume)", file=sys.stderr)
        return INTERRUPTED
    return exit_code(list(stored.records.values()))


def _sweep(
    supervisor: Supervisor,
    hello: Hello,
    plan: scenarios.Scenario,
    jobs: list[CaseJob],
    out: Path,
    resume: bool,
    failed_in: Run | None = None,
) -> tuple[Path, bool]:
    info = run_info(plan, jobs, hello)
    if failed_in is not None:
        info["only_failed_of"] = failed_in.name
        earlier = failed_in if resume and same_run(failed_in, info) else None
    else:
        earlier = _earlier(out, info) if resume else None
    if earlier is not None and failed_in is None:
        done = earlier.done()
        jobs = [left for job in jobs if (left := without(job, done)) is not None]
    writer = RunWriter(out, info, resume=earlier)
    print(f"{sum(len(row.passes) for job in jobs for row in job.rows)} rows, into {writer.folder}", file=sys.stderr)
    try:
        if jobs and plan.measure.ceilings:
            jobs, found = sweep.with_ceilings(supervisor, jobs)
            if found:
                trust = supervisor.crosscheck()
                writer.update(ceilings=found, crosscheck=trust)
                if trust:
                    print(sweep.machine_words(trust), file=sys.stderr)
        sweep.execute(supervisor, jobs, writer.append)
    except KeyboardInterrupt:
        writer.close(finished=False)
        return writer.folder, True
    except BaseException:
        writer.close(finished=False)
        raise
    writer.close(finished=True)
    return writer.folder, False


def keys_of(job: CaseJob) -> set[Key]:
    """What the records of this job will be about."""
    return {(job.case.case_id, row.backend, pass_) for row in job.rows for pass_ in row.passes}


def _earlier(out: Path, info: dict[str, Any]) -> Run | None:
    earlier = find_resumable(out, info)
    if earlier is None:
        print(
            f"--resume: no unfinished run of this scenario, code and device under {out}; starting a new one",
            file=sys.stderr,
        )
    return earlier


def run_info(plan: scenarios.Scenario, jobs: Sequence[CaseJob], hello: Hello) -> dict[str, Any]:
    """The contents of `run.json`."""
    own = [
        Path(file) for job in jobs for row in job.rows if (file := custom_file(row.backend)) and Path(file).is_file()
    ]
    return {
        "scenario": plan.name,
        "scenario_file": str(plan.file),
        "scenario_text": plan.text,
        "device": hello.device,
        "gpu": sweep.describe_gpu(hello),
        "measure": asdict(plan.measure),
        "rows": sum(len(row.passes) for job in jobs for row in job.rows),
        **provenance(own),
    }


def exit_code(records: Sequence[Record]) -> int:
    """1 before 3 before 0, as the command line's exit codes say."""
    if any(record.outcome == "check-failed" and judged(record.backend) for record in records):
        return 1
    return 3 if any(record.outcome in COULD_NOT_RUN for record in records) else 0


def plan_text(jobs: Sequence[CaseJob]) -> str:
    """One line a case: backends, passes, predicted memory and time; a sum at the end."""
    columns = [
        Column("case"),
        Column("backends", drop=2),
        Column("passes", drop=3),
        Column("memory", ">", drop=1),
        Column("time", ">", drop=1),
    ]
    rows, total = [], 0.0
    for job in jobs:
        took = sum(seconds(job, row) for row in job.rows)
        total += took
        rows.append(
            [
                job.case.label,
                " ".join(row.backend for row in job.rows),
                " ".join(dict.fromkeys(pass_ for row in job.rows for pass_ in row.passes)),
                _size(memory_bytes(job)),
                f"{took:.1f} s",
            ]
        )
    count = sum(len(row.passes) for job in jobs for row in job.rows)
    last = f"{len(jobs)} cases, {count} rows, about {_duration(total)} on {jobs[0].device} (a guess; compilation apart)"
    return aligned(columns, rows, width=terminal_width()) + "\n" + last


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**29 else f"{count / 2**20:.1f} MiB"


def _duration(total: float) -> str:
    return f"{total / 60:.0f} min" if total >= 120 else f"{total:.0f} s"


def _show(stored: Run, format: str) -> None:
    records = list(stored.records.values())
    print(as_table(records, format))
    if format == "table":
        print("\n" + "\n".join(line for text in sentences(records) for line in wrap(text, terminal_width())))
        from attnbench.results.plot import plot_run  # matplotlib: half a second, and only needed here

        for path in plot_run(stored):
            print(f"plot: {path}")
