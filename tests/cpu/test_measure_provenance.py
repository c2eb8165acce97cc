"""What a run says about its code and machine."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from attnbench.cli.doctor import doctor
from attnbench.measure.peaks import peak_of
from attnbench.measure.provenance import git_state, kernel_hash, provenance
from attnbench.measure.telemetry import Telemetry, open_board, reasons

GIT = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "работа"  # a path need not be ASCII
    (root / "attnbench").mkdir(parents=True)
    (root / "attnbench" / "__init__.py").write_text("")
    (root / "kernel.cu").write_text("one")
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "first"]):
        subprocess.run([*GIT, *command], cwd=root, check=True)
    return root


def test_clean_tree(repository: Path) -> None:
    state = git_state(repository)
    assert len(str(state["commit"])) == 40
    assert state["dirty"] is False
    assert state["diff_hash"] is None


def test_edited_and_untracked_kernels_change_the_hash(repository: Path) -> None:
    (repository / "kernel.cu").write_text("two")
    edited = git_state(repository)
    (repository / "new.cu").write_text("three")
    added = git_state(repository)
    (repository / "new.cu").write_text("four")
    changed = git_state(repository)
    assert edited["dirty"]
    assert added["dirty"]
    assert len({edited["diff_hash"], added["diff_hash"], changed["diff_hash"]}) == 3


def test_detached_head_and_shallow_clone(repository: Path, tmp_path: Path) -> None:
    shallow = tmp_path / "shallow"
    subprocess.run(["git", "clone", "-q", "--depth", "1", f"file://{repository}", str(shallow)], check=True)
    subprocess.run(["git", "checkout", "-q", "--detach"], cwd=shallow, check=True)
    state = git_state(shallow)
    assert state["commit"] == git_state(repository)["commit"]
    assert state["branch"] is None


def test_without_git_everything_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(git_state(tmp_path).values()) == {None}
    monkeypatch.setenv("PATH", "")
    assert shutil.which("git") is None
    assert set(git_state(tmp_path).values()) == {None}


def test_installed_inside_another_repository_is_not_that_repository(tmp_path: Path) -> None:
    subprocess.run([*GIT, "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / "theirs").write_text("")
    subprocess.run([*GIT, "add", "-A"], cwd=tmp_path, check=True)
    subprocess.run([*GIT, "commit", "-qm", "theirs"], cwd=tmp_path, check=True)
    assert git_state(tmp_path)["commit"] is None


def test_kernel_hash_covers_a_users_own_file(tmp_path: Path) -> None:
    own = tmp_path / "mine.py"
    own.write_text("a = 1")
    first = kernel_hash([own])
    assert first == kernel_hash([own]) != kernel_hash()
    own.write_text("a = 2")
    assert kernel_hash([own]) != first


def test_provenance_is_plain_data() -> None:
    found = provenance()
    json.dumps(found)
    assert found["packages"]["torch"]
    assert found["platform"]["cpus"]


def test_peaks_go_by_the_exact_name() -> None:
    h200, h100 = peak_of("NVIDIA H200"), peak_of("NVIDIA H100 80GB HBM3")
    assert h200
    assert h100
    assert h200.tb_s > h100.tb_s
    assert peak_of("NVIDIA H200 with a new suffix") is None
    assert peak_of(None) is None


def test_clock_reasons_leave_idle_out() -> None:
    assert reasons(0x1) == []
    assert reasons(0x4 | 0x1) == ["software power cap"]
    assert reasons(0x40 | 0x8) == ["hardware slowdown", "hardware thermal slowdown"]


def test_telemetry_without_a_board_says_nothing() -> None:
    assert open_board(None) is None
    telemetry = Telemetry("GPU-00000000-0000-0000-0000-000000000000")
    telemetry.start()
    telemetry.stop()
    assert telemetry.summary() == {}


def test_doctor_explains_what_it_notes(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(format="json") == 0
    data = json.loads(capsys.readouterr().out)
    topics = {f["topic"]: f for f in data["findings"]}
    assert {"torch", "triton", "GPU", "git"} <= set(topics)
    assert all(f["meaning"] for f in data["findings"] if f["state"] != "ok")
    assert doctor() == 0
    assert "torch" in capsys.readouterr().out
