"""`compare --rerun`: two commits measured in turns, each in a work tree of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_runs import attention_case, timed

from attnbench.cli.compare import compare
from attnbench.errors import UserError
from attnbench.measure.supervisor import worker_environment
from attnbench.results.record import Record, TensorCheck
from attnbench.results.runs import Run, find_runs, read_run
from attnbench.results.turns import alone, joined

ROOT = Path(__file__).parents[2]
SCENARIO = """
name: pair
backends: [{backend}]
measure: {{samples: 15, min_seconds: 0.0, max_seconds: 0.3, half_width_percent: 20, passes: [forward]}}
check: {{repeats: 1}}
defaults: {{dtype: fp32, heads: 1, head_dim: 8, batch: 1}}
cases:
  - seqlen: 16
  - seqlen: 24
"""
KERNEL = """
import time
import torch
from attnbench.backends.custom import from_function

def forward(q, k, v, *, causal):
    time.sleep({seconds})
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v), scores.logsumexp(-1)

KERNEL = from_function(forward)
"""

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="no git")


def git(folder: Path, *words: str) -> str:
    command = ["git", "-c", "user.name=n", "-c", "user.email=e@x", "-c", "commit.gpgsign=false", *words]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def in_turns(folder: Path, base: str, new: str, scenario: str, *more: str) -> subprocess.CompletedProcess[str]:
    # -P: this attnbench, also where the folder holds another one.
    command = [sys.executable, "-P", "-m", "attnbench", "compare", base, new, "--rerun", scenario, "--device", "cpu"]
    environment = worker_environment("cpu") | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, *more], cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False
    )


def pair_of(results: Path) -> tuple[Run, Run]:
    """The two runs of one `--rerun`, BASE and NEW, by what they say of each other."""
    found = [read_run(run.folder) for run in find_runs(results)]
    assert len(found) == 2
    for run, other in (found, found[::-1]):
        assert run.info["interleaved"] == {"with": other.name, "order": "A B B A"}
    return found[0], found[1]


@needs_git
def test_a_users_own_kernel_that_a_commit_slowed_is_regressed(tmp_path: Path) -> None:
    """In a repository of their own, with the attnbench that is installed; `.` is what lies there, uncommitted."""
    repository = tmp_path / "mine"
    (repository / "kernels").mkdir(parents=True)
    git(repository, "init", "-q")
    (repository / "pair.yaml").write_text(SCENARIO.format(backend="kernels/mine.py:KERNEL"))
    commits = []
    for seconds in (0.001, 0.004):
        (repository / "kernels" / "mine.py").write_text(KERNEL.format(seconds=seconds))
        git(repository, "add", "-A")
        git(repository, "commit", "-q", "-m", f"sleeps {seconds}")
        commits.append(git(repository, "rev-parse", "HEAD"))
    done = in_turns(repository, "HEAD~1", "HEAD", "pair.yaml", "--results", str(tmp_path / "r"))
    assert done.returncode == 1, done.stderr + done.stdout
    assert "2 regressed" in done.stdout
    assert "measured in turns (A B B A) on one machine" in done.stdout
    new, base = sorted(pair_of(tmp_path / "r"), key=lambda run: run.commit == commits[0])
    assert (base.commit, new.commit) == tuple(commits)
    for run in (base, new):
        assert run.finished
        assert not run.dirty
        assert len(run.lines) == len(run.records) == run.info["rows"] == 2
        assert all(len(r.samples_ms) >= 2 * 15 and r.check["out"].passed for r in run.lines)
    assert git(repository, "worktree", "list").count("\n") == 0, "work trees go afterwards"

    (repository / "kernels" / "mine.py").write_text(KERNEL.format(seconds=0.015))
    done = in_turns(
        repository, commits[1], ".", "pair.yaml", "--results", str(tmp_path / "r2"), "--only", "*1x16 *", "-f", "json"
    )
    assert done.returncode == 1, done.stderr + done.stdout
    assert '"1 regressed' not in done.stdout
    assert '"verdict": "regressed"' in done.stdout


@needs_git
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not in a git checkout")
def test_a_commit_of_attnbench_is_measured_by_its_own_code(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", "--no-tags", str(ROOT), str(clone)], check=True)
    eager = clone / "attnbench/backends/eager.py"
    text = eager.read_text()
    eager.write_text(text + "\nimport time as _time\n_prepare = type(EAGER).prepare\n\n\n"
        "def _slow(self, case, inputs):\n    made = _prepare(self, case, inputs)\n    fast = made.forward\n"
        "    made.forward = lambda: (_time.sleep(0.01), fast())[1]\n    return made\n\n\n"
        "type(EAGER).prepare = _slow\n")  # fmt: skip
    git(clone, "commit", "-q", "-am", "slower")
    (clone / "pair.yaml").write_text(SCENARIO.format(backend="eager"))
    done = in_turns(clone, "HEAD~1", "HEAD", "pair.yaml", "--results", str(tmp_path / "r"), "--only", "*1x16 *")
    assert done.returncode == 1, done.stderr + done.stdout
    assert "1 regressed" in done.stdout
    runs = pair_of(tmp_path / "r")
    assert {run.commit for run in runs} == {git(clone, "rev-parse", "HEAD"), git(clone, "rev-parse", "HEAD~1")}
    assert all(run.info["packages"]["attnbench"] for run in runs)


@needs_git
@pytest.mark.parametrize(
    ("base", "scenario", "told"),
    [
        ("no-such-commit", "pair.yaml", "no git commit here and no folder"),
        ("HEAD", "missing.yaml", "there is no such file"),
        ("HEAD", "broken.yaml", "BASE (HEAD) cannot be measured: "),
    ],
)
def test_mistakes_are_one_message_and_leave_nothing(tmp_path: Path, base: str, scenario: str, told: str) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "pair.yaml").write_text(SCENARIO.format(backend="eager"))
    (tmp_path / "broken.yaml").write_text(SCENARIO.format(backend="eagre"))
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "one")
    done = in_turns(tmp_path, base, "HEAD", scenario, "--results", str(tmp_path / "r"))
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "r").exists()
    assert git(tmp_path, "worktree", "list").count("\n") == 0


def test_options_of_rerun_ask_for_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="give it a scenario"):
        compare(base="a", new="b", threshold="2%", format="table", allow_missing=False, results=tmp_path, only=["x"])


def turn(ms: float, seed: int, **fields: Any) -> Record:
    return timed(attention_case(1024), "triton", "forward", ms, rng=np.random.default_rng(seed), **fields)


def test_two_turns_become_one_row_with_all_samples() -> None:
    first = turn(1.0, 0, tflops=100.0, flops=10**11, peak_share={"matmul": 0.5}, flags=["bimodal"], kernel_ms=1.0)
    second = turn(1.02, 1, tflops=98.0, kernel_ms=1.2, telemetry={"sm_mhz": 1600.0, "watts": 700.0}, check={})
    row = joined(first, second)
    assert row.samples_ms == [*first.samples_ms, *second.samples_ms]
    assert row.median_ms == pytest.approx(float(np.median(row.samples_ms)))
    assert row.ci_ms is not None
    assert row.ci_ms[0] < row.median_ms < row.ci_ms[1]
    assert row.tflops == pytest.approx(100.0 * first.median_ms / row.median_ms)  # type: ignore[operator]
    assert row.peak_share == {"matmul": pytest.approx(0.5 * first.median_ms / row.median_ms)}  # type: ignore[operator]
    assert row.kernel_ms == pytest.approx(1.1)
    assert row.telemetry["sm_mhz"] == pytest.approx(1625.0)
    assert row.check == {"out": TensorCheck(1e-3, 2e-3, 0.3, True)}
    assert row.flags == ["bimodal"]


def test_a_second_turn_that_fails_is_what_the_row_is() -> None:
    first, gone = turn(1.0, 0), replace(turn(1.0, 1), outcome="timeout", samples_ms=[], check={})
    assert joined(first, gone).outcome == "timeout"
    assert joined(first, gone).check == first.check


def test_our_own_other_worker_does_not_contend() -> None:
    row = turn(1.0, 0, flags=["contended", "bimodal"], telemetry={"sm_mhz": 1.0, "other_processes": [7]})
    assert alone(row, [7, 8]).flags == ["bimodal"]
    assert "other_processes" not in alone(row, [7, None]).telemetry
    assert alone(row, [8]) is row
