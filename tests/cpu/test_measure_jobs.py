"""From scenario to jobs: selection, backends by name, resuming, predictions."""

from __future__ import annotations

import pytest

from attnbench.errors import UserError
from attnbench.measure import interpreter
from attnbench.measure.jobs import choose_device, default_baseline, memory_bytes, plan_jobs, seconds, without
from attnbench.scenario import Scenario, loads

TEXT = """
name: plan
description: three cases
backends: [triton, eager, sdpa_cudnn]
defaults: {dtype: bf16, heads: 2, head_dim: 64}
cases:
  - name: small
    tags: [quick]
    seqlen: 64
    matrix: {causal: [true, false]}
  - name: only eager
    backends: [eager, compile]
    seqlen: 64
    causal: true
  - name: residual
    op: attnres_phase2
    backends: [triton, eager]
    rows: 4
    hidden: 32
"""


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    return loads(TEXT)


def rows(scenario: Scenario, device: str = "cuda", **options: object) -> dict[str, tuple[str, ...]]:
    return {j.case.label: tuple(r.backend for r in j.rows) for j in plan_jobs(scenario, device, **options)}  # type: ignore[arg-type]


def test_equal_cases_become_one_job_and_the_baseline_comes_first(scenario: Scenario) -> None:
    assert rows(scenario) == {
        "bf16 1x64 h2 d64 causal": ("sdpa_cudnn", "triton", "eager", "compile"),
        "bf16 1x64 h2 d64 full": ("sdpa_cudnn", "triton", "eager"),
        "bf16 4x32": ("eager", "triton"),
    }


def test_backends_by_name_stay_where_the_scenario_plans_them(scenario: Scenario) -> None:
    assert rows(scenario, chosen=["compile"]) == {"bf16 1x64 h2 d64 causal": ("compile",)}
    every = rows(scenario, chosen=["my_module:KERNEL"])
    assert len(every) == 3
    assert set(every.values()) == {("my_module:KERNEL",)}
    assert "bf16 4x32" not in rows(scenario, chosen=["flex"])  # flex computes attention only


def test_unknown_backend_has_a_suggestion(scenario: Scenario) -> None:
    with pytest.raises(UserError, match="Did you mean 'triton'"):
        plan_jobs(scenario, "cpu", ["trtion"])


@pytest.mark.parametrize("glob", ["full", "*full", "small", "quick", "bf16 1x64*"])
def test_only_takes_label_name_tag_and_globs(scenario: Scenario, glob: str) -> None:
    assert "bf16 1x64 h2 d64 full" in rows(scenario, only=[glob])
    assert "bf16 4x32" not in rows(scenario, only=[glob])


def test_only_that_matches_nothing_shows_labels(scenario: Scenario) -> None:
    with pytest.raises(UserError, match="1x64 h2 d64 causal"):
        plan_jobs(scenario, "cpu", only=["fp8"])


def test_interleaving_needs_a_gpu_and_a_fast_baseline(scenario: Scenario) -> None:
    assert default_baseline("attention", "cuda") == "sdpa_cudnn"
    assert default_baseline("attention", "cpu") == default_baseline("attnres_phase2", "cuda") == "eager"
    assert {j.baseline for j in plan_jobs(scenario, "cpu")} == {None}
    assert [j.baseline for j in plan_jobs(scenario, "cuda")] == ["sdpa_cudnn", "sdpa_cudnn", None]


def test_what_is_done_is_left_out(scenario: Scenario) -> None:
    job = plan_jobs(scenario, "cpu")[0]
    done = {(job.case.case_id, "triton", "forward"), (job.case.case_id, "eager", "forward")}
    done.add((job.case.case_id, "eager", "backward"))
    left = without(job, done)
    assert left is not None
    by_name = {row.backend: row.passes for row in left.rows}
    assert by_name["triton"] == ("backward",)
    assert "eager" not in by_name
    everything = {(job.case.case_id, row.backend, p) for row in job.rows for p in row.passes}
    assert without(job, everything) is None


def test_predictions_are_positive_and_grow(scenario: Scenario) -> None:
    for job in plan_jobs(scenario, "cpu"):
        assert memory_bytes(job) > 0
        assert all(seconds(job, row) > 0 for row in job.rows)
    small, large = (loads(TEXT.replace("seqlen: 64", f"seqlen: {n}")) for n in (64, 4096))
    assert memory_bytes(plan_jobs(large, "cuda")[0]) > memory_bytes(plan_jobs(small, "cuda")[0])
    assert interpreter.too_big(plan_jobs(small, "cpu")[0].case) is None
    assert "interpreter" in str(interpreter.too_big(plan_jobs(large, "cpu")[0].case))


def test_device_without_a_visible_board_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert choose_device(None) == "cpu"
    assert choose_device("cuda") == "cuda"
