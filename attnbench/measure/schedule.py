"""Cases over boards: longest predicted case first, each to the board that is free first. Imports no torch."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from attnbench.measure.job import CaseJob
from attnbench.measure.jobs import seconds
from attnbench.results.record import Record


def job_seconds(job: CaseJob) -> float:
    """Predicted seconds of all rows of a case."""
    return sum(seconds(job, row) for row in job.rows)


def longest_first(jobs: Iterable[CaseJob]) -> list[CaseJob]:
    """The order in which boards take cases; equal ones keep theirs."""
    return sorted(jobs, key=job_seconds, reverse=True)


def simulate(durations: Sequence[float], boards: int) -> list[list[int]]:
    """Indices of what each board runs when it takes the longest that is left whenever it is free.

    The last board ends within 4/3 of the best possible, and far closer where cases are many (Graham, 1969).
    """
    plan: list[list[int]] = [[] for _ in range(boards)]
    free = [(0.0, board) for board in range(boards)]
    for index in sorted(range(len(durations)), key=lambda i: durations[i], reverse=True):
        at, board = heapq.heappop(free)
        plan[board].append(index)
        heapq.heappush(free, (at + durations[index], board))
    return plan


def at_home(
    jobs: Iterable[CaseJob], whole: Iterable[CaseJob], records: Iterable[Record], boards: Collection[str]
) -> list[CaseJob]:
    """What is left of an earlier run so that no case's rows come from two boards.

    Args:
        jobs: what is left, row by row.
        whole: the same cases with all their rows.
        records: what the earlier run has.
        boards: UUIDs of the boards of this run.

    A case that was begun goes on on its board. Where that board is not among `boards`, or rows lie on several, all rows
    of the case are measured again.
    """
    begun: dict[str, set[str]] = {}
    for record in records:
        if record.board is not None and record.median_ms is not None:
            begun.setdefault(record.case_id, set()).add(record.board)
    all_rows = {(job.case.case_id, job.layout): job for job in whole}
    placed = []
    for job in jobs:
        homes = begun.get(job.case.case_id, set())
        if not homes:
            placed.append(job)
        elif len(homes) == 1 and homes <= set(boards):
            placed.append(replace(job, board=next(iter(homes))))
        else:
            placed.append(all_rows[job.case.case_id, job.layout])
    return placed
