"""One case over commits: its medians in the order of the commits, one series a machine, with the steps between them."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnbench.results.changepoints import Point, Step, steps
from attnbench.results.record import Record
from attnbench.results.repository import git
from attnbench.results.runs import Run
from attnbench.results.statistics import log_error, run_to_run


@dataclass(frozen=True)
class Entry:
    """One run's record of the case."""

    run: Run
    record: Record

    @property
    def commit(self) -> str:
        return str(self.run.commit or "")

    @property
    def when(self) -> str:
        """Time of the commit where the run knows it, else of the run; UTC or with an offset, ISO 8601."""
        return str(self.run.info.get("commit_time") or self.run.info.get("started_at") or "")

    @property
    def point(self) -> Point:
        """The median as change points are found in it. Only for a timed record."""
        ms = self.record.median_ms or 1.0
        own = log_error(self.record.ci_ms) if self.record.ci_ms else 0.0
        granted = run_to_run(self.record.timer)
        return Point(math.log(ms), math.hypot(own if math.isfinite(own) else 0.0, granted))


@dataclass
class Series:
    """One case, backend and pass on one machine under one policy. `steps` index `timed`."""

    case_id: str
    label: str
    backend: str
    pass_: str
    machine: str
    entries: list[Entry] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    @property
    def timed(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.record.outcome == "ok" and entry.record.median_ms]


def machine_of(run: Run, record: Record) -> str:
    """Board model, power cap, duty and clock: what two medians must share to lie on one line."""
    gpu = run.gpu
    cap = f", {float(gpu['power_cap_w']):.0f} W" if gpu.get("power_cap_w") else ""
    platform = run.info.get("platform") or {}
    where = str(gpu.get("name") or f"CPU ({platform.get('machine', '?')}, {platform.get('cpus', '?')} processors)")
    duty = (run.info.get("measure") or {}).get("duty", "sustained")
    told = "" if duty == "sustained" else f", {duty}"
    timer = "" if record.timer in (None, "graph", "host") else f", by {record.timer}"
    return f"{where}{cap}{told}{timer}"


def matches(record: Record, glob: str) -> bool:
    """Whether a glob is the record's label, case or part of either, as `run --only` takes it."""
    pattern = glob if set(glob) & set("*?[") else f"*{glob}*"
    return any(fnmatch.fnmatchcase(word, pattern) for word in (record.label, record.case_id))


def collect(
    runs: Iterable[Run], glob: str, *, backends: Sequence[str] = (), passes: Sequence[str] = (), dirty: bool = False
) -> tuple[list[Series], int]:
    """The series that match, their entries in the order of `runs`; and how many runs with changes were left out."""
    found: dict[tuple[str, ...], Series] = {}
    left_out = 0
    for run in runs:
        hits = [
            r
            for r in run.records.values()
            if r.outcome != "unsupported"
            and (not backends or r.backend in backends)
            and (not passes or r.pass_ in passes)
            and matches(r, glob)
        ]
        if hits and run.dirty and not dirty:
            left_out += 1
            continue
        for r in hits:
            key = (r.case_id, r.backend, r.pass_, machine_of(run, r))
            series = found.setdefault(key, Series(r.case_id, r.label, r.backend, r.pass_, key[3]))
            series.label = r.label
            series.entries.append(Entry(run, r))
    return list(found.values()), left_out


def commit_order(commits: Iterable[str], cwd: Path | None = None) -> dict[str, int] | None:
    """The place of each commit in git's topological order, the oldest 0; None where git does not know them all."""
    wanted = sorted(set(commits))
    if not wanted or not all(wanted):
        return None
    known = git("cat-file", "--batch-check=%(objecttype)", folder=cwd, text="\n".join(wanted))
    if known is None or known.split() != ["commit"] * len(wanted):
        return None
    history = git("rev-list", "--topo-order", "--reverse", *wanted, folder=cwd)
    if history is None:
        return None
    place = {commit: i for i, commit in enumerate(history.split())}
    return {commit: place[commit] for commit in wanted}


def arrange(series: Sequence[Series], order: dict[str, int] | None, threshold: float) -> None:
    """Sort every series' entries by commit (else by time) and find its steps."""
    for one in series:
        if order is not None:
            one.entries.sort(key=lambda entry: (order.get(entry.commit, -1), str(entry.run.info.get("started_at"))))
        else:
            one.entries.sort(key=lambda entry: (utc(entry.when), str(entry.run.info.get("started_at"))))
        one.steps = steps([entry.point for entry in one.timed], threshold)


def utc(when: str) -> str:
    """A time with an offset as UTC, so that times of other zones sort; as it is where it is no time."""
    from datetime import UTC, datetime

    try:
        return datetime.fromisoformat(when).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except ValueError:
        return when


def also_changed(before: Run, after: Run) -> list[str]:
    """What else differs between two runs that a step may come from: `torch 2.11.0 → 2.12.0`, another board."""
    found = []
    for name in ("torch", "triton", "cuda-core", "nvidia-cudnn-cu13"):
        one, other = ((run.info.get("packages") or {}).get(name) for run in (before, after))
        if one != other:
            found.append(f"{name} {one} → {other}")
    pairs: list[tuple[str, Any, Any]] = [("driver", before.gpu.get("driver"), after.gpu.get("driver"))]
    found += [f"{name} {one} → {other}" for name, one, other in pairs if one != other]
    if before.gpu.get("uuid") != after.gpu.get("uuid"):
        found.append("another board")
    return found
