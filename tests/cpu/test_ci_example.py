"""examples/ci/pull_request.yml: its own scripts, run on a pull request that slows a kernel."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_rerun import KERNEL, SCENARIO, git

from attnbench.measure.supervisor import worker_environment

ROOT = Path(__file__).parents[2]
WORKFLOW: dict[Any, Any] = yaml.safe_load((ROOT / "examples/ci/pull_request.yml").read_text(encoding="utf-8"))
STEPS: list[dict[str, Any]] = WORKFLOW["jobs"]["compare"]["steps"]


def step(name: str) -> str:
    return next(str(one["run"]) for one in STEPS if one.get("name") == name)


def test_strangers_are_kept_off_the_runner_and_nothing_may_be_written() -> None:
    assert WORKFLOW[True] == "pull_request"  # YAML 1.1 reads `on` so
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert "head.repo.full_name == github.repository" in WORKFLOW["jobs"]["compare"]["if"]
    assert (ROOT / WORKFLOW["env"]["SCENARIO"]).is_file()


@pytest.mark.skipif(not (shutil.which("git") and shutil.which("bash")), reason="no git or bash")
def test_the_gate_closes_on_a_slower_kernel(tmp_path: Path) -> None:
    repository, tools = tmp_path / "mine", tmp_path / "bin"
    for folder in (repository / "kernels", tools):
        folder.mkdir(parents=True)
    command = tools / "attnbench"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -P -m attnbench "$@"\n')
    command.chmod(0o755)
    git(repository, "init", "-q")
    (repository / "pair.yaml").write_text(SCENARIO.format(backend="kernels/mine.py:KERNEL"))
    for seconds in (0.001, 0.004):
        (repository / "kernels" / "mine.py").write_text(KERNEL.format(seconds=seconds))
        git(repository, "add", "-A")
        git(repository, "commit", "-q", "-m", f"sleeps {seconds}")
    environment = worker_environment("cpu") | {
        "OMP_NUM_THREADS": "1",
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
        "ATTNBENCH_RESULTS": str(repository / "results"),
        "SCENARIO": "pair.yaml",
        "ONLY": "*1x16 *",
    }
    done = subprocess.run(
        ["bash", "-e", "-c", step("Faster or slower?")],
        cwd=repository, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    subprocess.run(["bash", "-e", "-c", step("Reports")], cwd=repository, env=environment, check=True)
    summary = (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert "Of 1 row: 1 regressed." in summary
    assert summary.count("## pair on CPU") == 2
    assert len(list((repository / "results").glob("*/report.html"))) == 2
