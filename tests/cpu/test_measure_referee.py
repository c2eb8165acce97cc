"""The second opinion of cuda-bench, with a stand-in for the package."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attnbench.measure import referee
from attnbench.measure.sweep import machine_words


class Bench:
    """Runs what was registered once, as `cuda.bench` does, and 'measures' two microseconds more than our clock."""

    def __init__(self) -> None:
        self.registered: list[Callable[[Any], None]] = []
        self.arguments: list[str] = []
        self.launched = 0

    def register(self, function: Callable[[Any], None]) -> None:
        self.registered.append(function)

    def run_all_benchmarks(self, arguments: list[str]) -> None:
        self.arguments = arguments
        for function in self.registered:
            function(SimpleNamespace(exec=self.execute))

    def execute(self, launcher: Callable[[Any], None], *, batched: bool) -> None:
        assert not batched
        self.launched += 1


def test_each_kernel_is_timed_by_us_before_and_after_the_referee(tmp_path: Path) -> None:
    bench, order = Bench(), []

    def own(call: Callable[[], Any]) -> list[float]:
        order.append(bench.launched)
        return [call()] * 3

    def read(path: str) -> dict[str, Any]:
        assert path in bench.arguments
        assert Path(path).parent == tmp_path
        return {name: [SimpleNamespace(samples=[t, t])] for name, t in (("a_kernel", 101e-6), ("b", 40e-6))}

    times = referee.referee([("a kernel", lambda: 100.0), ("b", lambda: 40.0)], own, bench, read, tmp_path)
    assert times == {"a kernel": {"own": 100.0, "cuda-bench": 101.0}, "b": {"own": 40.0, "cuda-bench": 40.0}}
    assert order == [0, 1, 1, 2]
    assert referee.gap_percent(times) == pytest.approx(0.99, abs=0.01)


def test_without_the_package_there_is_no_second_opinion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(referee, "installed", lambda: False)
    assert referee.second_opinion() is None


@pytest.mark.parametrize(
    ("stdout", "stderr", "want"),
    [
        ('noise\n{"k": {"own": 102.0, "cuda-bench": 100.0}}\n', "", 2.0),
        ("", "Traceback\nRuntimeError: no device\n", "cuda-bench gave no times: RuntimeError: no device"),
        ("", "", "cuda-bench gave no times: exit code 1"),
    ],
)
def test_what_the_process_says_is_read_and_its_failure_is_words(
    monkeypatch: pytest.MonkeyPatch, stdout: str, stderr: str, want: Any
) -> None:
    monkeypatch.setattr(referee, "installed", lambda: True)
    done = subprocess.CompletedProcess([], 1, stdout, stderr)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    found = referee.second_opinion()
    assert found is not None
    assert found.get("gap_percent", found.get("error")) == want


def test_a_referee_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: Any, **__: Any) -> None:
        raise subprocess.TimeoutExpired("x", 1)

    monkeypatch.setattr(referee, "installed", lambda: True)
    monkeypatch.setattr(subprocess, "run", hang)
    assert "longer than" in (referee.second_opinion() or {})["error"]


def test_the_run_says_what_the_referee_said() -> None:
    found = {"timer_gap_percent": 0.5, "noise_floor_percent": 0.2}
    assert "cuda-bench" not in machine_words(found)
    agrees = {"times_us": {}, "gap_percent": 0.8}
    assert machine_words({**found, "referee": agrees}).endswith("cuda-bench agrees within 0.80 %")
    assert machine_words({**found, "referee": {"error": "cuda-bench gave no times: x"}}).endswith("no times: x")
