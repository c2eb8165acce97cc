"""What `run --dry-run` prints: cases with predicted memory and time, and how long each board would work."""

from __future__ import annotations

from collections.abc import Sequence

from attnbench.measure.job import CaseJob
from attnbench.measure.jobs import memory_bytes
from attnbench.measure.schedule import job_seconds, simulate
from attnbench.results.text import Column, aligned, terminal_width

_COLUMNS = [
    Column("case"),
    Column("backends", drop=2),
    Column("passes", drop=3),
    Column("memory", ">", drop=1),
    Column("time", ">", drop=1),
]


def plan_text(jobs: Sequence[CaseJob], boards: int | None = None) -> str:
    """One line a case: backends, passes, predicted memory and time; a sum at the end, and with `boards` a line each."""
    took, sizes = [job_seconds(job) for job in jobs], [memory_bytes(job) for job in jobs]
    plan = simulate(took, boards) if boards else []
    where = {index: board for board, indices in enumerate(plan) for index in indices}
    columns = [*_COLUMNS, *([Column("GPU", ">")] if boards else [])]
    rows = []
    for index, job in enumerate(jobs):
        rows.append(
            [
                job.case.label,
                " ".join(row.backend for row in job.rows),
                " ".join(dict.fromkeys(pass_ for row in job.rows for pass_ in row.passes)),
                _size(sizes[index]),
                f"{took[index]:.1f} s",
                *([str(where[index])] if boards else []),
            ]
        )
    count = sum(len(row.passes) for job in jobs for row in job.rows)
    total = f"about {_duration(sum(took))} on {jobs[0].device} (a guess; compilation apart)"
    last = f"{len(jobs)} cases, {count} rows, {total}"
    return "\n".join([aligned(columns, rows, width=terminal_width()), last, *_boards_text(sizes, took, plan)])


def _boards_text(sizes: Sequence[int], took: Sequence[float], plan: Sequence[Sequence[int]]) -> list[str]:
    if not plan:
        return []
    columns = [Column("GPU", ">"), Column("cases", ">"), Column("largest", ">"), Column("time", ">")]
    rows = []
    for board, indices in enumerate(plan):
        largest = max((sizes[index] for index in indices), default=0)
        busy = sum(took[index] for index in indices)
        rows.append([str(board), str(len(indices)), _size(largest), _duration(busy)])
    longest = max(sum(took[index] for index in indices) for indices in plan)
    each = f"longest case first, each to the GPU that is free first: about {_duration(longest)} on {len(plan)} GPUs"
    return ["", aligned(columns, rows, width=terminal_width()), each]


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**29 else f"{count / 2**20:.1f} MiB"


def _duration(total: float) -> str:
    return f"{total / 60:.0f} min" if total >= 120 else f"{total:.0f} s"
