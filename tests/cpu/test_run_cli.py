"""`attnbench run` on the CPU: records, exit codes, resuming, interruption."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from attnbench.cli.run import exit_code, run
from attnbench.errors import UserError
from attnbench.measure.provenance import provenance
from attnbench.measure.supervisor import worker_environment
from attnbench.results.record import Record
from attnbench.results.runs import NoBaseline, read_run

BAD = Path(__file__).parent / "misbehaving_backends.py"
TEXT = """
name: tiny
description: two shapes
backends: [eager, triton]
defaults: {{dtype: fp32, heads: 1, head_dim: 8, batch: 1, causal: true}}
measure: {{samples: 3, min_seconds: 0.0, max_seconds: 0.02, timeout_seconds: 60}}
cases:
  - seqlen: 8
    {extra}
  - seqlen: 12
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    return write(tmp_path)


def write(folder: Path, extra: str = "") -> Path:
    path = folder / "tiny.yaml"
    path.write_text(TEXT.format(extra=extra))
    return path


def only_run(results: Path) -> Path:
    (folder,) = (path for path in results.iterdir() if path.is_dir())
    return folder


def test_run_stores_every_row_and_prints_the_table(
    scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(scenario=scenario, out=tmp_path / "r", device="cpu") == 0
    stored = read_run(only_run(tmp_path / "r"))
    assert len(stored.records) == len(stored.lines) == 8
    assert stored.finished
    assert {(r.backend, r.outcome) for r in stored.lines} == {("eager", "ok"), ("triton", "checked")}
    for r in stored.lines:
        assert r.check
        assert all(t.passed for t in r.check.values())
        assert (r.median_ms is None) == (r.backend == "triton")
        assert r.finished_at
    info = stored.info
    assert info["scenario_text"] == scenario.read_text()
    assert info["device"] == "cpu"
    assert info["gpu"] is None
    assert {"commit", "dirty", "diff_hash", "kernel_hash", "packages", "command", "rows"} <= set(info)
    shown = capsys.readouterr().out
    assert "fp32 1x12 h1 d8 causal" in shown
    assert "checked" in shown
    assert "CPU; " in shown, "where it was made"
    assert stored.folder.name in shown.replace("\n", ""), "where it lies"


def test_dry_run_prints_the_plan_and_writes_nothing(
    scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(scenario=scenario, out=tmp_path / "r", dry_run=True, device="cpu") == 0
    assert "2 cases, 8 rows" in capsys.readouterr().out
    assert not (tmp_path / "r").exists()


def test_a_crash_is_exit_3_and_resume_runs_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    same = provenance()  # a tree that is edited between the two runs is another run's
    monkeypatch.setattr("attnbench.cli.run.provenance", lambda own: same)
    scenario = write(tmp_path, f"backends: ['{BAD}:KILL', eager]")
    out = tmp_path / "r"
    assert run(scenario=scenario, out=out, device="cpu") == 3
    first = read_run(only_run(out))
    assert len(first.lines) == 8
    assert {r.outcome for r in first.lines if r.backend.endswith("KILL")} == {"crashed"}
    assert run(scenario=scenario, out=out, device="cpu", resume=True) == 3
    again = read_run(only_run(out))
    assert len(again.lines) == 10  # the two crashed rows once more, nothing else
    assert len(again.records) == 8


def test_only_failed_runs_what_went_wrong_in_the_newest_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    states = [{**provenance(), "commit": commit} for commit in ("a" * 40, "b" * 40)]
    monkeypatch.setattr("attnbench.cli.run.provenance", lambda own: states[0])
    scenario = write(tmp_path, f"backends: ['{BAD}:MEMORY', '{BAD}:ZEROS', eager]")
    out = tmp_path / "r"
    with pytest.raises(NoBaseline, match="no run of tiny on cpu"):
        run(scenario=scenario, out=out, device="cpu", only_failed=True)
    assert run(scenario=scenario, out=out, device="cpu") == 1
    first = only_run(out)
    capsys.readouterr()
    assert run(scenario=scenario, out=out, device="cpu", only_failed=True, dry_run=True) == 0
    assert "1 cases, 4 rows" in capsys.readouterr().out
    assert run(scenario=scenario, out=out, device="cpu", only_failed=True, only=["*1x12*"]) == 0
    assert "nothing of this selection failed" in capsys.readouterr().out

    assert run(scenario=scenario, out=out, device="cpu", only_failed=True, resume=True) == 1
    again = read_run(first)
    assert len(again.lines) == len(again.records) + 4  # appended to the run itself: nothing has changed
    assert {r.outcome for r in again.lines[-4:]} == {"oom", "check-failed"}

    monkeypatch.setattr("attnbench.cli.run.provenance", lambda own: states[1])
    assert run(scenario=scenario, out=out, device="cpu", only_failed=True, resume=True) == 1
    (fresh,) = (read_run(path) for path in out.iterdir() if path != first)
    assert fresh.commit == "b" * 40, "other code gets a run of its own"
    assert len(fresh.lines) == fresh.info["rows"] == 4
    assert fresh.info["only_failed_of"] == first.name


def test_a_wrong_kernel_of_the_users_is_exit_1(scenario: Path, tmp_path: Path) -> None:
    code = run(scenario=scenario, backend=[f"{BAD}:ZEROS"], only=["*1x8 *"], out=tmp_path / "r", device="cpu")
    assert code == 1
    stored = read_run(only_run(tmp_path / "r"))
    assert {r.outcome for r in stored.lines} == {"check-failed"}
    assert all(r.median_ms is None for r in stored.lines)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"backend": ["tritn"]}, "Did you mean 'triton'"),
        ({"only": ["nothing"]}, "no case matches"),
        ({"backend": ["not/there.py:KERNEL"]}, "no file"),
    ],
)
def test_bad_usage_is_a_message_and_writes_nothing(
    scenario: Path, tmp_path: Path, options: dict[str, list[str]], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        run(scenario=scenario, out=tmp_path / "r", device="cpu", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "r").exists()


def test_exit_codes_judge_ours_and_the_users_only() -> None:
    def row(backend: str, outcome: str) -> Record:
        return Record("id", "attention", {}, "label", backend, "forward", outcome)

    assert exit_code([row("triton", "ok"), row("sdpa_flash", "unsupported")]) == 0
    assert exit_code([row("sdpa_flash", "check-failed")]) == 0
    assert exit_code([row("triton", "check-failed"), row("eager", "oom")]) == 1
    assert exit_code([row("my.module:K", "check-failed")]) == 1
    assert exit_code([row("triton", "skipped-memory")]) == 3


def started(scenario: Path, out: Path, rows: int) -> subprocess.Popen[bytes]:
    """`attnbench run` in a process of its own, once it has stored `rows` rows and hangs in the next."""
    command = [sys.executable, "-m", "attnbench", "run", str(scenario), "--out", str(out), "--device", "cpu"]
    process = subprocess.Popen(command, env=worker_environment("cpu"), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        lines = list(out.glob("*/cases.jsonl"))
        if lines and lines[0].read_text().count("\n") >= rows:
            break
        time.sleep(0.05)
    time.sleep(0.3)
    return process


def test_ctrl_c_keeps_what_is_finished_and_ends_the_worker(tmp_path: Path) -> None:
    scenario = write(tmp_path, f"backends: [eager, '{BAD}:HANG']")
    out = tmp_path / "r"
    process = started(scenario, out, 2)
    workers = children_of(process.pid)
    assert len(workers) == 1
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr.decode()
    assert b"--resume" in stderr
    assert b"eager" in stdout
    folder = only_run(out)
    rows = [json.loads(line) for line in (folder / "cases.jsonl").read_text().splitlines()]
    assert [(r["backend"], r["outcome"]) for r in rows] == [("eager", "ok"), ("eager", "ok")]
    assert json.loads((folder / "run.json").read_text())["finished_at"] is None
    assert gone(workers[0])


@pytest.mark.skipif(sys.platform != "linux", reason="ending with the parent is a Linux service")
def test_a_killed_run_keeps_its_rows_and_leaves_no_worker(tmp_path: Path) -> None:
    scenario = write(tmp_path, f"backends: [eager, '{BAD}:HANG']")
    out = tmp_path / "r"
    process = started(scenario, out, 2)
    workers = children_of(process.pid)
    process.kill()
    process.communicate(timeout=60)
    stored = read_run(only_run(out))
    assert len(stored.lines) == 2
    assert not stored.finished
    assert gone(workers[0])


def gone(pid: int) -> bool:
    """Whether a process has ended, within five seconds."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def children_of(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == pid and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return found
