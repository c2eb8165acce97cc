"""Stored runs: reading a run's folder, and finding one by path, by name or by git commit.

A run is a folder with `run.json` (what ran, where, on what) and `cases.jsonl` (one line a finished case and pass). The
fields are described in docs/records.md.
"""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from attnbench.errors import UserError, did_you_mean
from attnbench.results.migrations import RECORD_STEPS, RUN_STEPS, migrate
from attnbench.results.record import COULD_NOT_RUN, GOOD, Record
from attnbench.results.repository import full_commit

RUN_FILE = "run.json"
CASES_FILE = "cases.jsonl"

Key = tuple[str, str, str]
"""(case_id, backend, pass): what a record is about."""


def key_of(record: Record) -> Key:
    return (record.case_id, record.backend, record.pass_)


class NoBaseline(UserError):
    """There is nothing to compare with."""

    exit_code = 4


@dataclass
class Run:
    """One stored run. `info` is `run.json`; the records are read on first use."""

    folder: Path
    info: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    """What the reader had to skip, in words."""

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def commit(self) -> str | None:
        return self.info.get("commit")

    @property
    def dirty(self) -> bool:
        return bool(self.info.get("dirty"))

    @property
    def scenario(self) -> str:
        return str(self.info.get("scenario", ""))

    @property
    def gpu(self) -> dict[str, Any]:
        """`name`, `uuid`, `power_cap_w` … of the board; empty for a run on the CPU."""
        return self.info.get("gpu") or {}

    @property
    def finished(self) -> bool:
        return bool(self.info.get("finished_at"))

    @cached_property
    def lines(self) -> list[Record]:
        """Every record in the order written; a case that was run again appears twice."""
        return _read_cases(self.folder / CASES_FILE, self.notes)

    @cached_property
    def records(self) -> dict[Key, Record]:
        """The newest record of each (case, backend, pass), in the order first written."""
        return {key_of(record): record for record in self.lines}

    def done(self) -> set[Key]:
        """What needs no second go: every outcome that says something about the kernel."""
        return {key for key, record in self.records.items() if record.outcome not in COULD_NOT_RUN}

    def bad(self) -> set[Key]:
        """What did not end well: failed its check, or could not be run."""
        return {key for key, record in self.records.items() if record.outcome not in GOOD}

    def failed(self) -> set[Key]:
        """What could not be run (out of memory, crash, time-out, build)."""
        return {key for key, record in self.records.items() if record.outcome in COULD_NOT_RUN}


def _read_cases(path: Path, notes: list[str]) -> list[Record]:
    """All whole lines; a line torn by a kill or a full disk is skipped, with a note."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        notes.append(f"{path}: missing; the run ended before its first case")
        return []
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    collecting = gc.isenabled()
    gc.disable()  # ten thousand records are live objects: looking for garbage among them costs a third of the time
    try:
        return _parse_cases(path, text, notes)
    finally:
        if collecting:
            gc.enable()


def _parse_cases(path: Path, text: bytes, notes: list[str]) -> list[Record]:
    lines = [(number, line) for number, line in enumerate(text.split(b"\n"), 1) if line.strip()]
    records = []
    for (number, _), data in zip(lines, _objects(path, lines, notes), strict=True):
        if data is None:
            continue
        place = f"{path}:{number}"
        try:
            records.append(Record.from_json(migrate(data, RECORD_STEPS, place=place)))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"{place}: not a record: {type(error).__name__}: {error}") from None
    return records


def _objects(path: Path, lines: Sequence[tuple[int, bytes]], notes: list[str]) -> list[dict[str, Any] | None]:
    """What each line holds; None, with a note, for one that is no object."""
    try:
        # All at once: one call shares the keys' strings, and takes two thirds of the time of ten thousand calls.
        found = json.loads(b"[" + b",".join(line for _, line in lines) + b"]")
        if len(found) == len(lines) and all(isinstance(data, dict) for data in found):
            return list(found)
    except ValueError:
        pass
    each: list[dict[str, Any] | None] = []
    for number, line in lines:
        try:
            data = json.loads(line)
            if not isinstance(data, dict):
                raise ValueError("not an object")
            each.append(data)
        except ValueError:
            notes.append(f"{path}:{number}: skipped a line that was cut off while being written")
            each.append(None)
    return each


def read_head(folder: Path) -> Run:
    """The run in `folder` with its `run.json` read and its records still on disk.

    Raises:
        UserError: there is no run, it cannot be read, or its format is newer than this attnbench.
    """
    path = folder / RUN_FILE
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{folder} holds no run: there is no {RUN_FILE} in it") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path} is no valid JSON: {error}") from None
    if not isinstance(info, dict):
        raise UserError(f"{path}: wanted an object, found {type(info).__name__}")
    return Run(folder, migrate(info, RUN_STEPS, place=str(path)))


def read_run(path: Path | str) -> Run:
    """The run in folder `path` (its `run.json` or `cases.jsonl` may be named too), records included.

    Raises:
        UserError: there is no run, it cannot be read, or its format is newer than this attnbench.
    """
    folder = Path(path)
    if folder.name in (RUN_FILE, CASES_FILE):
        folder = folder.parent
    return _with_records(read_head(folder))


def _with_records(run: Run) -> Run:
    run.lines  # noqa: B018 -- reads them now, so that a bad file is an error here
    return run


def find_runs(results: Path | str, unreadable: list[str] | None = None) -> list[Run]:
    """Every run under the results folder, newest first. What cannot be read is left out, and told in `unreadable`."""
    root = Path(results)
    runs = []
    for depth in ("*", "*/*", "*/*/*"):
        for path in root.glob(f"{depth}/{RUN_FILE}"):
            try:
                runs.append(read_head(path.parent))
            except UserError as error:
                if unreadable is not None:
                    unreadable.append(str(error))
    return sorted(runs, key=lambda run: (str(run.info.get("started_at", "")), run.name), reverse=True)


def find_resumable(results: Path | str, run_info: dict[str, Any]) -> Run | None:
    """The newest run that `run_info` would go on with: same scenario text, code and GPU, something left to do."""
    for run in find_runs(results):
        if same_run(run, run_info) and (not run.finished or run.failed()):
            return run
    return None


def same_run(run: Run, run_info: dict[str, Any]) -> bool:
    """Whether records made under `run_info` may go into this run: same scenario text, code and board.

    Where either has several boards, boards of the same model and power cap will do: a case keeps to one board anyway.
    """
    same = ("scenario", "scenario_text", "commit", "dirty", "diff_hash", "kernel_hash", "device")
    if any(run.info.get(name) != run_info.get(name) for name in same):
        return False
    one, other = boards_of(run.info), boards_of(run_info)
    if len(one) > 1 or len(other) > 1:
        return len({(gpu.get("name"), gpu.get("power_cap_w")) for gpu in one + other}) == 1
    return [gpu.get("uuid") for gpu in one] == [gpu.get("uuid") for gpu in other]


def boards_of(info: dict[str, Any]) -> list[dict[str, Any]]:
    """The boards that `run.json` describes; none for a run on the CPU."""
    return info.get("gpus") or ([info["gpu"]] if info.get("gpu") else [])


def newest_run(results: Path | str, scenario: str, device: str) -> Run:
    """The newest run of a scenario on a device, of whatever commit.

    Raises:
        NoBaseline: there is none.
    """
    for run in find_runs(results):
        if run.scenario == scenario and run.info.get("device") == device:
            return _with_records(run)
    raise NoBaseline(f"there is no run of {scenario} on {device} under {results} to take failures from")


def runs_of_commit(text: str, runs: list[Run]) -> tuple[list[Run], str | None]:
    """Runs of the commit that `text` names (a hash or its beginning, a branch, a tag), newest first, and its hash."""
    commit = full_commit(text)
    if commit is None and re.fullmatch(r"[0-9a-f]{7,40}", text):
        # Results may come from another clone: a stored commit needs no repository here.
        known = {str(run.commit) for run in runs if run.commit and run.commit.startswith(text)}
        if len(known) > 1:
            raise UserError(f"{text} is the beginning of {len(known)} commits with runs; give more digits")
        commit = known.pop() if known else None
    return [run for run in runs if commit and run.commit == commit], commit


def candidates(text: str, results: Path | str) -> list[Run]:
    """The runs that `text` may mean: a folder or a name gives that one, a commit all its clean runs, newest first.

    Raises:
        UserError: nothing has that name; the message lists what is near.
        NoBaseline: the commit exists, but has no run that could be used.
    """
    if (Path(text) / RUN_FILE).exists() or (Path(text).name in (RUN_FILE, CASES_FILE) and Path(text).exists()):
        return [read_head(Path(text) if Path(text).is_dir() else Path(text).parent)]
    runs = find_runs(results)
    for run in runs:
        if text in (run.name, str(run.folder)):
            return [run]
    of_commit, commit = runs_of_commit(text, runs)
    clean = [run for run in of_commit if not run.dirty]
    if clean:
        return clean
    if of_commit:
        raise NoBaseline(
            f"every run of commit {str(commit)[:10]} had uncommitted changes; name one: {of_commit[0].folder}"
        )
    if commit:
        raise NoBaseline(
            f"no run of commit {commit[:10]} under {results}. To make one: git switch --detach {commit[:10]}, "
            "attnbench run SCENARIO.yaml, git switch -. Or measure both sides now: attnbench compare BASE NEW --rerun "
            "SCENARIO.yaml"
        )
    raise UserError(
        f"{text!r} is no run under {results}, no run's folder and no git commit."
        + did_you_mean(text, [run.name for run in runs])
        + " `attnbench list runs` shows what there is."
    )


def find_run(text: str, results: Path | str) -> Run:
    """The run that `text` names; of a commit the newest clean one. Raises as `candidates` does."""
    return _with_records(candidates(text, results)[0])


def find_pair(base: str, new: str, results: Path | str) -> tuple[Run, Run]:
    """The two runs to compare. Where a commit leaves a choice: the newest of one scenario on one GPU model.

    Raises:
        UserError, NoBaseline: as `candidates`; also where two commits share no scenario and GPU model.
    """
    bases, news = candidates(base, results), candidates(new, results)
    if len(bases) == len(news) == 1:
        return _with_records(bases[0]), _with_records(news[0])
    for other in news:
        for one in bases:
            alike = one.scenario == other.scenario and one.gpu.get("name") == other.gpu.get("name")
            if alike and (base == new or one.folder != other.folder):
                return _with_records(one), _with_records(other)
    there = ", ".join(sorted({f"{run.scenario} on {run.gpu.get('name') or 'CPU'}" for run in news}))
    raise NoBaseline(
        f"no run of {base} has a counterpart in {new} ({there}): run that scenario at {base} on that machine"
    )
