"""What the parent asks a worker to do, and what the worker says back. Plain data; imports no torch."""

from __future__ import annotations

import os
import pickle
import struct
from dataclasses import dataclass, field
from typing import Any

from attnbench.results.record import Record
from attnbench.scenario.case import Case, op_name
from attnbench.scenario.plan import CheckPolicy, MeasurePolicy


@dataclass(frozen=True)
class Row:
    """One backend of a case and the passes of it that get a record each."""

    backend: str
    passes: tuple[str, ...]


@dataclass(frozen=True)
class CaseJob:
    """One case with every backend that is to run it, so that inputs and references are made once.

    `layout` names a variant of how the inputs lie in memory (see `attnbench.ops.corpus`), "" the plain one. With
    `timed` False rows end as `checked`; with `alone` a batch's longest sequence is compared with itself alone. `board`
    is the UUID of the board that the case's other rows are from, None where any will do.
    """

    case: Case
    rows: tuple[Row, ...]
    device: str
    measure: MeasurePolicy = field(default_factory=MeasurePolicy)
    check: CheckPolicy = field(default_factory=CheckPolicy)
    baseline: str | None = None
    timed: bool = True
    ceilings: dict[str, float] = field(default_factory=dict)
    layout: str = ""
    alone: bool = False
    name: str = ""
    board: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CeilingsJob:
    """Measure the board's matmul and copy ceilings at the duty of the rows."""

    dtypes: tuple[str, ...]
    seconds: float = 1.0


@dataclass(frozen=True)
class CrosscheckJob:
    """Compare the machine's clocks and measure its noise floor; see `crosscheck`."""


@dataclass(frozen=True)
class LoadJob:
    """Load these backends; `Done.payload` holds what went wrong, by name."""

    backends: tuple[str, ...]


@dataclass(frozen=True)
class Hello:
    """A worker's first message: it is up, on this device."""

    pid: int
    device: str
    board: str | None = None
    uuid: str | None = None
    sms: int = 0
    memory_bytes: int = 0


@dataclass(frozen=True)
class Phase:
    """The worker starts something that may take `limit_s` seconds at most; `backend` None is work for all of them."""

    name: str
    backend: str | None
    limit_s: float
    passes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Done:
    """A job's last message. After a sticky CUDA error `replace` asks for a new worker."""

    replace: bool = False
    payload: dict[str, Any] = field(default_factory=dict)


Message = Hello | Phase | Record | Done
Job = CaseJob | CeilingsJob | CrosscheckJob | LoadJob


def blank_record(job: CaseJob, backend: str, pass_: str, outcome: str, reason: str | None = None) -> Record:
    """A record of one row with its identity and outcome; figures still missing."""
    return Record(
        case_id=job.case.case_id,
        op=op_name(job.case),
        case=job.case.semantic(),
        label=job.case.label,
        backend=backend,
        pass_=pass_,
        outcome=outcome,
        reason=reason,
    )


def send(descriptor: int, message: Any) -> None:
    """Write one length-prefixed pickle; a reader never sees half of one as whole."""
    body = pickle.dumps(message)
    data = memoryview(struct.pack(">Q", len(body)) + body)
    while data:
        data = data[os.write(descriptor, data) :]


class Inbox:
    """Reassembles messages from the bytes of a pipe."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """Every message that is whole after `data`."""
        self._buffer += data
        found = []
        while len(self._buffer) >= 8:
            (size,) = struct.unpack_from(">Q", self._buffer)
            if len(self._buffer) < 8 + size:
                break
            found.append(pickle.loads(bytes(self._buffer[8 : 8 + size])))
            del self._buffer[: 8 + size]
        return found
