"""In which order a check's jobs run on several workers: what must be compiled first, and only once. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attnbench.measure.job import CaseJob
from attnbench.ops.attention_work import tokens
from attnbench.scenario.case import AttentionCase

LEAST_JOBS_EACH = 4
"""A worker takes seconds to start: fewer jobs than this do not pay for one."""


def kernels_of(job: CaseJob) -> tuple[Any, ...]:
    """What decides which kernels a job's backends compile; jobs that share it mostly share them."""
    case = job.case
    if isinstance(case, AttentionCase):
        return "attention", case.dtype, case.head_dim, case.dv, case.causal, case.layout
    return "attnres", case.dtype, case.phase, case.hidden, case.blocks, case.queries, case.lse_grad


def compile_first(jobs: Sequence[CaseJob]) -> list[CaseJob]:
    """The first job of each set of kernels before all others, wide heads (which compile longest) first.

    So each set is compiled by one worker while the others compile other sets, instead of by several at once.
    """
    first: dict[tuple[Any, ...], int] = {}
    for index, job in enumerate(jobs):
        first.setdefault(kernels_of(job), index)
    leaders = sorted(first.values(), key=lambda index: -_width(jobs[index]))
    leading = set(leaders)
    return [jobs[index] for index in leaders] + [job for index, job in enumerate(jobs) if index not in leading]


def worker_count(jobs: int, processors: int, memory_bytes: int, job_bytes: int) -> int:
    """How many workers share one board: as many as processors to compile on, jobs and memory allow, at least one."""
    return max(1, min(processors - 2, jobs // LEAST_JOBS_EACH, memory_bytes // job_bytes))


def _width(job: CaseJob) -> int:
    case = job.case
    if not isinstance(case, AttentionCase):
        return 0
    return max(case.head_dim, case.dv) if min(tokens(case)) else 0  # nothing is compiled for an empty case
