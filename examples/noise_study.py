"""How often is a verdict of `compare` false? Runs one scenario many times and compares every pair of runs.

    python examples/noise_study.py --runs 7                      # 21 pairs of equal runs: no verdict is expected
    python examples/noise_study.py --runs 7 --slowed-runs 3      # and 21 pairs whose NEW has kernels slowed by 3 %

Needs an H200 or H100 for `scenarios/noise.yaml`; any scenario and device will do for the first part. Exit code 1 where
equal runs got a verdict, or fewer than 95 % of the pairs with a slowed kernel were called `regressed`.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations, product
from pathlib import Path

from attnbench.results.compare import Comparison, Row, compare
from attnbench.results.runs import Key, Run, find_runs, read_run
from attnbench.results.text import backend_name

SLOWED = "slowed_kernel.py"
ENOUGH = 0.95


def attnbench_run(arguments: argparse.Namespace, out: Path, *, percent: float = 0.0) -> Run:
    """One `attnbench run` as a process of its own, slowed by `percent`; returns what it stored."""
    command = [sys.executable, "-m", "attnbench", "run", str(arguments.scenario), "--out", str(out), "--format", "csv"]
    command += ["--device", arguments.device] if arguments.device else []
    command += [word for glob in arguments.only for word in ("--only", glob)]
    if percent:
        command += ["--only", "slowed"]
    before = {run.folder for run in find_runs(out)}
    began = time.monotonic()
    done = subprocess.run(
        command,
        env={**os.environ, "SLOWED_PERCENT": str(percent)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    made = [run.folder for run in find_runs(out) if run.folder not in before]
    if not made:
        raise SystemExit(f"{' '.join(command)} stored no run:\n{done.stderr}")
    run = read_run(made[0])
    good = sum(record.outcome == "ok" for record in run.records.values())
    what = f"slowed by {percent:g} %" if percent else "as it is"
    print(f"{run.name}: {time.monotonic() - began:.1f} s, {good} of {len(run.records)} rows timed, {what}", flush=True)
    for record in run.records.values():
        if record.outcome not in ("ok", "unsupported"):
            print(f"    {record.label}, {backend_name(record.backend)}: {record.outcome}: {record.reason}")
    return run


def change(row: Row) -> float:
    """NEW over BASE less one, in percent; NaN where the row has no ratio."""
    return 100 * (row.ratio.value - 1) if row.ratio else math.nan


def told(row: Row) -> str:
    views = ", ".join(f"{name} {100 * (value - 1):+.2f} %" for name, value in row.views.items())
    p = f"p {row.ratio.p:.2g}" if row.ratio else "no ratio"
    return f"{row.label}, {backend_name(row.key[1])}: {row.verdict} {change(row):+.2f} % ({p}; {views}) {row.reason}"


def equal_pairs(pairs: Sequence[Comparison]) -> int:
    """Print what became of pairs of equal runs; returns how many verdicts were false."""
    rows = [row for pair in pairs for row in pair.rows if row.ratio is not None]
    false = [row for row in rows if row.verdict in ("regressed", "improved")]
    other = [row for pair in pairs for row in pair.rows if row.verdict in ("incomparable", "missing")]
    unclear = sum(row.verdict == "ambiguous" for row in rows)
    print(f"\nEqual runs: {len(pairs)} pairs, {len(rows)} rows: {len(false)} false verdicts, {unclear} ambiguous.")
    for row in false + other:
        print(f"    {told(row)}")
    by_row: dict[Key, list[Row]] = defaultdict(list)
    for row in rows:
        by_row[row.key].append(row)
    print("Changes between equal runs, the largest first:")
    for found in sorted(by_row.values(), key=lambda group: -max(abs(change(row)) for row in group)):
        changes = sorted(abs(change(row)) for row in found)
        row, ambiguous = found[0], sum(row.verdict == "ambiguous" for row in found)
        print(
            f"    {changes[-1]:5.2f} % at most, {changes[len(changes) // 2]:5.2f} % typical, {ambiguous:3} ambiguous  "
            f"{row.base_ms or 0:8.4f} ms  {row.label}, {backend_name(row.key[1])}"
        )
    return len(false)


def slowed_pairs(pairs: Sequence[Comparison], percent: float) -> bool:
    """Print how many pairs call each slowed kernel regressed; whether all kernels reach `ENOUGH`."""
    by_row: dict[Key, list[Row]] = defaultdict(list)
    for pair in pairs:
        for row in pair.rows:
            if SLOWED in row.key[1] and row.ratio is not None:
                by_row[row.key].append(row)
    print(f"\nSlowed by {percent:g} %: {len(pairs)} pairs.")
    enough = bool(by_row)
    for found in by_row.values():
        hits = sum(row.verdict == "regressed" for row in found)
        enough &= hits >= ENOUGH * len(found)
        changes = [change(row) for row in found]
        row = found[0]
        print(
            f"    {row.label}, {backend_name(row.key[1])}: regressed in {hits} of {len(found)}, "
            f"{min(changes):+.2f} to {max(changes):+.2f} %"
        )
        for row in found:
            if row.verdict != "regressed":
                print(f"        {told(row)}")
    return enough


def main(words: Sequence[str] | None = None) -> int:
    """Parse `words` (default: the command line), run, compare, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--scenario", type=Path, default=Path("scenarios/noise.yaml"))
    parser.add_argument("--only", action="append", default=[], metavar="GLOB", help="only these cases; repeatable")
    parser.add_argument("--runs", type=int, default=7, help="equal runs; n of them give n (n - 1) / 2 pairs")
    parser.add_argument("--slowed-runs", type=int, default=0, help="runs of the cases tagged `slowed`, slowed")
    parser.add_argument("--percent", type=float, default=3.0, help="by how much")
    parser.add_argument("--out", type=Path, default=Path("results/noise"), help="folder for the runs")
    parser.add_argument("--device", choices=("cuda", "cpu"))
    arguments = parser.parse_args(words)
    equal = [attnbench_run(arguments, arguments.out) for _ in range(arguments.runs)]
    slowed = [attnbench_run(arguments, arguments.out, percent=arguments.percent) for _ in range(arguments.slowed_runs)]
    good = equal_pairs([compare(base, new) for base, new in combinations(equal, 2)]) == 0
    if slowed:
        good &= slowed_pairs([compare(base, new) for base, new in product(equal, slowed)], arguments.percent)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
