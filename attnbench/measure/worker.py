"""The worker process: `python -m attnbench.measure.worker JOBS RECORDS DEVICE`, two pipe descriptors and a device.

A fresh interpreter in a session of its own. Jobs come in over one pipe, messages go out over another, so nothing that a
kernel or a compiler prints can corrupt them; stdout and stderr go to the parent's log.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
from typing import Any

from attnbench.measure.job import CeilingsJob, CrosscheckJob, Done, Hello, Inbox, Job, LoadJob, Phase, send


def main(arguments: list[str]) -> int:
    jobs, records, device = int(arguments[0]), int(arguments[1]), arguments[2]
    _die_with_parent()
    session, hello = _start(device)
    gc.freeze()  # torch's million objects stay; collecting between rows then takes milliseconds
    send(records, hello)
    inbox = Inbox()
    while data := os.read(jobs, 1 << 16):
        for job in inbox.feed(data):
            _serve(session, job, records)
    return 0


def _serve(session: Any, job: Job, records: int) -> None:
    from attnbench.measure.case_runner import CaseRunner

    if isinstance(job, LoadJob):
        send(records, Done(payload={name: why for name in job.backends if (why := _load_error(name))}))
        return
    if isinstance(job, CrosscheckJob):
        from attnbench.measure.crosscheck import crosscheck

        send(records, Done(payload=crosscheck(session.clock)))
        return
    if isinstance(job, CeilingsJob):
        from attnbench.measure.ceilings import measure_ceilings

        send(records, Phase("ceilings", None, 120.0))
        payload = measure_ceilings(session.clock, job.dtypes, session.uuid, job.seconds)
        send(records, Done(payload=payload))
        return
    CaseRunner(session, job, lambda message: send(records, message)).run()


def _load_error(name: str) -> str | None:
    from attnbench import backends

    try:
        backends.backend(name)
    except Exception as error:
        return f"{error}" if isinstance(error, ValueError) else f"backend {name!r}: {type(error).__name__}: {error}"
    return None


def _start(device: str) -> tuple[Any, Hello]:
    import torch
    from torch._functorch import config as functorch

    from attnbench.measure import interpreter
    from attnbench.measure.timing import Session

    functorch.donated_buffer = False  # a compiled backward is run many times over one graph

    if device == "cpu":
        interpreter.count_launches()
        return Session("cpu"), Hello(os.getpid(), "cpu")
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device is usable; `attnbench doctor` says why")
    properties = torch.cuda.get_device_properties(0)
    from attnbench.measure.board import board

    uuid = f"GPU-{properties.uuid}"
    described = board(uuid)
    name = described.name if described else properties.name
    session = Session("cuda", name, uuid, properties.multi_processor_count)
    return session, Hello(os.getpid(), "cuda", name, uuid, properties.multi_processor_count, properties.total_memory)


def _die_with_parent() -> None:
    """On Linux, end with the parent even when it is killed: an orphan would hold the GPU."""
    with contextlib.suppress(OSError, AttributeError):
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGKILL), 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
