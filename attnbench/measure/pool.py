"""Boards to run a sweep on: one warm worker a board, whether this machine has one board or several."""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from attnbench.errors import UserError
from attnbench.measure import sweep
from attnbench.measure.board import Board, boards, visible_uuids
from attnbench.measure.job import CaseJob, Hello, Phase
from attnbench.measure.schedule import longest_first
from attnbench.measure.supervisor import Supervisor
from attnbench.results.record import Record

Result = TypeVar("Result")


@dataclass(frozen=True)
class Station:
    """One board with its worker: what it says of itself, and `run.json`'s description of it (None on the CPU)."""

    hello: Hello
    gpu: dict[str, Any] | None


@dataclass(frozen=True)
class Survey:
    """What is measured once on each board, before its first case; empty on the CPU and where measuring failed."""

    board: str | None = None
    ceilings: dict[str, float] = field(default_factory=dict)
    crosscheck: dict[str, Any] = field(default_factory=dict)


class Pool(Protocol):
    """Where a sweep's cases run. Use as a context manager; leaving it ends the workers."""

    def __enter__(self) -> Pool: ...

    def __exit__(self, *_: object) -> None: ...

    @property
    def stations(self) -> list[Station]:
        """Every board that took part so far, the first ones first."""

    def start(self) -> list[Station]:
        """Start every worker; raises UserError where one cannot start or two would share a board."""

    def load(self, backends: Sequence[str]) -> None:
        """Load a user's own backends; raises UserError where one cannot be loaded."""

    def survey(self, dtypes: Sequence[str]) -> list[Survey]:
        """Measure each board's ceilings for `dtypes` and cross-check its clocks, in the order of the stations."""

    def execute(self, jobs: Sequence[CaseJob], store: sweep.Store) -> None:
        """Run every job on one board each, and hand each record to `store`; raises UserError where jobs are left."""


class LocalPool:
    """Workers of this machine. A case goes whole to one board: the one of `CaseJob.board`, else whichever is free."""

    def __init__(self, supervisors: Sequence[Supervisor]) -> None:
        self._supervisors = list(supervisors)
        # A worker dies with the thread that started it, so each board keeps one thread for the whole run.
        self._threads = [ThreadPoolExecutor(1) for _ in supervisors] if len(supervisors) > 1 else []
        self._surveys = [Survey() for _ in supervisors]
        self._stations: list[Station] = []

    @property
    def stations(self) -> list[Station]:
        return list(self._stations)

    def __enter__(self) -> LocalPool:
        return self

    def __exit__(self, *_: object) -> None:
        for supervisor in self._supervisors:
            supervisor.close()
        for thread in self._threads:
            thread.shutdown(wait=True, cancel_futures=True)

    def start(self) -> list[Station]:
        hellos = self._each(lambda supervisor: supervisor.start())
        refuse_sharing(hello.uuid for hello in hellos)
        self._stations = [Station(hello, sweep.describe_gpu(hello)) for hello in hellos]
        return self.stations

    def load(self, backends: Sequence[str]) -> None:
        self._each(lambda supervisor: supervisor.load(backends))

    def survey(self, dtypes: Sequence[str]) -> list[Survey]:
        self._surveys = self._each(lambda supervisor: measure_once(supervisor, dtypes))
        return self._surveys

    def execute(self, jobs: Sequence[CaseJob], store: sweep.Store) -> None:
        if not self._threads:
            sweep.execute(self._supervisors[0], [_told(job, self._surveys[0]) for job in jobs], store)
            return
        waiting = _Waiting(jobs)
        inbox: queue.Queue[Record | Phase | _Finished | _Ended] = queue.Queue()

        def work(supervisor: Supervisor, survey: Survey) -> None:
            error: BaseException | None = None
            try:
                while (job := waiting.take(_uuid(supervisor))) is not None:
                    for message in supervisor.run(_told(job, survey)):
                        inbox.put(message)
                    inbox.put(_Finished(job))
            except BaseException as caught:
                error = caught
            inbox.put(_Ended(error))

        for thread, supervisor, survey in zip(self._threads, self._supervisors, self._surveys, strict=True):
            thread.submit(work, supervisor, survey)
        left, failures = len(jobs), []
        with sweep.bar(jobs) as advance:
            for _ in self._threads:
                while not isinstance(message := inbox.get(), _Ended):
                    if isinstance(message, _Finished):
                        left -= 1
                        continue
                    if isinstance(message, Record):
                        store(message)
                    advance(message)
                if message.error is not None:
                    failures.append(message.error)
        if left:
            raise unfinished(left, failures[0] if failures else None)

    def _each(self, call: Callable[[Supervisor], Result]) -> list[Result]:
        """`call` of every supervisor, side by side."""
        if not self._threads:
            return [call(supervisor) for supervisor in self._supervisors]
        each = zip(self._threads, self._supervisors, strict=True)
        return [found.result() for found in [thread.submit(call, supervisor) for thread, supervisor in each]]


@dataclass(frozen=True)
class _Finished:
    job: CaseJob


@dataclass(frozen=True)
class _Ended:
    error: BaseException | None


class _Waiting:
    """Jobs that no board has taken yet, longest first."""

    def __init__(self, jobs: Iterable[CaseJob]) -> None:
        self._jobs = deque(longest_first(jobs))
        self._lock = threading.Lock()

    def take(self, board: str | None) -> CaseJob | None:
        """The next job of this very board, else the next of any; None where there is none."""
        with self._lock:
            found = next((job for job in self._jobs if job.board == board and board is not None), None)
            found = found or next((job for job in self._jobs if job.board is None), None)
            if found is not None:
                self._jobs.remove(found)
            return found


def measure_once(supervisor: Supervisor, dtypes: Sequence[str]) -> Survey:
    """Ceilings and cross-check of one worker's board."""
    if supervisor.device != "cuda":
        return Survey()
    ceilings = supervisor.ceilings(tuple(dtypes))
    return Survey(_uuid(supervisor), ceilings, supervisor.crosscheck() if ceilings else {})


def unfinished(left: int, error: BaseException | None) -> UserError:
    """Cases are left because boards were lost; what ended them, and what to do."""
    why = f": {error}" if error is not None else ", whose boards are gone"
    return UserError(f"{left} cases could not be run{why}\nWhat was finished is stored; go on with --resume.")


def refuse_sharing(uuids: Iterable[str | None]) -> None:
    """Raises UserError where two workers would time each other's work on one board."""
    seen: set[str] = set()
    for uuid in uuids:
        if uuid is not None and uuid in seen:
            raise UserError(f"two workers on one GPU ({uuid}): their times would mean nothing")
        seen.add(uuid or "")


def local_boards(asked: str, found: Sequence[Board] | None = None) -> list[Board]:
    """The boards of `--gpus all|N`, in NVML's order, those of CUDA_VISIBLE_DEVICES only.

    Raises:
        UserError: not a number, none, more than there are, one named twice, or boards of different models.
    """
    if asked != "all" and not (asked.isdecimal() and int(asked) > 0):
        raise UserError(f"--gpus {asked}: wants `all` or a number of boards")
    why = None
    if found is None:
        found, why = boards()
    usable = _visible(found)
    if not usable:
        raise UserError(f"--gpus {asked}: {why or 'CUDA_VISIBLE_DEVICES hides every board'}")
    if asked != "all" and int(asked) > len(usable):
        raise UserError(
            f"--gpus {asked}: there are {len(usable)}, and two workers are never put on one GPU: they would time each "
            "other's work"
        )
    chosen = usable if asked == "all" else usable[: int(asked)]
    if len({board.name for board in chosen}) > 1:
        names = ", ".join(f"{board.name} ({board.uuid})" for board in chosen)
        raise UserError(
            f"--gpus {asked}: boards of different models in one run: {names}. Choose by CUDA_VISIBLE_DEVICES"
        )
    return chosen


def _visible(found: Sequence[Board]) -> list[Board]:
    names = visible_uuids()
    if names is None:
        return list(found)
    chosen = []
    for name in names:
        if name.isdecimal():
            if len({board.name for board in found}) > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
                raise UserError(
                    f"CUDA_VISIBLE_DEVICES={','.join(names)}: with boards of different models CUDA's numbers are not "
                    "NVML's; name boards by UUID, or set CUDA_DEVICE_ORDER=PCI_BUS_ID"
                )
            hits = list(found[int(name) : int(name) + 1])
        else:
            hits = [board for board in found if board.uuid.startswith(name)]
        if not hits:
            break  # as CUDA: what follows an unknown device is hidden
        chosen.append(hits[0])
    refuse_sharing(board.uuid for board in chosen)
    return chosen


@contextmanager
def board_locks(stations: Iterable[Station]) -> Iterator[None]:
    """This machine's locks of all boards, taken in one order so that two runs cannot wait for each other."""
    with ExitStack() as stack:
        for uuid in sorted({s.hello.uuid for s in stations if s.hello.uuid and s.hello.device == "cuda"}):
            stack.enter_context(sweep.gpu_lock(uuid))
        yield


def boards_info(stations: Sequence[Station]) -> dict[str, Any]:
    """`run.json`'s `gpu` and, of several boards, `gpus`."""
    described = [station.gpu for station in stations]
    return {"gpu": described[0], **({"gpus": described} if len(described) > 1 and described[0] is not None else {})}


def more_boards(earlier: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """`gpus` of a run that went on with other boards than it began with; nothing where they are the same."""
    found = {gpu["uuid"]: gpu for info in (earlier, now) for gpu in info.get("gpus") or [info.get("gpu")] if gpu}
    return {"gpus": list(found.values())} if len(found) > 1 else {}


def surveys_info(surveys: Sequence[Survey]) -> dict[str, Any]:
    """`run.json`'s `ceilings` and `crosscheck`, of the first board, and of several boards each one's in `surveys`."""
    info: dict[str, Any] = {"ceilings": surveys[0].ceilings, "crosscheck": surveys[0].crosscheck}
    if len(surveys) > 1:
        info["surveys"] = {
            survey.board: {"ceilings": survey.ceilings, "crosscheck": survey.crosscheck} for survey in surveys
        }
    return info


def _told(job: CaseJob, survey: Survey) -> CaseJob:
    return replace(job, ceilings=survey.ceilings) if survey.ceilings else job


def _uuid(supervisor: Supervisor) -> str | None:
    return supervisor.hello.uuid if supervisor.hello else None
