"""The README's commands that need a GPU, each on a slice that takes seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "arguments",
    [
        ["doctor"],
        ["run", "scenarios/h100.yaml", "--only", "*1x16384 h16 d128 causal*", "-b", "sdpa_cudnn", "-b", "triton"],
        ["check", "--scenario", "scenarios/smoke.yaml", "-b", "triton"],
    ],
    ids=lambda a: a[0],
)
def test_command(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNBENCH_RESULTS", str(tmp_path))
    done = subprocess.run([sys.executable, "-m", "attnbench", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
