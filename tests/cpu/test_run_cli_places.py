"""`attnbench run` as a process, where folders are full, not writable, or named in other letters than the locale's."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from attnbench.measure.supervisor import worker_environment
from attnbench.results.runs import read_run

BAD = Path(__file__).parent / "misbehaving_backends.py"
TEXT = """
name: {name}
description: one shape
backends: {backends}
defaults: {{dtype: fp32, heads: 1, head_dim: 8, batch: 1, causal: true}}
measure: {{samples: 3, min_seconds: 0.0, max_seconds: 0.02, timeout_seconds: 60}}
cases:
  - seqlen: 8
"""
FILE_BYTES = 4096
"""Room for `run.json` and the first record, not for all six."""


def attnbench_run(
    scenario: Path,
    out: Path,
    *,
    small_files: bool = False,
    environment: Mapping[str, str] = {},
) -> tuple[int, str]:
    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))

    done = subprocess.run(
        [sys.executable, "-m", "attnbench", "run", str(scenario), "--out", str(out), "--device", "cpu"],
        env=worker_environment("cpu") | dict(environment),
        capture_output=True,
        preexec_fn=limit if small_files else None,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stderr.decode(errors="replace")


def write(path: Path, name: str = "one", backends: str = "[eager]") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(TEXT.format(name=name, backends=backends), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "locale", [{}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}], ids=["own", "C"]
)
def test_names_of_any_script(tmp_path: Path, locale: dict[str, str]) -> None:
    place = tmp_path / "ünï ✓"
    code, errors = attnbench_run(write(place / "größe.yaml", name="größe-測"), place / "r", environment=locale)
    assert code == 0, errors
    (folder,) = (place / "r").iterdir()
    stored = read_run(folder)
    assert stored.finished
    assert stored.scenario == "größe-測"
    assert stored.info["scenario_file"].endswith("ünï ✓/größe.yaml")


def test_a_path_that_is_no_utf8(tmp_path: Path) -> None:
    place = tmp_path / os.fsdecode(b"gr\xf6\xdfe")
    try:
        scenario = write(place / "one.yaml")
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    code, errors = attnbench_run(scenario, place / "r")
    assert code == 0, errors


def test_a_folder_that_cannot_be_written_is_exit_2_in_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, errors = attnbench_run(write(tmp_path / "one.yaml"), tmp_path / "file" / "r")
    assert code == 2
    assert "cannot write" in errors
    assert "--out" in errors
    assert "Traceback" not in errors


def test_a_file_that_cannot_grow_is_exit_2_even_after_a_failed_check(tmp_path: Path) -> None:
    scenario = write(tmp_path / "one.yaml", backends=f"['{BAD}:ZEROS']")
    scenario.write_text(scenario.read_text() + "  - seqlen: 9\n  - seqlen: 10\n")
    code, errors = attnbench_run(scenario, tmp_path / "r", small_files=True)
    assert code == 2, errors
    assert "cannot write" in errors
    assert "Traceback" not in errors
    (folder,) = (tmp_path / "r").iterdir()
    stored = read_run(folder)
    assert not stored.finished
    assert stored.notes == []
    assert {record.outcome for record in stored.lines} == {"check-failed"}
