"""A sweep: jobs through the worker, records into the store, progress to the terminal. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from attnbench.errors import UserError
from attnbench.measure.job import CaseJob, Hello, Phase
from attnbench.measure.jobs import seconds
from attnbench.measure.supervisor import Supervisor
from attnbench.results.record import Record

Store = Callable[[Record], None]


class Advance(Protocol):
    def __call__(self, message: Record | Phase, job: CaseJob | None = None) -> None: ...


def execute(supervisor: Supervisor, jobs: Sequence[CaseJob], store: Store, *, show: bool | None = None) -> list[Record]:
    """Run every job and hand each record to `store` as soon as it is there; returns them all.

    A bar with an ETA is drawn on stderr where that is a terminal (or `show` says so).
    """
    records: list[Record] = []
    with bar(jobs, show) as advance:
        for job in jobs:
            for message in supervisor.run(job):
                if isinstance(message, Record):
                    records.append(message)
                    store(message)
                advance(message, job)
    return records


@contextlib.contextmanager
def bar(jobs: Sequence[CaseJob], show: bool | None = None) -> Iterator[Advance]:
    """A progress bar over the predicted seconds of all rows; the yielded function takes each message of a worker.

    A phase is only named where its job is given.
    """
    guesses: dict[tuple[str, str, str], float] = {}
    for job in jobs:
        for row in job.rows:
            share = seconds(job, row) / len(row.passes)
            for pass_ in row.passes:
                guesses[job.case.case_id, row.backend, pass_] = share
    with progress(sum(guesses.values()), sum(len(row.passes) for job in jobs for row in job.rows), show) as step:

        def advance(message: Record | Phase, job: CaseJob | None = None) -> None:
            if isinstance(message, Record):
                key = (message.case_id, message.backend, message.pass_)
                step(f"{message.label}  {message.backend}", guesses.get(key, 0.0), 1)
            elif job is not None:
                step(f"{job.case.label}  {message.backend or ''} {message.name}", 0.0, 0)

        yield advance


def execute_parallel(
    supervisors: Sequence[Supervisor], jobs: Sequence[CaseJob]
) -> Iterator[tuple[CaseJob, list[Record]]]:
    """Run untimed jobs on several workers at once; yields each job with its records as it is finished.

    Compiling is most of a check's time, and workers compile side by side. Only for checks: timed jobs would disturb
    each other.
    """
    queue = iter(jobs)
    finished: deque[tuple[CaseJob, list[Record]]] = deque()
    state = threading.Condition()
    failures: list[BaseException] = []

    def work(supervisor: Supervisor) -> None:
        try:
            while True:
                with state:
                    job = None if failures else next(queue, None)
                if job is None:
                    return
                found = [message for message in supervisor.run(job) if isinstance(message, Record)]
                with state:
                    finished.append((job, found))
                    state.notify_all()
        except BaseException as error:
            with state:
                failures.append(error)
                state.notify_all()

    for supervisor in supervisors:
        threading.Thread(target=work, args=(supervisor,), daemon=True).start()
    for _ in jobs:
        with state:
            while not finished and not failures:
                state.wait()
            if not finished:
                raise failures[0]
            one = finished.popleft()
        yield one


Step = Callable[[str, float, int], None]


@contextlib.contextmanager
def progress(total_s: float, rows: int, show: bool | None = None) -> Iterator[Step]:
    """A bar over `total_s` predicted seconds; the yielded function takes (what, seconds done, rows done)."""
    if not (sys.stderr.isatty() if show is None else show):
        yield lambda what, done, count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.fields[rows]}"),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    # A bar on a terminal's stderr must not swallow a table that goes down a pipe.
    console, both = Console(stderr=True), sys.stdout.isatty()
    with Progress(*columns, console=console, transient=True, redirect_stdout=both) as bar:
        task = bar.add_task("starting", total=max(total_s, 1e-9), rows=f"0/{rows}")
        count = 0

        def step(what: str, done: float, more: int) -> None:
            nonlocal count
            count += more
            bar.update(task, advance=done, description=what, rows=f"{count}/{rows}")

        yield step


def describe_gpu(hello: Hello) -> dict[str, Any] | None:
    """`run.json`'s `gpu`: NVML's description and the datasheet's peaks, None on the CPU."""
    if hello.device != "cuda":
        return None
    from attnbench.measure.board import board
    from attnbench.measure.peaks import peak_of

    described = board(hello.uuid)
    gpu = asdict(described) if described else {"name": hello.board, "uuid": hello.uuid}
    peak = peak_of(hello.board)
    return {**gpu, "sms": hello.sms, "memory_bytes": hello.memory_bytes, "peak": asdict(peak) if peak else None}


def machine_words(found: dict[str, Any]) -> str:
    """What a cross-check says, in one line."""
    gap, noise = found["timer_gap_percent"], found["noise_floor_percent"]
    words = f"differences under {noise:.2f} % are invisible on this machine; its clocks agree within {gap:.2f} %"
    if gap > 2:
        words += " (more than 2 %: close other work on this machine, and see `attnbench doctor`)"
    referee = found.get("referee", {})
    if "gap_percent" in referee:
        words += f"; cuda-bench agrees within {referee['gap_percent']:.2f} %"
    return words + (f"; {referee['error']}" if "error" in referee else "")


@contextlib.contextmanager
def gpu_lock(uuid: str | None) -> Iterator[None]:
    """Hold this machine's lock of one board, so that two runs do not time each other's work."""
    if uuid is None:
        yield
        return
    from filelock import FileLock, Timeout

    path = Path(tempfile.gettempdir()) / f"attnbench-{os.getuid()}-{uuid}.lock"
    lock = FileLock(path)
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            print(f"waiting for another attnbench on {uuid} ({path})", file=sys.stderr)
            lock.acquire()
    except OSError as error:
        raise UserError(f"cannot lock {path}: {error.strerror}; set TMPDIR to a folder that you may write") from None
    try:
        yield
    finally:
        lock.release()
