"""Which jobs of a check come first, and on how many workers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from attnbench.measure import sweep
from attnbench.measure.check_order import compile_first, kernels_of, worker_count
from attnbench.measure.job import CaseJob, blank_record
from attnbench.ops.corpus import corpus
from attnbench.scenario.case import AttentionCase

CASE = AttentionCase(dtype="bf16", heads=2, kv_heads=1, head_dim=64, causal=True, batch=1, seqlen_q=17, seqlen_k=20)


def job(**changes: Any) -> CaseJob:
    return CaseJob(replace(CASE, **changes), (), "cpu")


def test_each_set_of_kernels_comes_once_before_any_comes_twice() -> None:
    jobs = [job(), job(seqlen_k=30), job(head_dim=128), job(heads=4), job(causal=False), job(head_dim=128, batch=2)]
    ordered = compile_first(jobs)
    assert ordered == [jobs[2], jobs[0], jobs[4], jobs[1], jobs[3], jobs[5]]


def test_the_corpus_loses_nothing_and_its_leaders_differ() -> None:
    jobs = [CaseJob(entry.case, (), "cuda", layout=entry.layout, name=entry.name) for entry in corpus("cuda")]
    ordered = compile_first(jobs)
    assert sorted(map(id, ordered)) == sorted(map(id, jobs))
    sets = [kernels_of(one) for one in ordered]
    assert len(set(sets)) > 30
    assert len(set(sets[: len(set(sets))])) == len(set(sets))


@pytest.mark.parametrize(
    ("jobs", "processors", "memory", "count"),
    [
        (200, 16, 140 << 30, 14),
        (200, 64, 140 << 30, 14),
        (9, 16, 140 << 30, 2),
        (200, 2, 140 << 30, 1),
        (200, 16, 0, 1),
    ],
)
def test_workers(jobs: int, processors: int, memory: int, count: int) -> None:
    assert worker_count(jobs, processors, memory, 10 << 30) == count


class Worker:
    """Hands back one record a job; `slow` waits for the other one's second job."""

    def __init__(self, wait: threading.Event | None, tell: threading.Event | None, fail: bool = False) -> None:
        self.wait, self.tell, self.fail = wait, tell, fail

    def run(self, one: CaseJob) -> Iterator[Any]:
        if self.fail:
            raise OSError("the worker cannot start")
        if self.wait is not None:
            assert self.wait.wait(10)
        yield blank_record(one, "triton", "check", "checked")
        if self.tell is not None and one.case.seqlen_k == 3:
            self.tell.set()


def test_results_come_as_they_are_finished() -> None:
    done = threading.Event()
    jobs = [job(seqlen_k=n) for n in (1, 2, 3)]
    workers: Any = [Worker(done, None), Worker(None, done)]
    found = list(sweep.execute_parallel(workers, jobs))
    assert sorted(one.case.seqlen_k for one, _ in found) == [1, 2, 3]  # type: ignore[union-attr]
    assert all(len(records) == 1 for _, records in found)


def test_a_worker_that_cannot_start_ends_the_check() -> None:
    workers: Any = [Worker(None, None, fail=True)]
    with pytest.raises(OSError, match="cannot start"):
        list(sweep.execute_parallel(workers, [job()]))
