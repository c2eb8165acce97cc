"""`history`: change points in noise and at real steps, the order of commits, and what is told."""

from __future__ import annotations

import json
import math
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_runs import H200, attention_case, store, timed

from attnbench.cli.history import history
from attnbench.results.changepoints import Point, steps
from attnbench.results.history import also_changed, arrange, collect, commit_order, utc
from attnbench.results.history_view import as_csv, as_json, as_markdown, as_text, odd_newest, sparkline
from attnbench.results.record import Record
from attnbench.results.runs import NoBaseline, Run

OWN_ERROR = 0.0025


def points(levels: list[float] | np.ndarray) -> list[Point]:
    return [Point(math.log(level), OWN_ERROR) for level in levels]


@pytest.mark.parametrize("noise", [0.001, 0.003, 0.006])
def test_noise_alone_has_no_step(noise: float) -> None:
    for seed in range(300):
        rng = np.random.default_rng(seed)
        count = (4, 5, 6, 8, 12, 20, 40)[seed % 7]
        assert steps(points(rng.lognormal(0, noise, count))) == []


def test_wild_noise_has_hardly_a_step() -> None:
    found = 0
    for seed in range(300):
        rng = np.random.default_rng(seed)
        found += bool(steps(points(np.exp(0.02 * rng.standard_t(4, (5, 8, 12, 30)[seed % 4])))))
    assert found <= 9


def test_drift_below_the_threshold_is_no_step_of_it() -> None:
    assert steps(points(np.linspace(1, 1.018, 30))) == []


@pytest.mark.parametrize("change", [0.03, -0.03, 0.2])
@pytest.mark.parametrize(("count", "at"), [(8, 4), (12, 8), (20, 17), (40, 20)])
def test_a_real_step_is_found_where_it_is(change: float, count: int, at: int) -> None:
    right = 0
    for seed in range(40):
        levels = np.random.default_rng(seed).lognormal(0, 0.003, count)
        levels[at:] *= 1 + change
        found = steps(points(levels))
        right += len(found) == 1 and abs(found[0].at - at) <= 1 and abs(found[0].ratio - 1 - change) < 0.01
    assert right >= 37


def test_steps_up_and_down_again() -> None:
    rng = np.random.default_rng(0)
    levels = rng.lognormal(0, 0.003, 30)
    levels[10:20] *= 1.06
    up, down = steps(points(levels))
    assert (up.at, down.at) == (10, 20)
    assert up.ratio > 1.05
    assert down.ratio < 0.95


def test_one_odd_run_is_no_step() -> None:
    for at in range(12):
        levels = np.random.default_rng(at).lognormal(0, 0.003, 12)
        levels[at] *= 1.3
        assert steps(points(levels)) == []


def test_two_runs_on_a_side_are_the_least() -> None:
    assert steps([]) == steps(points([1.0])) == steps(points([1, 1, 1.5])) == []
    (step,) = steps(points([1, 1, 1.5, 1.5]))
    assert step.at == 2


def test_a_thousand_runs_take_a_moment() -> None:
    levels = np.random.default_rng(0).lognormal(0, 0.003, 1000)
    levels[300:] *= 1.05
    began = time.process_time()
    assert [step.at for step in steps(points(levels))] == [300]
    assert time.process_time() - began < 8


def rows(ms: float, seed: int = 0, **fields: Any) -> list[Record]:
    rng = np.random.default_rng(seed)
    case = attention_case(4096)
    return [timed(case, b, "forward", ms * f, rng=rng, **fields) for b, f in (("triton", 1.0), ("sdpa_cudnn", 0.9))]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Ten runs of ten commits, one a day; the Triton kernel is 6 % slower from the seventh on."""
    for day in range(10):
        info = {"commit": f"{day:040x}", "commit_time": f"2026-11-{day + 1:02}T12:00:00+01:00"}
        records = rows(1.0, seed=day)
        if day >= 6:
            records[0] = rows(1.06, seed=day)[0]
        store(tmp_path, records, **info)
    return tmp_path


def told(results: Path, capsys: pytest.CaptureFixture[str], **options: Any) -> str:
    arguments: dict[str, Any] = {"backend": [], "pass_": [], "threshold": "2%", "dirty": False, "format": "table"}
    assert history(case="4x4096", results=results, **(arguments | options)) == 0
    return capsys.readouterr().out


def test_a_step_is_told_with_its_commits_and_the_next_command(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = told(results, capsys)
    assert f"slower since {6:040x}"[:23] in text.replace("\n    ", " ")
    first, last = f"{6:040x}"[:10], f"{5:040x}"[:10]
    assert f"attnbench compare {last} {first} --rerun scenarios/h100.yaml --only {attention_case(4096).case_id}" in text
    assert "1 step of 2 % or more in 2 series: 1 to slower." in text
    assert "in order of time" in text
    assert "▁" in text
    assert "█" in text
    only = told(results, capsys, backend=["sdpa_cudnn"], pass_=["forward"])
    assert "No step of 2 % or more in 1 series." in only


def test_json_csv_and_markdown_hold_it_too(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(told(results, capsys, format="json", backend=["triton"]))
    (series,) = data["series"]
    assert len(series["entries"]) == 10
    (step,) = series["steps"]
    assert step["since"] == f"{6:040x}"
    assert step["ratio"] == pytest.approx(1.06, abs=0.01)
    assert told(results, capsys, format="csv").count("\n") == 21
    text = told(results, capsys, format="md")
    assert text.startswith("1 step of 2 %")
    assert text.count("<details>") == 2


def test_machines_and_uncommitted_changes_are_kept_apart(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store(results, rows(2.0), gpu={**H200, "name": "NVIDIA H100 80GB HBM3"}, commit="e" * 40)
    store(results, rows(3.0), dirty=True, commit="f" * 40)
    text = told(results, capsys)
    assert "NVIDIA H100 80GB HBM3" in text
    assert "in 4 series" in text
    assert "1 run with uncommitted changes left out" in text
    assert ",True," in told(results, capsys, dirty=True, format="csv")


def test_nothing_that_matches_is_exit_4(results: Path) -> None:
    with pytest.raises(NoBaseline, match="no run under"):
        history(case="none", backend=[], pass_=[], threshold="2%", dirty=False, format="table", results=results)
    assert NoBaseline.exit_code == 4


def test_commits_are_ordered_as_git_has_them_not_by_their_clocks(tmp_path: Path) -> None:
    def git(*words: str, when: str = "2026-01-01T00:00:00Z") -> str:
        names = {"GIT_COMMITTER_DATE": when, "GIT_AUTHOR_DATE": when, "PATH": "/usr/bin:/bin"}
        done = subprocess.run(
            ["git", "-c", "user.name=n", "-c", "user.email=e", *words],
            cwd=tmp_path, env=names, capture_output=True, text=True, check=True,
        )  # fmt: skip
        return done.stdout.strip()

    git("init", "-q")
    commits = []
    for when in ("2026-03-01T00:00:00Z", "2026-01-01T00:00:00Z", "2026-02-01T00:00:00Z"):
        git("commit", "-q", "--allow-empty", "-m", when, when=when)
        commits.append(git("rev-parse", "HEAD"))
    order = commit_order(commits, tmp_path)
    assert order is not None
    assert sorted(commits, key=lambda commit: order[commit]) == commits
    assert commit_order([*commits, "0" * 40], tmp_path) is None
    assert commit_order([*commits, ""], tmp_path) is None
    runs = [_run(commit, when) for commit, when in zip(commits, ("2026-03", "2026-01", "2026-02"), strict=True)]
    series, _ = collect(reversed(runs), "4x4096", backends=["triton"])
    arrange(series, order, 0.02)
    assert [entry.commit for entry in series[0].entries] == commits
    arrange(series, None, 0.02)
    assert [entry.commit for entry in series[0].entries] == [commits[i] for i in (1, 2, 0)]


def _run(commit: str, month: str, **info: Any) -> Run:
    run = Run(Path("results/made-up"), {"commit": commit, "commit_time": f"{month}-01T00:00:00Z", "gpu": H200, **info})
    run.__dict__["lines"] = rows(1.0)
    return run


def test_times_of_other_zones_sort_as_one() -> None:
    assert utc("2026-12-01T01:30:00+09:00") == "2026-11-30T16:30:00Z"
    assert utc("not a time") == "not a time"


def test_failures_stand_in_the_table_and_in_no_step(capsys: pytest.CaptureFixture[str], results: Path) -> None:
    store(results, rows(1.0, outcome="check-failed", median_ms=None, samples_ms=[], ci_ms=None), commit="a" * 40)
    text = told(results, capsys)
    assert "check-failed" in text
    assert "11 runs of 11 commits" in text


def test_a_newest_run_that_is_off_asks_for_another_one() -> None:
    runs = [_run(str(i), f"2026-0{i + 1}") for i in range(6)]
    runs[-1].__dict__["lines"] = rows(1.2)
    series, _ = collect(runs, "4x4096", backends=["triton"])
    arrange(series, None, 0.02)
    assert series[0].steps == []
    assert "The newest run is 20" in odd_newest(series[0], 0.02)
    assert "one run cannot tell" in as_text(series, 0.02, 80)


def test_what_else_changed_is_named() -> None:
    before = _run("a", "2026-01", packages={"torch": "2.11"})
    after = _run("b", "2026-02", packages={"torch": "2.12"})
    after.info["gpu"] = {**H200, "uuid": "GPU-2", "driver": "590"}
    assert also_changed(before, after) == ["torch 2.11 → 2.12", "driver 580.159 → 590", "another board"]


def test_bars_do_not_make_a_mountain_of_noise() -> None:
    assert len(set(sparkline([1.0, 1.002, 0.999, 1.001]))) <= 2
    assert sparkline([1.0, 2.0]) == "▁█"
    assert sparkline([]) == ""
    assert len(sparkline([1.0] * 500)) == 60


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_table_fits(results: Path, width: int) -> None:
    from attnbench.results.runs import find_runs

    series, _ = collect(reversed(find_runs(results)), "4x4096")
    arrange(series, None, 0.02)
    commands = [line for line in as_text(series, 0.02, width).splitlines() if "attnbench compare" not in line]
    assert max(map(len, commands)) <= width
    for text in (as_markdown(series, 0.02), as_json(series, 0.02), as_csv(series)):
        assert text
