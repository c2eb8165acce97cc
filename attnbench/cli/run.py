"""`attnbench run SCENARIO.yaml`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from attnbench import scenario as scenarios
from attnbench.backends import judged
from attnbench.backends.names import custom_file, is_custom
from attnbench.cli import places
from attnbench.cli.plan_text import plan_text
from attnbench.measure import sweep
from attnbench.measure.job import CaseJob
from attnbench.measure.jobs import plan_jobs, without
from attnbench.measure.pool import Pool, Station, board_locks, boards_info, more_boards, surveys_info
from attnbench.measure.provenance import provenance
from attnbench.measure.schedule import at_home
from attnbench.results.record import COULD_NOT_RUN, Record
from attnbench.results.runs import Key, Run, find_resumable, newest_run, read_run, same_run
from attnbench.results.split_text import split_table
from attnbench.results.store import RunWriter
from attnbench.results.table import as_table, machine, sentences
from attnbench.results.text import terminal_width, wrap

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
    gpus: str | None = None,
    executor: str = "local",
    address: str | None = None,
    accelerator: str | None = None,
) -> int:
    """Check and time a scenario's cases, store the run, print its table; `detail` also says where each row's time goes.

    `gpus` spreads the cases over several boards, of this machine or with `executor` "ray" of a cluster.

    Returns 0 when all is good, 1 when a judged backend failed its check, 3 when cases could not be run, and 130 after
    Ctrl-C, with every finished case stored.
    """
    plan = scenarios.load(scenario)
    if detail:
        plan = replace(plan, measure=replace(plan.measure, split=True))
    where = places.device_of(device, gpus, executor, dry_run)
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
        print(plan_text(jobs, places.planned_boards(gpus, executor)))
        return 0
    with places.pool_of(where, gpus, executor, address, accelerator) as pool:
        stations = pool.start()
        own = dict.fromkeys(row.backend for job in jobs for row in job.rows if is_custom(row.backend))
        if own:
            pool.load(list(own))
        with board_locks(stations) if executor == "local" else nullcontext():  # Ray's actors lock theirs
            folder, interrupted = _sweep(pool, stations, plan, jobs, out, resume, failed_in)
    stored = read_run(folder)
    _show(stored, format)
    if detail and format == "table" and (split := split_table(stored.records.values())):
        print(f"\nWhere the time goes, ms:\n{split}")
    if interrupted:
        print(f"interrupted; what was finished is in {folder} (go on with --resume)", file=sys.stderr)
        return INTERRUPTED
    return exit_code(list(stored.records.values()))


def _sweep(
    pool: Pool,
    stations: Sequence[Station],
    plan: scenarios.Scenario,
    jobs: list[CaseJob],
    out: Path,
    resume: bool,
    failed_in: Run | None = None,
) -> tuple[Path, bool]:
    info = run_info(plan, jobs, stations)
    if failed_in is not None:
        info["only_failed_of"] = failed_in.name
        earlier = failed_in if resume and same_run(failed_in, info) else None
    else:
        earlier = _earlier(out, info) if resume else None
    if earlier is not None and failed_in is None:
        done = earlier.done()
        left_over = [left for job in jobs if (left := without(job, done)) is not None]
        uuids = {station.hello.uuid for station in stations if station.hello.uuid}
        jobs = at_home(left_over, jobs, earlier.records.values(), uuids)
    writer = RunWriter(out, info, resume=earlier)
    print(f"{sum(len(row.passes) for job in jobs for row in job.rows)} rows, into {writer.folder}", file=sys.stderr)
    try:
        if earlier is not None:
            writer.update(**more_boards(earlier.info, info))
        if jobs and plan.measure.ceilings:
            surveys = pool.survey(sorted({job.case.dtype for job in jobs}))
            if surveys[0].ceilings:
                writer.update(**surveys_info(surveys))
                if surveys[0].crosscheck:
                    print(sweep.machine_words(surveys[0].crosscheck), file=sys.stderr)
        pool.execute(jobs, writer.append)
        writer.update(**more_boards(writer.info, boards_info(pool.stations)))  # of a cluster, a case may have moved
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


def run_info(plan: scenarios.Scenario, jobs: Sequence[CaseJob], stations: Sequence[Station]) -> dict[str, Any]:
    """The contents of `run.json`."""
    own = [
        Path(file) for job in jobs for row in job.rows if (file := custom_file(row.backend)) and Path(file).is_file()
    ]
    return {
        "scenario": plan.name,
        "scenario_file": str(plan.file),
        "scenario_text": plan.text,
        "device": stations[0].hello.device,
        **boards_info(stations),
        "measure": asdict(plan.measure),
        "rows": sum(len(row.passes) for job in jobs for row in job.rows),
        **provenance(own),
    }


def exit_code(records: Sequence[Record]) -> int:
    """1 before 3 before 0, as the command line's exit codes say."""
    if any(record.outcome == "check-failed" and judged(record.backend) for record in records):
        return 1
    return 3 if any(record.outcome in COULD_NOT_RUN for record in records) else 0


def _show(stored: Run, format: str) -> None:
    records = list(stored.records.values())
    print(as_table(records, format))
    if format == "table":
        said = [*sentences(records), machine(stored)]
        print("\n" + "\n".join(line for text in said for line in wrap(text, terminal_width())))
        from attnbench.results.plot import plot_run  # matplotlib: half a second, and only needed here

        for path in plot_run(stored):
            print(f"plot: {path}")
