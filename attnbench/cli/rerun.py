"""`attnbench compare BASE NEW --rerun SCENARIO`: two commits measured in turns, A B B A by case, on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from attnbench.errors import UserError
from attnbench.measure import sweep
from attnbench.measure.jobs import choose_device
from attnbench.measure.provenance import project_root
from attnbench.results.migrations import RECORD_STEPS, migrate
from attnbench.results.record import Record
from attnbench.results.repository import full_commit, git
from attnbench.results.runs import Key, Run, key_of, read_run
from attnbench.results.store import RunWriter
from attnbench.results.turns import alone, joined

ORDER = "A B B A"


@dataclass
class Side:
    """One commit's checkout, the process that measures in it, and what it has planned."""

    name: str
    asked: str
    folder: Path
    process: subprocess.Popen[bytes]
    orders: IO[str]
    answers: IO[str]
    plan: dict[str, Any] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)  # case id: number of its job
    pid: int | None = None

    def ask(self, **order: Any) -> None:
        try:
            self.orders.write(json.dumps(order) + "\n")
            self.orders.flush()
        except BrokenPipeError:
            raise self._gone() from None

    def answer(self) -> dict[str, Any]:
        """The next answer.

        Raises:
            UserError: the process has ended, or says that it cannot go on.
        """
        line = self.answers.readline()
        if not line:
            raise self._gone()
        told: dict[str, Any] = json.loads(line)
        if "error" in told:
            raise UserError(f"{self.name} ({self.asked}) cannot be measured: {told['error']}")
        return told

    def _gone(self) -> UserError:
        code = self.process.wait()
        return UserError(f"{self.name} ({self.asked}) cannot be measured: its process exited with code {code}")

    def turn(self, number: int, **order: Any) -> list[Record]:
        """Run a job, or those `rows` of it, and wait for its records."""
        self.ask(run=number, **order)
        records = []
        while "done" not in (told := self.answer()):
            place = f"{self.name}'s record"
            records.append(Record.from_json(migrate(told["record"], RECORD_STEPS, place=place)))
        self.pid = told["pid"]
        return records


def rerun(
    base: str,
    new: str,
    scenario: Path,
    *,
    backend: Sequence[str] = (),
    only: Sequence[str] = (),
    device: str | None = None,
    results: Path,
) -> tuple[Run, Run]:
    """Measure both sides in turns and store a run of each. `base` and `new` are commits, or folders with a checkout.

    Raises:
        UserError: no such commit or scenario, a side cannot be measured, or the results cannot be written.
    """
    if not scenario.is_file():
        raise UserError(f"--rerun {scenario}: there is no such file; wanted a scenario")
    where = choose_device(device)
    arguments = [str(scenario.resolve()), where, json.dumps(list(backend)), json.dumps(list(only))]
    with contextlib.ExitStack() as stack:
        folders = [stack.enter_context(checkout(text)) for text in (base, new)]
        sides = [
            stack.enter_context(_started(name, text, folder, arguments))
            for name, text, folder in zip(("BASE", "NEW"), (base, new), folders, strict=True)
        ]
        for side in sides:
            side.plan = side.answer()
            side.pid = side.plan["pid"]
            side.places = {job["case_id"]: i for i, job in enumerate(side.plan["jobs"])}
        with sweep.gpu_lock(sides[1].plan["uuid"]):
            first, second = _in_turns(sides, scenario, results)
    return read_run(first), read_run(second)


def _in_turns(sides: Sequence[Side], scenario: Path, results: Path) -> tuple[Path, Path]:
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(RunWriter(results, _info(side, scenario))) for side in sides]
        for writer, other in zip(writers, reversed(writers), strict=True):
            writer.update(interleaved={"with": other.folder.name, "order": ORDER})
        labels = {job["case_id"]: job["label"] for side in sides for job in side.plan["jobs"]}
        ceilings = _ceilings(sides, writers)
        for number, (case_id, label) in enumerate(labels.items(), 1):
            print(f"{number}/{len(labels)}  {label}", file=sys.stderr, flush=True)
            for side, records in _case(sides, case_id, ceilings).items():
                for record in records:
                    writers[side].append(record)
    return writers[0].folder, writers[1].folder


def _case(sides: Sequence[Side], case_id: str, ceilings: dict[str, float]) -> dict[int, list[Record]]:
    """Records of one case by side: a turn of each, then one of each the other way round, as joined rows."""
    first: dict[int, dict[Key, Record]] = {}
    present = [i for i, side in enumerate(sides) if case_id in side.places]
    pids = [side.pid for side in sides]
    for i in present:
        found = sides[i].turn(sides[i].places[case_id], ceilings=ceilings)
        first[i] = {key_of(record): alone(record, pids) for record in found}
    for i in reversed(present):
        again: dict[str, list[str]] = {}
        for record in first[i].values():
            if record.outcome == "ok" and record.samples_ms:
                again.setdefault(record.backend, []).append(record.pass_)
        if again:
            for record in sides[i].turn(sides[i].places[case_id], rows=list(again.items())):
                first[i][key_of(record)] = joined(first[i][key_of(record)], alone(record, pids))
    return {i: list(records.values()) for i, records in first.items()}


def _ceilings(sides: Sequence[Side], writers: Sequence[RunWriter]) -> dict[str, float]:
    """The board's ceilings, measured once for both; none on the CPU, or where the scenario leaves them out."""
    info = sides[0].plan["info"]
    if info["device"] != "cuda" or not info["measure"].get("ceilings", True):
        return {}
    sides[0].ask(measure_ceilings=sorted({job["dtype"] for job in sides[0].plan["jobs"]}))
    found = sides[0].answer()
    for writer in writers:
        writer.update(ceilings=found["ceilings"], crosscheck=found["crosscheck"])
    return dict(found["ceilings"])


def _info(side: Side, scenario: Path) -> dict[str, Any]:
    info = {**side.plan["info"], "scenario_file": str(scenario), "command": [Path(sys.argv[0]).name, *sys.argv[1:]]}
    commit = git("rev-parse", "HEAD", folder=side.folder)
    if commit and not Path(side.asked).is_dir():  # a checkout of our own: what it holds is that commit
        when = git("show", "-s", "--format=%cI", "HEAD", folder=side.folder)
        info |= {"commit": commit, "branch": None, "commit_time": when, "dirty": False, "diff_hash": None}
    return info


@contextlib.contextmanager
def checkout(text: str) -> Iterator[Path]:
    """A folder with the commit `text`, a git work tree that goes afterwards; a folder stands for itself, as it is.

    Raises:
        UserError: no such commit in the repository of the working directory, or no repository.
    """
    if Path(text).is_dir():
        yield Path(text).resolve()
        return
    commit = full_commit(text)
    if commit is None:
        raise UserError(
            f"{text!r} is no git commit here and no folder: --rerun measures a commit in a work tree of its own, or a "
            "checkout as it is (`.` with its uncommitted changes)"
        )
    root = Path(tempfile.mkdtemp(prefix="attnbench-"))
    tree = root / commit[:10]
    try:
        done = subprocess.run(
            ["git", "worktree", "add", "--detach", "--quiet", str(tree), commit], capture_output=True, check=False
        )
        if done.returncode:
            raise UserError(f"cannot check {text} out: {done.stderr.decode(errors='replace').strip()}")
        below = git("rev-parse", "--show-prefix") or ""
        yield tree / below if (tree / below).is_dir() else tree
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(tree)], capture_output=True, check=False)
        with contextlib.suppress(OSError):
            root.rmdir()


@contextlib.contextmanager
def _started(name: str, text: str, folder: Path, arguments: Sequence[str]) -> Iterator[Side]:
    """A process that measures in `folder`, with the attnbench of that checkout where it holds one, else with ours."""
    top = Path(git("rev-parse", "--show-toplevel", folder=folder) or folder)
    package = next((place for place in (folder, top) if (place / "attnbench/__init__.py").is_file()), project_root())
    paths = [str(package), *filter(None, [os.environ.get("PYTHONPATH")])]
    orders_read, orders_write = os.pipe()
    answers_read, answers_write = os.pipe()
    driver = project_root() / "attnbench/measure/turns.py"
    process = subprocess.Popen(
        [sys.executable, "-P", str(driver), str(orders_read), str(answers_write), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=(orders_read, answers_write),
        start_new_session=True,  # Ctrl-C is ours to handle
    )
    os.close(orders_read)
    os.close(answers_write)
    with open(orders_write, "w", encoding="utf-8") as orders, open(answers_read, encoding="utf-8") as answers:
        try:
            yield Side(name, text, folder, process, orders, answers)
            orders.close()  # which ends the process: there is nothing more to do
            process.wait(timeout=20)
        finally:
            if process.poll() is None:
                process.kill()  # its worker goes with it
                process.wait()
