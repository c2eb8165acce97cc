"""The parent's side: keeps one warm worker, and turns whatever ends it into typed records."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from attnbench.errors import UserError
from attnbench.measure.job import (
    CaseJob,
    CeilingsJob,
    CrosscheckJob,
    Done,
    Hello,
    Inbox,
    Job,
    LoadJob,
    Message,
    Phase,
    Row,
    blank_record,
    send,
)
from attnbench.results.record import Record

START_LIMIT_S = 180.0
_STDERR_LINES = 20


class WorkerEnded(Exception):
    """The worker is gone; `outcome` and the message say how."""

    def __init__(self, outcome: str, reason: str) -> None:
        self.outcome = outcome
        super().__init__(reason)


class Supervisor:
    """Runs jobs in a warm worker process on one device and replaces it when it ends, hangs or loses its context.

    Use as a context manager. `hello` describes the device once the first worker is up. `board` is the UUID of the board
    to use, where there are several; on the CPU it merely names a simulated one.
    """

    def __init__(self, device: str, *, board: str | None = None, echo_stderr: bool = False) -> None:
        self.device = device
        self.board = board
        self.hello: Hello | None = None
        self.restarts = -1
        self._echo = echo_stderr
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr: deque[str] = deque(maxlen=_STDERR_LINES)
        self._jobs = self._records = -1
        self._inbox = Inbox()
        self._waiting: deque[Message] = deque()
        self._reader: threading.Thread | None = None

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> Hello:
        """Start a worker unless one is up.

        Raises:
            UserError: it cannot start at all (no usable device, broken installation), or `close` has been called.
        """
        if self._closed:
            raise UserError("the measuring process was ended")
        if self._process is not None and self.hello is not None:
            return self.hello
        jobs_read, self._jobs = os.pipe()
        self._records, records_write = os.pipe()
        self._inbox, self._waiting = Inbox(), deque()
        self._stderr.clear()
        command = [sys.executable, "-m", "attnbench.measure.worker", str(jobs_read), str(records_write), self.device]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(jobs_read, records_write),
            start_new_session=True,
            env=worker_environment(self.device, self.board),
        )
        os.close(jobs_read)
        os.close(records_write)
        self._reader = threading.Thread(target=self._read_stderr, args=(self._process,), daemon=True)
        self._reader.start()
        self.restarts += 1
        try:
            message = self._next(time.monotonic() + START_LIMIT_S)
        except WorkerEnded as ended:
            words = "\n  ".join(self._stderr) or str(ended)
            raise UserError(f"the measuring process did not start ({ended}):\n  {words}") from None
        assert isinstance(message, Hello)
        self.hello = replace(message, uuid=self.board) if self.device == "cpu" else message
        return self.hello

    def ceilings(self, dtypes: tuple[str, ...], seconds: float = 1.0) -> dict[str, float]:
        """The board's matmul and copy ceilings; empty where measuring them failed."""
        return self._ask_or_warn(CeilingsJob(dtypes, seconds), "the board's ceilings")

    def crosscheck(self) -> dict[str, Any]:
        """How far the machine's clocks agree, and its noise floor; empty where that failed."""
        return self._ask_or_warn(CrosscheckJob(), "the machine's clocks")

    def load(self, backends: Sequence[str]) -> None:
        """Load backends by name before any case runs.

        Raises:
            UserError: one cannot be loaded; the message says why.
        """
        try:
            errors = self._ask(LoadJob(tuple(backends)))
        except WorkerEnded as ended:
            words = "\n  ".join([str(ended), *self._stderr])
            raise UserError(f"loading {', '.join(backends)} ended the process:\n  {words}") from None
        if errors:
            raise UserError("\n".join(errors.values()))

    def _ask_or_warn(self, job: Job, what: str) -> dict[str, Any]:
        try:
            return self._ask(job)
        except WorkerEnded as ended:
            words = "\n  ".join([str(ended), *self._stderr])
            print(f"could not measure {what}; the run goes on without:\n  {words}", file=sys.stderr)
            return {}

    def _ask(self, job: Job) -> dict[str, Any]:
        self.start()
        self._send(job)
        limit = time.monotonic() + START_LIMIT_S
        while not isinstance(message := self._next(limit), Done):
            pass
        return dict(message.payload)

    def run(self, job: CaseJob) -> Iterator[Record | Phase]:
        """Exactly one record for every row and pass of `job`, with phases in between for progress."""
        rows = list(job.rows)
        while rows:
            current: Phase | None = None
            left = {(row.backend, pass_) for row in rows for pass_ in row.passes}
            try:
                self.start()
                self._send(replace(job, rows=tuple(rows)))
                began = time.monotonic()
                deadline = began + job.measure.timeout_seconds
                while True:
                    message = self._next(deadline)
                    if isinstance(message, Phase):
                        if current is None or message.backend != current.backend:
                            self._stderr.clear()
                            began = time.monotonic()
                        current = message
                        deadline = began + message.limit_s
                        yield message
                    elif isinstance(message, Record):
                        left.discard((message.backend, message.pass_))
                        message.board = self.hello.uuid if self.hello else None
                        yield message
                    elif isinstance(message, Done):
                        if message.replace:
                            self._stop()
                        break
            except WorkerEnded as ended:
                # Before the first row begins, the failing work is everybody's: no row can be told apart.
                guilty = current.backend if current is not None else None
                for row in rows:
                    for pass_ in row.passes:
                        if (row.backend, pass_) in left and guilty in (None, row.backend):
                            left.discard((row.backend, pass_))
                            yield self._ended_record(job, row.backend, pass_, ended, current)
            rows = [
                Row(r.backend, kept) for r in rows if (kept := tuple(p for p in r.passes if (r.backend, p) in left))
            ]

    def _ended_record(self, job: CaseJob, backend: str, pass_: str, ended: WorkerEnded, phase: Phase | None) -> Record:
        where = f" while at: {phase.name}" if phase is not None else ""
        record = blank_record(job, backend, pass_, ended.outcome, f"{ended}{where}")
        record.board = self.hello.uuid if self.hello else self.board
        record.stderr_tail = list(self._stderr)
        record.finished_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return record

    def _send(self, job: Job) -> None:
        try:
            send(self._jobs, job)
        except BrokenPipeError:
            raise self._ended() from None

    def _next(self, deadline: float) -> Message:
        while not self._waiting:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._records], [], [], max(0.0, left))
            if not ready:
                self._stop()
                raise WorkerEnded("timeout", "took longer than its limit and was ended")
            data = os.read(self._records, 1 << 16)
            if not data:
                raise self._ended()
            self._waiting.extend(self._inbox.feed(data))
        return self._waiting.popleft()

    def _ended(self) -> WorkerEnded:
        """Collect a worker that closed its pipe."""
        process = self._process
        assert process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        if self._reader is not None:
            self._reader.join(timeout=2)
        code = process.returncode
        self._stop()
        if code is not None and code < 0:
            name = signal.Signals(-code).name if -code in {s.value for s in signal.Signals} else f"signal {-code}"
            hint = " (out of host memory?)" if name == "SIGKILL" else ""
            return WorkerEnded("crashed", f"ended by {name}{hint}")
        return WorkerEnded("crashed", f"the process exited with code {code}")

    def _stop(self) -> None:
        """End the worker and everything that it started."""
        process, self._process = self._process, None
        for descriptor in (self._jobs, self._records):
            if descriptor >= 0:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        self._jobs = self._records = -1
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # its own session: compilers that it started go with it
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=15)

    def close(self) -> None:
        """End the worker for good. Idempotent; another thread's `run` then ends with a UserError."""
        self._closed = True
        self._stop()

    def _read_stderr(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            text = line.decode(errors="replace").rstrip()[:500]
            if text:
                self._stderr.append(text)
                if self._echo:
                    print(text, file=sys.stderr)
        process.stdout.close()


def worker_environment(device: str, board: str | None = None) -> dict[str, str]:
    """The worker's environment: Triton's interpreter on the CPU, and never on a GPU; of several boards only `board`."""
    environment = dict(os.environ)
    environment["PYTHONUNBUFFERED"] = "1"
    package_root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    paths = [package_root, *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    if device == "cpu":
        environment["TRITON_INTERPRET"] = "1"
        environment["CUDA_VISIBLE_DEVICES"] = ""
    else:
        environment.pop("TRITON_INTERPRET", None)
        if board is not None:
            environment["CUDA_VISIBLE_DEVICES"] = board
    return environment
