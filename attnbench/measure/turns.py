"""One side of `compare --rerun`: plans a scenario in one checkout and runs a case whenever it is told to.

Run as a file by another checkout's attnbench (`python -P turns.py READ WRITE SCENARIO DEVICE BACKENDS ONLY`), with the
checkout that is to be measured first on `PYTHONPATH`: what it imports is that checkout's. Orders and answers are lines
of JSON over two pipes, since records are the one format that versions of attnbench share.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

from attnbench import scenario as scenarios
from attnbench.backends.names import custom_file, is_custom
from attnbench.measure import sweep
from attnbench.measure.job import CaseJob, Row
from attnbench.measure.jobs import plan_jobs
from attnbench.measure.provenance import provenance
from attnbench.measure.supervisor import Supervisor
from attnbench.results.record import Record
from attnbench.results.store import to_json_text


def main(words: list[str]) -> int:
    """Answer `hello` with what is planned and the facts for `run.json`, then each order until the pipe closes."""
    orders, answers = open(int(words[0]), encoding="utf-8"), open(int(words[1]), "w", encoding="utf-8")  # noqa: SIM115
    scenario, device = words[2], words[3]
    chosen, only = json.loads(words[4]), json.loads(words[5])
    try:
        plan = scenarios.load(Path(scenario))
        jobs = plan_jobs(plan, device, chosen, only)
        with Supervisor(device) as supervisor:
            hello = supervisor.start()
            own = list(dict.fromkeys(row.backend for job in jobs for row in job.rows if is_custom(row.backend)))
            if own:
                supervisor.load(own)
            files = [Path(file) for name in own if (file := custom_file(name)) and Path(file).is_file()]
            _say(
                answers,
                pid=hello.pid,
                uuid=hello.uuid,
                info={
                    "scenario": plan.name,
                    "scenario_text": plan.text,
                    "device": hello.device,
                    "gpu": sweep.describe_gpu(hello),
                    "measure": asdict(plan.measure),
                    "rows": sum(len(row.passes) for job in jobs for row in job.rows),
                    **provenance(files),
                },
                jobs=[{"case_id": job.case.case_id, "label": job.case.label, "dtype": job.case.dtype} for job in jobs],
            )
            _serve(supervisor, jobs, orders, answers)
    except Exception as error:
        _say(answers, error=str(error) or type(error).__name__)
        return 1
    return 0


def _serve(supervisor: Supervisor, jobs: list[CaseJob], orders: IO[str], answers: IO[str]) -> None:
    ceilings: dict[str, float] = {}
    for order in _lines(orders):
        if "measure_ceilings" in order:
            found = supervisor.ceilings(tuple(order["measure_ceilings"]))
            _say(answers, ceilings=found, crosscheck=supervisor.crosscheck() if found else {})
            continue
        ceilings = order.get("ceilings", ceilings)
        job = replace(jobs[order["run"]], ceilings=ceilings)
        if order.get("rows") is not None:  # a second turn: only what the first one timed, and no check again
            rows = tuple(Row(backend, tuple(passes)) for backend, passes in order["rows"])
            job = replace(job, rows=rows, check=replace(job.check, enabled=False))
        for message in supervisor.run(job):
            if isinstance(message, Record):
                _say(answers, record=message.to_json())
        _say(answers, pid=supervisor.hello.pid if supervisor.hello else None, done=True)


def _lines(orders: IO[str]) -> Iterator[dict[str, Any]]:
    for line in orders:
        yield json.loads(line)


def _say(answers: IO[str], **what: Any) -> None:
    answers.write(to_json_text(what) + "\n")
    answers.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
